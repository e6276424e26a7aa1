"""Types of the inputs and outputs of a model's layers."""

from __future__ import annotations

from typing import Any, TypeAlias

from torch import Tensor
from torch._ops import OpOverload

Value: TypeAlias = Tensor | tuple[Tensor, ...]
"""The input or output of a pipeline layer; a layer's output is the next layer's input."""
Argument: TypeAlias = Any
"""An argument of a module of a HuggingFace model: a tensor, a flag, a cache, a mapping of these."""
Positional: TypeAlias = tuple[Argument, ...]
Keyword: TypeAlias = dict[str, Argument]
Operation: TypeAlias = OpOverload[..., object]
"""An operation of torch, as a dispatch mode receives it."""
