"""What the layers of a model take and give."""

from __future__ import annotations

from typing import TypeAlias

from torch import Tensor

Value: TypeAlias = Tensor | tuple[Tensor, ...]
"""The input of a layer, and its output: the input of the next."""
