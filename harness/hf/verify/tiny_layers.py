"""Which layers of a config stay in its tiny copy: of every kind the first, and the first ones of all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.hf.verify.tiny_fields import Fields, is_size

LEAST_LAYERS, MOST_LAYERS = 4, 8


def keep_some_layers(part: Fields, table: Fields) -> None:
    """Keep some of the layers of a config, in place: of every kind the first, and the first ones of all."""
    depth = _depth(part, table)
    if depth is None:
        return
    layers = _LayerFields.of(part, table, depth)
    layers.keep(part, choose([layers.kind(layer) for layer in range(depth)]), table)
    if "attention_types" in part and "attention_layers" in part:
        part["attention_types"] = [[[name], 1] for name in part["attention_layers"]]


def choose(kinds: Sequence[str]) -> list[int]:
    """Return indices of layers, ascending: the first of every kind; up to a least number the second of each, then any.

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
    """The fields of a config that speak of single layers.

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
        """Return a text that is equal for layers of which the config says the same."""
        listed = [values[layer] for values in self.lists.values()]
        listed += [layer in values for values in self.indices.values()]
        counted = [layer < n for n in self.first.values()] + [layer >= self.depth - n for n in self.last.values()]
        return repr((listed, counted, self.overrides.get(layer)))

    def keep(self, part: Fields, chosen: Sequence[int], table: Fields) -> None:
        """Let the fields in `part` speak of the chosen layers alone, in their order."""
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
