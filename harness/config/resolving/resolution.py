"""A config on its way to DeepSpeed: the values that were filled in, and where each is from."""

from __future__ import annotations

from dataclasses import dataclass, field

from harness.config.resolving.resolved import Filled
from harness.config.values.arguments import AutoValues
from harness.config.values.json_object import JsonObject
from harness.config.values.pointers import lookup, put


@dataclass
class Resolution:
    """A resolution under way: the config that is being filled, and what was filled."""

    config: JsonObject
    values: AutoValues
    filled: list[Filled] = field(default_factory=list)

    def get(self, pointer: str) -> object:
        """Return the value at a pointer; None if it is absent."""
        return lookup(self.config, pointer)

    def fill(self, pointer: str, value: object, source: str) -> None:
        """Write a value that was not in the file."""
        put(self.config, pointer, value)
        self.filled.append(Filled(pointer=pointer, value=value, source=source))
