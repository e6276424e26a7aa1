"""Make the sizes in a config tiny, by the names of its fields alone: no torch, no model family.

`tiny_sizes.json` has the names of fields: `at_most`, with the largest value (the first matching pattern counts);
`width`, `heads` and `head_size`, which have to agree; `depth`, the number of layers; `layer_indices`, `first_layers`
and `last_layers`, which select single layers by index or number; and `off`, which are switched off. A list with as many
items as the model has layers is taken to have a value for each layer.

Heads keep their ratios, and tensor-parallel ranks share them as before (equally or not). The first layer of each kind
is kept.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TypeGuard

from harness.config.values.json_object import JsonObject

Fields = JsonObject
HEAD_SIZE = 16
HEAD_PARTS = ("qk_nope_head_dim", "qk_rope_head_dim")
FIRST_ID = 4  # ids below may mean something: padding, an image
HEAD_KINDS = ("heads", "linear_heads")
LEAST_HEADS, MOST_HEADS = 4, 16
LEAST_LAYERS, MOST_LAYERS = 4, 8


def read_table() -> Fields:
    """Return the content of `tiny_sizes.json`."""
    table: Fields = json.loads((Path(__file__).parent / "tiny_sizes.json").read_text(encoding="utf-8"))
    return table


def varied(fields: Fields, variant: JsonObject) -> Fields:
    """Return the fields, changed by one of the table's `variants`.

    A variant may set fields, fill in fields that are None, leave fields out, and add fields to an inner config.
    """
    changes = {key: value for key, value in variant.get("set", {}).items() if key in fields}
    kept = {
        key: value
        for key, value in fields.items()
        if not any(fnmatchcase(key, pattern) for pattern in variant.get("left_out", ()))
    }
    missing = {key: value for key, value in variant.get("fill", {}).items() if kept.get(key, 0) is None}
    inside = {key: {**kept[key], **more} for key, more in variant.get("inside", {}).items() if kept.get(key)}
    return {**copy.deepcopy(kept), **changes, **missing, **inside}


def parts_of(fields: Fields) -> Iterator[Fields]:
    """Yield the config and all configs inside it."""
    yield fields
    for key, value in fields.items():
        if isinstance(value, dict) and ("model_type" in value or key.endswith("_config")) and key != "per_layer_config":
            yield from parts_of(value)


def overrides_in(part: Fields) -> list[Fields]:
    """Return, for each layer that differs from the config, the fields that are different."""
    return list((part.get("per_layer_config") or {}).values())


def is_size(value: object) -> TypeGuard[int]:
    """Return whether a field's value is a positive integer."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def shrink_fields(fields: Fields, table: Fields, tensor: int = 1) -> Fields:
    """Return the fields of a config, as in its config.json, at tiny sizes; configs inside it are shrunk too.

    Args:
        table: what `read_table` returns.
        tensor: the number of tensor-parallel ranks; sizes that they shared equally (or not) stay so.
    """
    fields = copy.deepcopy(fields)
    for part in parts_of(fields):
        _resize(part, table, tensor)
        keep_some_layers(part, table)
    return fields


def fewer_layers(fields: Fields, table: Fields) -> Fields:
    """Return the fields of a config with as few layers as `shrink_fields` leaves, at their own sizes."""
    fields = copy.deepcopy(fields)
    for part in parts_of(fields):
        part.update({key: _switched_off(key, value, table) for key, value in part.items()})
        keep_some_layers(part, table)
    return fields


def _switched_off(key: str, value: object, table: Fields) -> object:
    """Return 0 for a rate that is switched off (dropout, jitter), and any other value itself."""
    return 0.0 if isinstance(value, float) and any(fnmatchcase(key, pattern) for pattern in table["off"]) else value


@dataclass(frozen=True, kw_only=True)
class _Scale:
    """How the sizes of a config change.

    Attributes:
        old_width, width: of the hidden state, before and after.
        old_heads: attention heads before.
        heads: for each of `HEAD_KINDS`, number of heads before -> after.
        tensor: the number of tensor-parallel ranks.
    """

    old_width: int | None
    width: int
    old_heads: int | None
    heads: dict[str, dict[int, int]]
    tensor: int

    @classmethod
    def of(cls, part: Fields, table: Fields, tensor: int) -> _Scale:
        heads = {kind: fewer_heads(_counts(part, table[kind]), tensor) for kind in HEAD_KINDS}
        old_width = next((part[name] for name in table["width"] if is_size(part.get(name))), None)
        old_heads = next((part[name] for name in table["heads"] if is_size(part.get(name))), None)
        width = HEAD_SIZE * (heads["heads"][old_heads] if old_heads else LEAST_HEADS)
        if old_width and not old_heads and old_width % tensor:
            width = _undivided(width, old_width, tensor)
        return cls(old_width=old_width, width=width, old_heads=old_heads, heads=heads, tensor=tensor)


def _counts(part: Fields, names: list[str]) -> set[int]:
    """Return all numbers of heads in fields of these names."""
    found: list[object] = [place.get(name) for place in (part, *overrides_in(part)) for name in names]
    return {n for value in found for n in (value if isinstance(value, list) else [value]) if is_size(n)}


def _resize(part: Fields, table: Fields, tensor: int) -> None:
    """Make the sizes in a config tiny, in place."""
    old = copy.deepcopy(part)
    scale = _Scale.of(part, table, tensor)
    for key, value in old.items():
        part[key] = _resized(key, value, scale, table)
    _resize_inner(part, old, scale, table)
    for override in overrides_in(part):
        _resize_override(override, old, part, scale, table)
    if isinstance(part.get("rope_parameters"), dict):
        part["rope_parameters"] = _shorter_factors(part["rope_parameters"], HEAD_SIZE // 2)


def _resize_inner(part: Fields, old: Fields, scale: _Scale, table: Fields) -> None:
    """Make the heads of recurrent blocks fewer, in place, in proportion to the hidden width.

    A field that holds their number times their size keeps doing so.
    """
    for count, size in table["inner_heads"].items():
        if not (is_size(old.get(count)) and is_size(old.get(size)) and scale.old_width):
            continue
        inner = old[count] * old[size]
        part[count] = max(inner * scale.width // scale.old_width // part[size], 1)
        for name in table["inner_width"]:
            if old.get(name) == inner:
                even = math.gcd(old[count], 2 * scale.tensor)  # groups and ranks still share the heads equally
                part[count] = -(-part[count] // even) * even
                part[name] = part[count] * part[size]


def _resized(key: str, value: object, scale: _Scale, table: Fields) -> object:
    """Return the tiny value of one field."""
    value = _switched_off(key, value, table)
    if key in table["width"] and is_size(value):
        return _in_proportion(value, scale)
    for kind in HEAD_KINDS:
        if key in table[kind]:
            fewer = scale.heads[kind]
            if isinstance(value, list):
                return [fewer.get(n, n) for n in value]
            return fewer.get(value, value) if is_size(value) else value
    if key in table["head_size"] and is_size(value):
        return _head_size(value, scale)
    if key.endswith(("token_id", "token_index")):
        if isinstance(value, int):
            return value % FIRST_ID
        return None if isinstance(value, list) else value
    return _at_most(key, value, table, scale.tensor)


def _in_proportion(value: int, scale: _Scale) -> int:
    """Return the tiny value of a width, with its old ratio to the hidden width if that is a simple one."""
    if not scale.old_width or value == scale.old_width:
        return scale.width
    times = value / scale.old_width
    return int(scale.width * times) if times in (0.25, 0.5, 1.5, 2, 3, 4) else min(value, scale.width)


def _head_size(size: int, scale: _Scale) -> int:
    """Return a tiny head size that keeps heads x head size equal to the width, above it or below it, as before."""
    if not scale.old_heads or not scale.old_width or size * scale.old_heads == scale.old_width:
        return min(size, HEAD_SIZE)
    return min(size, HEAD_SIZE * 2 if size * scale.old_heads > scale.old_width else HEAD_SIZE // 2)


def _at_most(key: str, value: object, table: Fields, tensor: int) -> object:
    """Limit a number, or each in a list, to the table's maximum; divisible by `tensor` if and only if it was."""
    if isinstance(value, list):
        return [_at_most(key, item, table, tensor) for item in value]
    limit = next((size for pattern, size in table["at_most"].items() if fnmatchcase(key, pattern)), None)
    if not isinstance(value, int) or isinstance(value, bool) or limit is None or value <= limit:
        return value
    if limit >= 8 and value % tensor == 0:
        return limit + -limit % tensor
    return _undivided(limit, value, tensor) if limit >= 8 else limit


def _undivided(limit: int, value: int, tensor: int) -> int:
    """Return the largest number up to `limit` that `tensor` does not divide, odd or even as `value`."""
    while limit % tensor == 0:
        limit -= 1 + (value % 2 == 0)
    return limit


def _resize_override(override: Fields, old: Fields, new: Fields, scale: _Scale, table: Fields) -> None:
    """Make the fields that are different for one layer tiny, in place.

    Args:
        old, new: the config around it, before and after.
    """
    before = {**old, **override}
    adds_up = all(is_size(before.get(name)) for name in ("head_dim", *HEAD_PARTS)) and (
        before["head_dim"] == sum(before[name] for name in HEAD_PARTS)
    )
    for key, value in override.items():
        is_heads = key in table["heads"]
        override[key] = scale.heads["heads"][value] if is_heads else _as_override(value, old.get(key), new.get(key))
    if adds_up:
        override["head_dim"] = sum({**new, **override}[name] for name in HEAD_PARTS)


def _as_override(value: object, old: object, new: object) -> object:
    """Return a layer's own value beside the config's `new`: equal, larger or smaller, as `value` was beside `old`."""
    if not (is_size(value) and is_size(old) and is_size(new)):
        return value
    if value == old:
        return new
    return new * 2 if value > old else max(new // 2, 1)


def _shorter_factors(value: object, length: int) -> object:
    """Return rotary parameters whose lists, one factor per pair of a head's entries, are cut to `length` pairs."""
    if isinstance(value, dict):
        return {key: _shorter_factors(item, length) for key, item in value.items()}
    if isinstance(value, list) and len(value) == 3 and all(is_size(n) for n in value):  # sections that add up
        third = length // 4
        return [length - 2 * third, third, third]
    return value[:length] if isinstance(value, list) else value


def fewer_heads(counts: Collection[int], tensor: int) -> dict[int, int]:
    """Return number of heads -> tiny number of heads; all are divided by the same number, which keeps their ratios.

    Args:
        counts: the numbers of heads in the config (of queries, of keys and values, of single layers).
        tensor: the number of tensor-parallel ranks that share them.
    """
    if not counts:
        return {}
    common = math.gcd(*counts)
    best = max(g for g in range(1, common + 1) if common % g == 0 and (g == 1 or _may_divide(counts, g, tensor)))
    if max(counts) // best > MOST_HEADS:  # no common ratio to keep
        return _fewest(counts, tensor)
    return {n: n // best for n in counts}


def _may_divide(counts: Collection[int], divisor: int, tensor: int) -> bool:
    """Return whether the numbers, divided, are large enough and are shared by the tensor-parallel ranks as before."""
    enough = max(counts) // divisor >= LEAST_HEADS and min(counts) // divisor >= min(LEAST_HEADS // 2, min(counts))
    return enough and all(_sharing(n, tensor) == _sharing(n // divisor, tensor) for n in counts)


def _sharing(count: int, tensor: int) -> tuple[bool, bool]:
    """Return how ranks share heads: whether each has one of its own, and whether the shares are equal."""
    several = count >= tensor
    return several, (count % tensor if several else tensor % count) == 0


def _fewest(counts: Collection[int], tensor: int) -> dict[int, int]:
    """Return the smallest numbers of heads that divide each other, and that ranks share, as the original ones do."""
    most = max(counts)
    for top in range(LEAST_HEADS, 8 * MOST_HEADS):
        if _sharing(top, tensor) != _sharing(most, tensor):
            continue
        others = set(counts) - {most}
        found = {n: [m for m in range(min(n, 2), top) if _alike((m, top), (n, most), tensor)] for n in others}
        if all(found.values()):
            return {most: top, **{n: fitting[0] for n, fitting in found.items()}}
    return {n: LEAST_HEADS * tensor if n == most else min(n, LEAST_HEADS // 2) for n in counts}


def _alike(fewer: tuple[int, int], before: tuple[int, int], tensor: int) -> bool:
    """Return whether tiny head counts divide each other, and split over ranks, as the original counts do."""
    divides = fewer[1] % fewer[0] == 0, before[1] % before[0] == 0
    return divides[0] == divides[1] and _sharing(fewer[0], tensor) == _sharing(before[0], tensor)


def keep_some_layers(part: Fields, table: Fields) -> None:
    """Keep only the layers of a config that `choose` selects, in place."""
    depth = _depth(part, table)
    if depth is None:
        return
    layers = _LayerFields.of(part, table, depth)
    layers.keep(part, choose([layers.kind(layer) for layer in range(depth)]), table)
    if "attention_types" in part and "attention_layers" in part:
        part["attention_types"] = [[[name], 1] for name in part["attention_layers"]]


def choose(kinds: Sequence[str]) -> list[int]:
    """Return indices of layers, ascending: the first of every kind, filled up to LEAST_LAYERS by second ones, then any.

    Args:
        kinds: the kind of each layer.
    """
    places: dict[str, list[int]] = {}
    for index, kind in enumerate(kinds):
        places.setdefault(kind, []).append(index)
    firsts = [found[0] for found in places.values()]
    seconds = [found[1] for found in places.values() if len(found) > 1]
    wanted = list(dict.fromkeys((*firsts, *seconds, *range(len(kinds)))))
    return sorted(wanted[: min(max(LEAST_LAYERS, len(firsts)), MOST_LAYERS)])


def _depth(part: Fields, table: Fields) -> int | None:
    stated = next((part[name] for name in table["depth"] if is_size(part.get(name))), None)
    listed = next((len(part[name]) for name in table["layer_lists"] if isinstance(part.get(name), list)), None)
    return stated or listed


@dataclass(frozen=True, kw_only=True)
class _LayerFields:
    """The fields of a config that concern single layers.

    Attributes:
        depth: the number of layers.
        lists: field -> a value for each layer.
        indices: field -> the layers that it applies to.
        first, last: field -> how many of the first and last layers it applies to.
        overrides: layer -> the fields that are different for it.
    """

    depth: int
    lists: dict[str, list[object]]
    indices: dict[str, list[int]]
    first: dict[str, int]
    last: dict[str, int]
    overrides: dict[int, object]

    @classmethod
    def of(cls, part: Fields, table: Fields, depth: int) -> _LayerFields:
        return cls(
            depth=depth,
            lists={key: value for key, value in part.items() if isinstance(value, list) and len(value) == depth > 1},
            indices={key: part[key] for key in table["layer_indices"] if isinstance(part.get(key), list)},
            first={key: part[key] for key in table["first_layers"] if is_size(part.get(key))},
            last={key: part[key] for key in table["last_layers"] if is_size(part.get(key))},
            overrides={int(index): value for index, value in (part.get("per_layer_config") or {}).items()},
        )

    def kind(self, layer: int) -> str:
        """Return a text that is equal for layers with equal settings in the config."""
        listed = [values[layer] for values in self.lists.values()]
        listed += [layer in values for values in self.indices.values()]
        counted = [layer < n for n in self.first.values()] + [layer >= self.depth - n for n in self.last.values()]
        return repr((listed, counted, self.overrides.get(layer)))

    def keep(self, part: Fields, chosen: Sequence[int], table: Fields) -> None:
        """Change the fields in `part` to those of the chosen layers, in their order."""
        for key in table["depth"]:
            if part.get(key) is not None:
                part[key] = len(chosen)
        for key, values in self.lists.items():
            if key not in self.indices:
                part[key] = [values[layer] for layer in chosen]
        for key, layers in self.indices.items():
            part[key] = [place for place, layer in enumerate(chosen) if layer in layers]
        part.update({key: sum(layer < n for layer in chosen) for key, n in self.first.items()})
        part.update({key: sum(layer >= self.depth - n for layer in chosen) for key, n in self.last.items()})
        if self.overrides:
            kept = {place: self.overrides[layer] for place, layer in enumerate(chosen) if layer in self.overrides}
            part["per_layer_config"] = kept
