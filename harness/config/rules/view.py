"""What a rule sees: the config's values, the sizes of the run as far as they are known, and the target program."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from harness.config import schema
from harness.config.model.shape import ModelShape
from harness.config.schema import Key
from harness.config.schema.coercion import as_bool, as_int
from harness.config.schema.normalize import as_read
from harness.config.text.document import Document
from harness.config.values.arguments import AutoValues
from harness.config.values.json_object import JsonObject
from harness.config.values.layout_keys import (
    CHUNKS,
    CONTEXT,
    DEEPSPEED_1F1B,
    DEEPSPEED_CONTEXT,
    GRADIENT_BITS,
    INDUCTOR,
    OLD_CHUNKS,
    ONE_REDUCTION,
    TOKEN_PIECES,
    schedule_name,
)
from harness.config.values.model_chunks import ModelChunks, model_chunks
from harness.config.values.pointers import AUTO, bf16_section, lookup, whole

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


@dataclass(frozen=True)
class RunView:
    """The argument of every rule."""

    document: Document
    world_size: int | None = None
    model: ModelShape | None = None
    target: Target = "harness"
    pp_override: int | None = None
    tp_override: int | None = None
    ep_override: int | None = None
    cp_override: int | None = None
    arguments: AutoValues | None = None  # of the run, where there is one
    filled: Mapping[str, object] | None = None  # the file with the arguments in place of "auto"

    @property
    def data(self) -> Mapping[str, object]:
        """The config as plain values."""
        return self.document.data if self.filled is None else self.filled

    def get(self, pointer: str) -> object:
        """Return the value at a pointer; None if it is absent."""
        return lookup(self.data, pointer)

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

    def on(self, pointer: str) -> bool:
        """Return whether a switch is on for DeepSpeed's lenient reader."""
        return as_bool(self.get(pointer)) is True

    def truthy(self, pointer: str) -> bool:
        """Return whether a switch that a program uses as it stands is on: Python takes any text for true."""
        value = self.get(pointer)
        return bool(value) and not (value == AUTO and self.target == "harness")

    def section(self, pointer: str) -> JsonObject:
        """Return the object at a pointer; empty if there is none."""
        value = self.get(pointer)
        return value if isinstance(value, dict) else {}

    @cached_property
    def visits(self) -> tuple[KeyOccurrence, ...]:
        """Every key of the file, parents first."""
        visits = _walk(self.document.data, schema.root(), "")
        shadowed = self.document.data.get("bf16") is not None  # then DeepSpeed does not look at the old name
        return tuple(visit for visit in visits if not (shadowed and visit.parent == "/bfloat16"))

    @cached_property
    def zero_stage(self) -> int | None:
        """The ZeRO stage that DeepSpeed will run; None if it is not known."""
        if "stage" not in self.section("/zero_optimization"):
            return int(self.get("/zero_optimization") is True)
        stage = self.as_read("/zero_optimization/stage")
        return 0 if stage == AUTO else as_int(stage)

    def size(self, pointer: str) -> int | None:
        """Return the value at a pointer if it is a whole number of at least 1, else None."""
        number = whole(self.as_read(pointer))
        return number if number is not None and number > 0 else None

    @cached_property
    def pp_size(self) -> int:
        """Number of pipeline stages, from the config or an argument."""
        return self.pp_override or self.size("/pipeline/stages") or 1

    @cached_property
    def chunks(self) -> ModelChunks:
        """The model chunks of the schedule under the harness."""
        schedule = schedule_name(self.get("/pipeline/schedule")) if self.target == "harness" else None
        return model_chunks(self.pp_size, schedule or DEEPSPEED_1F1B, self.size(CHUNKS) or self.size(OLD_CHUNKS))

    @cached_property
    def tp_size(self) -> int:
        """Number of tensor-parallel ranks, from the config or an argument."""
        return self.tp_override or self.size("/tensor_parallel/autotp_size") or 1

    @cached_property
    def sequence_parallel(self) -> bool:
        """Whether tensor-parallel ranks share the sequence between the blocks of a layer."""
        return self.tp_size > 1 and self.on("/tensor_parallel/sequence_parallel")

    @property
    def compile_backend(self) -> str | None:
        """The backend of torch.compile for decoder layers; None if they are not compiled."""
        if not self.on("/compile/enabled"):
            return None
        named = self.get("/compile/backend")
        return named if isinstance(named, str) and named != AUTO else INDUCTOR

    @cached_property
    def gradient_bits(self) -> int | None:
        """Bits of gradients sent between data-parallel ranks: 8, 4, 0 (uncompressed), or None for "auto"."""
        asked = self.get(GRADIENT_BITS) if self.target == "harness" else None
        return None if asked == AUTO else whole(asked) or 0

    @property
    def reduces_once(self) -> bool:
        """Whether ZeRO-2 reduces gradients once a step, and not in each micro-batch."""
        return self.target == "harness" and self.zero_stage == 2 and self.get(ONE_REDUCTION) is True

    @cached_property
    def ep_size(self) -> int:
        """Number of expert-parallel ranks, each with whole experts, from the config or an argument."""
        asked = self.size("/expert_parallel/autoep_size") if self.on("/expert_parallel/enabled") else None
        return self.ep_override or asked or 1

    @property
    def token_pieces(self) -> int:
        """Number of pieces in which the tokens of a layer are sent to the ranks of their experts."""
        return self.size(TOKEN_PIECES) or 1

    @property
    def exchanges_tokens(self) -> bool:
        """Whether data-parallel ranks hold different experts, so that they send tokens to each other."""
        return self.target == "harness" and self.ep_size > self.tp_size

    @cached_property
    def cp_size(self) -> int:
        """Number of data-parallel ranks that share each sequence, from the config or an argument."""
        if self.target != "harness":
            return self.size(DEEPSPEED_CONTEXT) or 1
        return self.cp_override or self.size(CONTEXT) or self.size(DEEPSPEED_CONTEXT) or 1

    @cached_property
    def readers(self) -> int | None:
        """Number of data-parallel ranks that read different samples; None if the ranks are unknown or do not fit."""
        return None if self.dp_size is None or self.dp_size % self.cp_size else self.dp_size // self.cp_size

    @cached_property
    def dp_size(self) -> int | None:
        """Number of data-parallel ranks, including context ranks; None if the ranks are unknown or do not fit.

        Without the harness DeepSpeed counts every rank as data-parallel.
        """
        if self.world_size is None:
            return None
        cut = self.pp_size * self.tp_size if self.target == "harness" else 1
        return self.world_size // cut if self.world_size % cut == 0 else None

    @cached_property
    def precision(self) -> str:
        """fp32, bf16 or fp16, as far as the file sets it."""
        bf16 = self.on(f"/{self.bf16_section}/enabled")
        return "bf16" if bf16 else "fp16" if self.on("/fp16/enabled") else "fp32"

    @property
    def bf16_section(self) -> str:
        """The section that DeepSpeed reads for bf16."""
        return bf16_section(self.data)


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
