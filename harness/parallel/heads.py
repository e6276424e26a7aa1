"""How wide a tensor-parallel rank's share of a layer may be: whole attention heads, equal widths.

An attention module reshapes its projections to (..., heads, head_dim), so a share must be whole heads. With
grouped-query attention there can be fewer key/value heads than ranks; neighbouring ranks then hold the same
one.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from harness.config.errors import UserError


def copies_of_share(width: int, owner: nn.Module, config: Any, size: int, name: str) -> int:
    """How many neighbouring ranks hold the same share of a projection of `width` outputs, a child of `owner`.

    1, except for key/value heads that are fewer than the `size` ranks. Raises UserError, naming `name` and
    the sizes that work, where the ranks cannot share the heads or the width.
    """
    heads = attention_heads(owner, config)
    if heads is None:
        require_width(width, size, name)
        return 1
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    possible = [n for n in _divisors(heads) if kv_heads % n == 0 or n % kv_heads == 0]
    if size not in possible:
        kind = f"{heads} attention heads" + (f" and {kv_heads} key/value heads" if kv_heads != heads else "")
        raise UserError(
            f"tensor_parallel.autotp_size {size} does not divide the {kind} of {name}: use {_either(possible)}"
        )
    head_dims = {getattr(owner, attribute, None) for attribute in ("head_dim", "v_head_dim")}
    if size > kv_heads and width in {kv_heads * dim for dim in head_dims if dim}:
        return size // kv_heads
    require_width(width, size, name)
    return 1


def attention_heads(owner: nn.Module, config: Any) -> int | None:
    """The number of query heads of an attention module; None where `owner` is none."""
    for attribute in ("num_heads", "num_attention_heads"):
        if isinstance(heads := getattr(owner, attribute, None), int):
            return heads
    if hasattr(owner, "head_dim") or hasattr(owner, "num_key_value_groups"):
        return getattr(config, "num_attention_heads", None)
    return None


def require_width(width: int, size: int, name: str) -> None:
    """Raise UserError unless `size` divides `width`."""
    if width % size:
        raise UserError(
            f"tensor_parallel.autotp_size {size} does not divide the width {width} of {name}: "
            f"use {_either([n for n in _divisors(width) if n <= 64])}"
        )


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _either(numbers: list[int]) -> str:
    *most, last = map(str, numbers)
    return f"{', '.join(most)} or {last}" if most else last
