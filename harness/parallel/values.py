"""What the layers of a model take and give."""

from __future__ import annotations

from typing import Any, TypeAlias

from torch import Tensor
from torch._ops import OpOverload

Value: TypeAlias = Tensor | tuple[Tensor, ...]
"""The input of a layer, and its output: the input of the next."""
Argument: TypeAlias = Any
"""What a module of a HuggingFace model may be given: tensors, flags, caches, mappings of these."""
Positional: TypeAlias = tuple[Argument, ...]
Keyword: TypeAlias = dict[str, Argument]
Operation: TypeAlias = OpOverload[..., object]
"""An operation of torch, as a dispatch mode is given it."""
