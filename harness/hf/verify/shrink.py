"""The fields of a config at tiny sizes: what a size becomes, which layers stay. No torch, no family, only field names.

`tiny.json` holds the names: `at_most` the largest value of a field (patterns, the first that fits counts), `width` and
`heads` and `head_size` what has to agree, `depth` the names of the number of layers, `layer_indices`, `first_layers`
and `last_layers` what is said of single layers by index or by number, `off` what is switched off. A list as long as
the model is deep is taken to say something of each layer.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

LEAST_LAYERS, MOST_LAYERS = 4, 8
LEAST_HEADS, MOST_HEADS = 4, 16
HEAD_SIZE = 16
HEAD_PARTS = ("qk_nope_head_dim", "qk_rope_head_dim")
FIRST_ID = 4  # ids below may mean something: padding, an image

Fields = dict[str, Any]


def read_table() -> Fields:
    """What `tiny.json` says."""
    table: Fields = json.loads((Path(__file__).parent / "tiny_sizes.json").read_text(encoding="utf-8"))
    return table


def shrink_fields(fields: Fields, table: Fields, tensor: int = 1) -> Fields:
    """The fields of a config, as in its config.json, at tiny sizes; configs inside it come along."""
    fields = copy.deepcopy(fields)
    for part in _parts(fields):
        _resize(part, table, tensor)
        _choose_layers(part, table)
    return fields


def varied(fields: Fields, variant: Mapping[str, Any]) -> Fields:
    """Return the fields changed as one of the table's `variants` says: some set, some filled in where None, some left
    out, some added inside of a config that is a field."""
    changes = {key: value for key, value in variant.get("set", {}).items() if key in fields}
    kept = {
        key: value
        for key, value in fields.items()
        if not any(fnmatchcase(key, pattern) for pattern in variant.get("left_out", ()))
    }
    missing = {key: value for key, value in variant.get("fill", {}).items() if kept.get(key, 0) is None}
    inside = {key: {**kept[key], **more} for key, more in variant.get("inside", {}).items() if kept.get(key)}
    return {**copy.deepcopy(kept), **changes, **missing, **inside}


def _parts(fields: Fields) -> Iterator[Fields]:
    """The config and all configs inside of it."""
    yield fields
    for key, value in fields.items():
        if isinstance(value, dict) and ("model_type" in value or key.endswith("_config")) and key != "per_layer_config":
            yield from _parts(value)


# -- sizes -------------------------------------------------------------------------------------------------


def _heads(part: Fields, names: Sequence[str], tensor: int) -> dict[int, int]:
    """What each number of heads becomes: all are divided by one number, so that their ratios stay."""
    found: list[Any] = [place.get(name) for place in (part, *_overrides(part)) for name in names]
    counts: set[int] = {n for value in found for n in (value if isinstance(value, list) else [value]) if _is_size(n)}
    if not counts:
        return {}
    common = math.gcd(*counts)
    best = max(g for g in range(1, common + 1) if common % g == 0 and (g == 1 or _stays(counts, g, tensor)))
    if max(counts) // best > MOST_HEADS:  # no common ratio to keep
        return _few(counts, tensor)
    return {n: n // best for n in counts}


def _stays(counts: set[int], divisor: int, tensor: int) -> bool:
    """Whether the numbers, divided, are enough and are shared by the tensor-parallel ranks as before."""
    enough = max(counts) // divisor >= LEAST_HEADS and min(counts) // divisor >= min(LEAST_HEADS // 2, min(counts))
    return enough and all(_sharing(n, tensor) == _sharing(n // divisor, tensor) for n in counts)


def _sharing(count: int, tensor: int) -> tuple[bool, bool]:
    """How ranks share heads: whether each has one of its own, and whether equally many are for each or of each."""
    several = count >= tensor
    return several, (count % tensor if several else tensor % count) == 0


def _few(counts: set[int], tensor: int) -> dict[int, int]:
    """The fewest heads that divide each other, and are shared by the ranks, as before."""
    most = max(counts)
    for top in range(LEAST_HEADS, 8 * MOST_HEADS):
        if _sharing(top, tensor) != _sharing(most, tensor):
            continue
        found = {n: [m for m in range(min(n, 2), top) if _alike((m, top), (n, most), tensor)] for n in counts - {most}}
        if all(found.values()):
            return {most: top, **{n: fitting[0] for n, fitting in found.items()}}
    return {n: LEAST_HEADS * tensor if n == most else min(n, LEAST_HEADS // 2) for n in counts}


def _alike(fewer: tuple[int, int], before: tuple[int, int], tensor: int) -> bool:
    """Whether a number of heads and the largest one go together as those before them."""
    divides = fewer[1] % fewer[0] == 0, before[1] % before[0] == 0
    return divides[0] == divides[1] and _sharing(fewer[0], tensor) == _sharing(before[0], tensor)


def _overrides(part: Fields) -> list[Fields]:
    """What single layers have otherwise."""
    return list((part.get("per_layer_config") or {}).values())


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _resize(part: Fields, table: Fields, tensor: int) -> None:
    old = copy.deepcopy(part)
    heads, linear_heads = (_heads(part, table[kind], tensor) for kind in ("heads", "linear_heads"))
    old_width = next((old[name] for name in table["width"] if _is_size(old.get(name))), None)
    old_heads = next((old[name] for name in table["heads"] if _is_size(old.get(name))), None)
    width = HEAD_SIZE * (heads[old_heads] if old_heads else LEAST_HEADS)
    if old_width and not old_heads and old_width % tensor:
        width = _undivided(width, old_width, tensor)
    for key, value in old.items():
        if any(fnmatchcase(key, pattern) for pattern in table["off"]) and isinstance(value, float):
            part[key] = 0.0
        elif key in table["width"] and _is_size(value):
            part[key] = _in_proportion(value, old_width, width)
        elif key in table["heads"] or key in table["linear_heads"]:
            fewer = heads if key in table["heads"] else linear_heads
            part[key] = [fewer.get(n, n) for n in value] if isinstance(value, list) else fewer.get(value, value)
        elif key in table["head_size"] and _is_size(value):
            part[key] = _head_size(value, old_heads, old_width)
        elif key.endswith(("token_id", "token_index")):
            part[key] = value % FIRST_ID if isinstance(value, int) else None if isinstance(value, list) else value
        else:
            part[key] = _at_most(key, value, table, tensor)
    for count, size in table["inner_heads"].items():
        if _is_size(old.get(count)) and _is_size(old.get(size)) and old_width:
            inner = old[count] * old[size] * width // old_width
            part[count] = max(inner // part[size], 1)
    for override in _overrides(part):
        before = {**old, **override}
        adds_up = all(_is_size(before.get(name)) for name in ("head_dim", *HEAD_PARTS)) and (
            before["head_dim"] == sum(before[name] for name in HEAD_PARTS)
        )
        for key, value in override.items():
            override[key] = heads[value] if key in table["heads"] else _as_override(value, old.get(key), part.get(key))
        if adds_up:
            override["head_dim"] = sum({**part, **override}[name] for name in HEAD_PARTS)
    if isinstance(part.get("rope_parameters"), dict):
        part["rope_parameters"] = _shorter_factors(part["rope_parameters"], HEAD_SIZE // 2)


def _in_proportion(value: int, old_width: int | None, width: int) -> int:
    """The width itself, or as many times or parts of it as before."""
    if not old_width or value == old_width:
        return width
    times = value / old_width
    return int(width * times) if times in (0.25, 0.5, 1.5, 2, 3, 4) else min(value, width)


def _head_size(size: int, heads: int | None, width: int | None) -> int:
    """Such that heads x head size is equal to the width, more or less than it as before."""
    if not heads or not width or size * heads == width:
        return min(size, HEAD_SIZE)
    return min(size, HEAD_SIZE * 2 if size * heads > width else HEAD_SIZE // 2)


def _at_most(key: str, value: Any, table: Fields, tensor: int) -> Any:
    """A number, or a list of them, that is no larger than the table says, and divided by `tensor` or not as before."""
    if isinstance(value, list):
        return [_at_most(key, item, table, tensor) for item in value]
    limit = next((size for pattern, size in table["at_most"].items() if fnmatchcase(key, pattern)), None)
    if not isinstance(value, int) or isinstance(value, bool) or limit is None or value <= limit:
        return value
    if limit >= 8 and value % tensor == 0:
        return limit + -limit % tensor
    return _undivided(limit, value, tensor) if limit >= 8 else limit


def _undivided(limit: int, value: int, tensor: int) -> int:
    """The largest number up to `limit` that `tensor` does not divide, odd or even as `value`."""
    while limit % tensor == 0:
        limit -= 1 + (value % 2 == 0)
    return limit


def _as_override(value: Any, old: Any, new: Any) -> Any:
    """What a layer has otherwise than the config: as many times more or less."""
    if not (_is_size(value) and _is_size(old) and _is_size(new)):
        return value
    return new if value == old else new * 2 if value > old else max(new // 2, 1)


def _shorter_factors(value: Any, length: int) -> Any:
    """Rotary parameters with lists of one factor for each pair of a head's entries, now of smaller heads."""
    if isinstance(value, dict):
        return {key: _shorter_factors(item, length) for key, item in value.items()}
    if isinstance(value, list) and len(value) == 3 and all(_is_size(n) for n in value):  # sections, that add up
        third = length // 4
        return [length - 2 * third, third, third]
    return value[:length] if isinstance(value, list) else value


# -- layers ------------------------------------------------------------------------------------------------


def _choose_layers(part: Fields, table: Fields) -> None:
    """Keep some of the layers: of every kind the first, and the first ones of all."""
    depth = _depth(part, table)
    if depth is None:
        return
    lists = {key: value for key, value in part.items() if isinstance(value, list) and len(value) == depth > 1}
    indices = {key: part[key] for key in table["layer_indices"] if isinstance(part.get(key), list)}
    first = {key: part[key] for key in table["first_layers"] if _is_size(part.get(key))}
    last = {key: part[key] for key in table["last_layers"] if _is_size(part.get(key))}
    overrides = {int(index): value for index, value in (part.get("per_layer_config") or {}).items()}

    def kind(layer: int) -> str:
        listed = [values[layer] for values in lists.values()] + [layer in values for values in indices.values()]
        counted = [layer < n for n in first.values()] + [layer >= depth - n for n in last.values()]
        return repr((listed, counted, overrides.get(layer)))

    chosen = choose([kind(layer) for layer in range(depth)])
    for key in table["depth"]:
        if part.get(key) is not None:
            part[key] = len(chosen)
    for key, values in lists.items():
        if key not in indices:
            part[key] = [values[layer] for layer in chosen]
    for key, values in indices.items():
        part[key] = [place for place, layer in enumerate(chosen) if layer in values]
    part.update({key: sum(layer < n for layer in chosen) for key, n in first.items()})
    part.update({key: sum(layer >= depth - n for layer in chosen) for key, n in last.items()})
    if overrides:
        part["per_layer_config"] = {i: overrides[layer] for i, layer in enumerate(chosen) if layer in overrides}
    if "attention_types" in part and "attention_layers" in part:
        part["attention_types"] = [[[name], 1] for name in part["attention_layers"]]


def _depth(part: Fields, table: Fields) -> int | None:
    stated = next((part[name] for name in table["depth"] if _is_size(part.get(name))), None)
    listed = next((len(part[name]) for name in table["layer_lists"] if isinstance(part.get(name), list)), None)
    return stated or listed


def choose(kinds: Sequence[str]) -> list[int]:
    """Indices of layers, ascending: the first of every kind; up to a least number the second of each, then any."""
    places: dict[str, list[int]] = {}
    for index, kind in enumerate(kinds):
        places.setdefault(kind, []).append(index)
    firsts = [found[0] for found in places.values()]
    seconds = [found[1] for found in places.values() if len(found) > 1]
    wanted = list(dict.fromkeys((*firsts, *seconds, *range(len(kinds)))))
    return sorted(wanted[: min(max(LEAST_LAYERS, len(firsts)), MOST_LAYERS)])
