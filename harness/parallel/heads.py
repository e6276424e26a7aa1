"""How wide a tensor-parallel rank's share of a layer may be: whole attention heads, equal widths.

An attention module reshapes its projections to (..., heads, head_dim), so a share must be whole heads. With
grouped-query attention there can be fewer key/value heads than ranks; neighbouring ranks then hold the same
one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from harness.config.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Heads:
    """How many query and key/value heads an attention module has, before it is cut."""

    query: int
    key_value: int


def heads_of(module: nn.Module, config: Any) -> Heads | None:
    """The heads of an attention module, as it says itself, else as the config says; None where `module` is none."""
    layers, index = getattr(config, "per_layer_config", None), getattr(module, "layer_idx", None)
    if layers is not None and index is not None:
        config = layers[index]
    query = _own_size(module, "num_heads", "num_attention_heads")
    if query is None and (hasattr(module, "head_dim") or hasattr(module, "num_key_value_groups")):
        query = getattr(config, "num_attention_heads", None)
    if query is None:
        return None
    key_value = _own_size(module, "num_key_value_heads", "num_kv_heads")
    groups = _own_size(module, "num_key_value_groups")
    if key_value is None and groups and query % groups == 0:
        key_value = query // groups
    return Heads(query=query, key_value=key_value or getattr(config, "num_key_value_heads", None) or query)


def copies_of_share(width: int, owner: nn.Module, heads: Heads | None, size: int, name: str) -> int:
    """How many neighbouring ranks hold the same share of a projection of `width` outputs, a child of `owner`, which has
    `heads`.

    1, except for key/value heads that are fewer than the `size` ranks. Raises UserError, naming `name` and
    the sizes that work, where the ranks cannot share the heads or the width.
    """
    if heads is None:
        require_width(width, size, name)
        return 1
    query, key_value = heads.query, heads.key_value
    possible = [n for n in _divisors(query) if key_value % n == 0 or n % key_value == 0]
    if size not in possible:
        kind = f"{query} attention heads" + (f" and {key_value} key/value heads" if key_value != query else "")
        raise UserError(
            f"tensor_parallel.autotp_size {size} does not divide the {kind} of {name}: use {_either(possible)}"
        )
    head_dims = {getattr(owner, attribute, None) for attribute in ("head_dim", "v_head_dim")}
    if size > key_value and width in {key_value * dim for dim in head_dims if dim}:
        return size // key_value
    require_width(width, size, name)
    return 1


def _own_size(module: nn.Module, *attributes: str) -> int | None:
    sizes = (getattr(module, attribute, None) for attribute in attributes)
    return next((size for size in sizes if isinstance(size, int)), None)


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
