"""Decide how tensor-parallel ranks split a layer: by whole attention heads, or by ranges of any other width.

An attention module reshapes its projections to [..., heads, head_dim], so a shard must be whole heads: see
`harness.config.model.sharding`. The layers of an attention need not be its children (an output projection may be its
sibling), so a layer's attention is searched around it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from harness.config.model.sharding import Heads, Range, shard_range
from harness.errors import UserError
from harness.parallel.plans.plan import is_layer, wildcard
from harness.wording import counted, one_of


@dataclass(frozen=True, kw_only=True)
class Attention:
    """An attention module and its heads before it is cut.

    Attributes:
        head_dims: the possible widths of a head, from the module's attributes.
        inside: whether the layer for which it was looked up is inside this module.
    """

    module: Any
    heads: Heads
    head_dims: frozenset[int]
    inside: bool = True


def heads_of(module: nn.Module, config: PretrainedConfig) -> Heads | None:
    """Return the heads of an attention module, from its attributes or else the config; None for other modules."""
    layers = getattr(config, "per_layer_config", None)
    index = getattr(module, "layer_idx", None)
    # Another encoder of the model may have more layers than this config.
    if layers is not None and index is not None and 0 <= index < len(layers):
        config = layers[index]
    query = _own_size(module, "num_heads", "num_attention_heads", "n_heads", "n_head")
    # Some attention modules only store the size of a head, or the query heads per key: the config has their number.
    if query is None and any(hasattr(module, name) for name in ("head_dim", "head_size", "num_key_value_groups")):
        query = getattr(config, "num_attention_heads", None)
    if query is None:
        return None
    key_value = _own_size(module, "num_key_value_heads", "num_kv_heads")
    groups = _own_size(module, "num_key_value_groups")
    if key_value is None and groups and query % groups == 0:
        key_value = query // groups
    return Heads(query=query, key_value=key_value or getattr(config, "num_key_value_heads", None) or query)


def attentions_in(modules: Sequence[tuple[str, nn.Module]], config: PretrainedConfig) -> dict[str, Attention]:
    """Return name -> attention for all attention modules among the named modules, which must not be sharded yet."""
    found = {}
    for name, module in modules:
        heads = heads_of(module, config)
        if heads is not None:
            dims = (getattr(module, attribute, None) for attribute in ("head_dim", "v_head_dim"))
            head_dims = frozenset(dim for dim in dims if isinstance(dim, int))
            found[name] = Attention(module=module, heads=heads, head_dims=head_dims)
    return found


def attention_at(name: str, attentions: Mapping[str, Attention], size: int) -> Attention | None:
    """Return the attention of the module `name`: itself, an enclosing one, or a sibling in the same block."""
    path = name.split(".")
    # From the module itself outwards to the whole model.
    for depth in range(len(path), -1, -1):
        owner = ".".join(path[:depth])
        if owner in attentions:
            return attentions[owner]
        # Around a decoder layer there are only other layers' attentions.
        if "*" not in wildcard(owner) or is_layer(wildcard(owner)):
            break
        beside = attention_below(owner, attentions)
        if beside is not None and beside.heads.fit(size):
            return Attention(module=beside.module, heads=beside.heads, head_dims=beside.head_dims, inside=False)
    return None


def attention_below(name: str, attentions: Mapping[str, Attention]) -> Attention | None:
    """Return the first attention inside the module `name`, itself included."""
    inside = (one for own, one in attentions.items() if own == name or not name or own.startswith(f"{name}."))
    return next(inside, None)


def deal(
    width: int, size: int, name: str, *, heads: Heads | None = None, key_values: Collection[int] = (), unit: int = 1
) -> list[Range]:
    """Return the range of each of `size` ranks in the `width` entries of `name`.

    Args:
        heads: ranges are whole heads, if the heads divide the width.
        key_values: widths at which the entries belong to the key/value heads, which several ranks may share.
        unit: otherwise, the number of consecutive entries that must stay together.

    Raises UserError if a rank would have nothing.
    """
    if heads is not None:
        _require_fit(heads, size, name)
        # Fewer key/value heads than ranks: neighbouring ranks hold the same one.
        if heads.key_value < size and width in key_values:
            return _scaled(heads.key_values(size), width // heads.key_value)
        # Whole key/value heads, with all their query heads, so that queries and keys on a rank belong together.
        if size <= heads.key_value and width % heads.key_value == 0 and heads.query % heads.key_value == 0:
            return _scaled(heads.key_values(size), width // heads.key_value)
        if width % heads.query == 0:
            return _scaled(heads.queries(size), width // heads.query)
    if width // unit < size or width % unit:
        what = f"width {width}" if unit == 1 else f"width {width}, in units of {unit},"
        most = 1 if width % unit else max(width // unit, 1)
        raise UserError(f"tensor_parallel.autotp_size {size} does not fit the {what} of {name}: use at most {most}")
    return _scaled([shard_range(width // unit, rank, size) for rank in range(size)], unit)


def blocks_of(heads: Heads, blocks: int, name: str) -> Heads:
    """Return the heads in each of `blocks` equal blocks. Raises UserError if the blocks do not divide the heads."""
    if heads.query % blocks or heads.key_value % blocks:
        raise UserError(f"the heads of {name} are not {blocks} equal blocks: set tensor_parallel.autotp_size to 1")
    return Heads(query=heads.query // blocks, key_value=heads.key_value // blocks)


def _require_fit(heads: Heads, size: int, name: str) -> None:
    if heads.fit(size):
        return
    kind = counted(heads.query, "attention head")
    if heads.key_value != heads.query:
        kind += f" and {counted(heads.key_value, 'key/value head')}"
    fits = [n for n in range(1, heads.query + 1) if heads.fit(n)]
    advice = f"at most {fits[-1]}" if len(fits) == heads.query else one_of(fits)
    raise UserError(f"tensor_parallel.autotp_size {size} does not fit the {kind} of {name}: use {advice}")


def _scaled(ranges: list[Range], unit: int) -> list[Range]:
    return [(start * unit, stop * unit) for start, stop in ranges]


def _own_size(module: nn.Module, *attributes: str) -> int | None:
    sizes = (getattr(module, attribute, None) for attribute in attributes)
    return next((size for size in sizes if isinstance(size, int)), None)
