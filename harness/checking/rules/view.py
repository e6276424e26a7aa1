"""What a rule sees: the config's values, the sizes of the run as far as they are known, and the target program."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Self

from harness.checking import schema
from harness.checking.schema import Key
from harness.checking.schema.normalize import as_read
from harness.config.model.shape import ModelShape
from harness.config.text.document import Document
from harness.config.values.arguments import AutoValues
from harness.config.values.json_object import JsonObject
from harness.config.values.layout_keys import DEEPSPEED_CONTEXT
from harness.config.values.pointers import AUTO, lookup, whole
from harness.config.values.view import ConfigView
from harness.schedules import ModelChunks

Target = Literal["harness", "hf", "deepspeed"]
TARGETS: tuple[Target, ...] = ("harness", "hf", "deepspeed")
COMMENT_MARKS = ("_", "$", "//", "#")


@dataclass(frozen=True)
class KeyOccurrence:
    """A key in the file: its value, its schema (None if unknown), and its section."""

    pointer: str
    name: str
    value: object
    key: Key | None
    section: Key

    @property
    def parent(self) -> str:
        """The pointer of the section."""
        return self.pointer.rsplit("/", 1)[0]


@dataclass(frozen=True, kw_only=True)
class RunView(ConfigView):
    """The argument of every rule.

    Attributes:
        document: the file.
        data: the values of the file, with the arguments in place of "auto" where they are known.
        model: shape of the model; None if it is not known.
        target: the program that reads the file. What only the harness reads has no effect in another one.
        arguments: those of the run, where there is one.
    """

    document: Document
    model: ModelShape | None = None
    target: Target = "harness"
    arguments: AutoValues | None = None

    @classmethod
    def of(cls, document: Document, **options: Any) -> Self:
        """Return the view of a file alone, or of a file with some of the other attributes."""
        return cls(**{"data": document.data, **options}, document=document)

    def as_read(self, pointer: str) -> object:
        """Return the value at a pointer after DeepSpeed's conversion."""
        return lookup(self.data_as_read, pointer)

    @cached_property
    def data_as_read(self) -> JsonObject:
        """The config after DeepSpeed's conversion of values."""
        return as_read(self.data)

    @cached_property
    def file_as_read(self) -> JsonObject:
        """The file after DeepSpeed's conversion of values, before arguments replace "auto"."""
        return as_read(self.document.data)

    def in_file(self, pointer: str) -> object:
        """Return the file's value at a pointer, as DeepSpeed reads it; None if it is absent."""
        return lookup(self.file_as_read, pointer)

    def has(self, pointer: str) -> bool:
        """Return whether the config has a key, whatever its value."""
        return _has(self.data, pointer)

    def file_has(self, pointer: str) -> bool:
        """Return whether the file has a key: what arguments and defaults have filled in is not in it."""
        return _has(self.document.data, pointer)

    def truthy(self, pointer: str) -> bool:
        """Return whether a switch that a program uses as it stands is on: Python takes any text for true."""
        value = self.get(pointer)
        return bool(value) and not (value == AUTO and self.target == "harness")

    def size(self, pointer: str) -> int | None:
        """Return the value at any pointer, as DeepSpeed reads it, if it is a whole number of at least 1, else None."""
        number = whole(self.as_read(pointer))
        return number if number is not None and number > 0 else None

    @cached_property
    def visits(self) -> tuple[KeyOccurrence, ...]:
        """Every key of the file, parents first."""
        visits = _walk(self.document.data, schema.root(), "")
        shadowed = self.document.data.get("bf16") is not None  # then DeepSpeed does not look at the old name
        return tuple(visit for visit in visits if not (shadowed and visit.parent == "/bfloat16"))

    @cached_property
    def chunks(self) -> ModelChunks:
        """The model chunks of the pipeline schedule; other programs have DeepSpeed's own schedule."""
        return super().chunks if self.target == "harness" else ModelChunks(self.pp_size)

    @cached_property
    def gradient_bits(self) -> int | None:
        """Bits of gradients sent between data-parallel ranks, as in a run; 0 in other programs."""
        return super().gradient_bits if self.target == "harness" else 0

    @property
    def reduces_once(self) -> bool:
        """Whether ZeRO-2 reduces gradients once a step, and not in each micro-batch."""
        return self.target == "harness" and super().reduces_once

    @property
    def exchanges_tokens(self) -> bool:
        """Whether data-parallel ranks hold different experts, so that they send tokens to each other."""
        return self.target == "harness" and self.ep_size > self.tp_size

    @cached_property
    def cp_size(self) -> int:
        """Number of data-parallel ranks that share each sequence, from the config or an argument."""
        return super().cp_size if self.target == "harness" else self.size(DEEPSPEED_CONTEXT) or 1

    @cached_property
    def dp_size(self) -> int | None:
        """Number of data-parallel ranks; without the harness DeepSpeed counts every rank as data-parallel."""
        return super().dp_size if self.target == "harness" else self.world_size


def is_comment(name: str) -> bool:
    """Return whether a key is a comment for people."""
    return name.startswith(COMMENT_MARKS) or "comment" in name.lower()


def _has(values: Mapping[str, object], pointer: str) -> bool:
    section, name = pointer.rsplit("/", 1)
    parent = lookup(values, section) if section else values
    return isinstance(parent, dict) and name in parent


def _walk(values: Mapping[str, object], section: Key, pointer: str) -> Iterator[KeyOccurrence]:
    keys = section.keys
    for name, value in values.items():
        key = keys.get(name)
        here = f"{pointer}/{name.replace('~', '~0').replace('/', '~1')}"
        yield KeyOccurrence(here, name, value, key, section)
        if key is not None and key.is_section and isinstance(value, dict):
            yield from _walk(value, key, here)
