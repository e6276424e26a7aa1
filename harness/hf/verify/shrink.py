"""Make the sizes in a config tiny, by the names of its fields alone: no torch, no family.

`tiny_sizes.json` holds the names: `at_most` the largest value of a field (patterns, the first that fits counts),
`width`, `heads` and `head_size` what has to agree, `depth` the names of the number of layers, `layer_indices`,
`first_layers` and `last_layers` what applies to single layers by index or by number, `off` what is switched off. A
list as long as the model is deep is taken to hold a value for each layer.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from fnmatch import fnmatchcase

from harness.hf.verify.tiny_fields import Fields, is_size, overrides_in, parts_of
from harness.hf.verify.tiny_heads import LEAST_HEADS, fewer_heads
from harness.hf.verify.tiny_layers import keep_some_layers

HEAD_SIZE = 16
HEAD_PARTS = ("qk_nope_head_dim", "qk_rope_head_dim")
FIRST_ID = 4  # ids below may mean something: padding, an image
HEAD_KINDS = ("heads", "linear_heads")


def shrink_fields(fields: Fields, table: Fields, tensor: int = 1) -> Fields:
    """Return the fields of a config, as in its config.json, at tiny sizes; configs inside it are shrunk too.

    Args:
        table: what `read_table` returns.
        tensor: the number of tensor-parallel ranks; what they shared equally, or not, they still do.
    """
    fields = copy.deepcopy(fields)
    for part in parts_of(fields):
        _resize(part, table, tensor)
        keep_some_layers(part, table)
    return fields


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
    """Return all numbers of heads that stand in fields of these names."""
    found: list[object] = [place.get(name) for place in (part, *overrides_in(part)) for name in names]
    return {n for value in found for n in (value if isinstance(value, list) else [value]) if is_size(n)}


def _resize(part: Fields, table: Fields, tensor: int) -> None:
    """Make the sizes in a config tiny, in place."""
    old = copy.deepcopy(part)
    scale = _Scale.of(part, table, tensor)
    for key, value in old.items():
        part[key] = _resized(key, value, scale, table)
    for count, size in table["inner_heads"].items():
        if is_size(old.get(count)) and is_size(old.get(size)) and scale.old_width:
            inner = old[count] * old[size] * scale.width // scale.old_width
            part[count] = max(inner // part[size], 1)
    for override in overrides_in(part):
        _resize_override(override, old, part, scale, table)
    if isinstance(part.get("rope_parameters"), dict):
        part["rope_parameters"] = _shorter_factors(part["rope_parameters"], HEAD_SIZE // 2)


def _resized(key: str, value: object, scale: _Scale, table: Fields) -> object:
    """Return the tiny value of one field."""
    if any(fnmatchcase(key, pattern) for pattern in table["off"]) and isinstance(value, float):
        return 0.0
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
        return value % FIRST_ID if isinstance(value, int) else None if isinstance(value, list) else value
    return _at_most(key, value, table, scale.tensor)


def _in_proportion(value: int, scale: _Scale) -> int:
    """Return the width itself, or as many times or parts of it as before."""
    if not scale.old_width or value == scale.old_width:
        return scale.width
    times = value / scale.old_width
    return int(scale.width * times) if times in (0.25, 0.5, 1.5, 2, 3, 4) else min(value, scale.width)


def _head_size(size: int, scale: _Scale) -> int:
    """Return a size such that heads x head size is equal to the width, more or less than it, as before."""
    if not scale.old_heads or not scale.old_width or size * scale.old_heads == scale.old_width:
        return min(size, HEAD_SIZE)
    return min(size, HEAD_SIZE * 2 if size * scale.old_heads > scale.old_width else HEAD_SIZE // 2)


def _at_most(key: str, value: object, table: Fields, tensor: int) -> object:
    """Return a number, or a list of them, no larger than the table says, and divided by `tensor` or not as before."""
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
    """Return what a layer has where the config has `new`: larger or smaller than that, as before."""
    if not (is_size(value) and is_size(old) and is_size(new)):
        return value
    return new if value == old else new * 2 if value > old else max(new // 2, 1)


def _shorter_factors(value: object, length: int) -> object:
    """Return rotary parameters with lists of one factor for each pair of a head's entries, now of smaller heads."""
    if isinstance(value, dict):
        return {key: _shorter_factors(item, length) for key, item in value.items()}
    if isinstance(value, list) and len(value) == 3 and all(is_size(n) for n in value):  # sections, that add up
        third = length // 4
        return [length - 2 * third, third, third]
    return value[:length] if isinstance(value, list) else value
