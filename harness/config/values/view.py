"""The settings that a run takes from its config and arguments: layout sizes, precision, ZeRO stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from harness.config.values.coercion import as_bool, as_int
from harness.config.values.json_object import JsonObject
from harness.config.values.layout_keys import (
    CHUNKS,
    CONTEXT,
    DEEPSPEED_CONTEXT,
    GRADIENT_BITS,
    INDUCTOR,
    ONE_REDUCTION,
    TENSOR,
    TOKEN_PIECES,
    schedule_name,
)
from harness.config.values.pointers import AUTO, bf16_section, lookup, whole
from harness.schedules import DEFAULT, ModelChunks, model_chunks


@dataclass(frozen=True, kw_only=True)
class ConfigView:
    """A config together with the arguments that override its layout.

    An unusable value counts as absent here: the rules of the config check refuse it.

    Attributes:
        data: the config as plain values.
        world_size: number of ranks; None if unknown.
        pp_override, tp_override, ep_override, cp_override: layout sizes from arguments.
    """

    data: Mapping[str, object]
    world_size: int | None = None
    pp_override: int | None = None
    tp_override: int | None = None
    ep_override: int | None = None
    cp_override: int | None = None

    def get(self, pointer: str) -> object:
        return lookup(self.data, pointer)

    def on(self, pointer: str) -> bool:
        """Return whether a switch is on for DeepSpeed's lenient reader."""
        return as_bool(self.get(pointer)) is True

    def section(self, pointer: str) -> JsonObject:
        """Return the object at a JSON pointer, or an empty one."""
        value = self.get(pointer)
        return value if isinstance(value, dict) else {}

    def size(self, pointer: str) -> int | None:
        """Return the value at a pointer if it is a whole number of at least 1, else None."""
        value = self.get(pointer)
        number = whole(value)
        # DeepSpeed reads this section with pydantic, so "2" is a number.
        if number is None and pointer == TENSOR:
            number = as_int(value)
        return number if number is not None and number > 0 else None

    @cached_property
    def zero_stage(self) -> int | None:
        """The ZeRO stage that DeepSpeed will run; None if unknown."""
        zero = self.section("/zero_optimization")
        # DeepSpeed's old form, `"zero_optimization": true`, is stage 1.
        if "stage" not in zero:
            return int(self.get("/zero_optimization") is True)
        # For DeepSpeed "auto" is stage 0, without a word.
        return 0 if zero["stage"] == AUTO else as_int(zero["stage"])

    @cached_property
    def pp_size(self) -> int:
        """Number of pipeline stages, from the config or an argument."""
        return self.pp_override or self.size("/pipeline/stages") or 1

    @cached_property
    def chunks(self) -> ModelChunks:
        schedule = schedule_name(self.get("/pipeline/schedule")) or DEFAULT
        return model_chunks(self.pp_size, schedule, self.size(CHUNKS))

    @cached_property
    def tp_size(self) -> int:
        """Number of tensor-parallel ranks, from the config or an argument."""
        return self.tp_override or self.size(TENSOR) or 1

    @cached_property
    def sequence_parallel(self) -> bool:
        """Whether tensor-parallel ranks split the sequence between the blocks of a layer."""
        return self.tp_size > 1 and self.on("/tensor_parallel/sequence_parallel")

    @property
    def compile_backend(self) -> str | None:
        """The backend of torch.compile for decoder layers; None if they are not compiled."""
        if not self.on("/compile/enabled"):
            return None
        named = self.get("/compile/backend")
        return named if isinstance(named, str) and named != AUTO else INDUCTOR

    @property
    def compile_options(self) -> JsonObject:
        """Keyword arguments of torch.compile besides the backend."""
        more = self.get("/compile/kwargs")
        named = {name: self.get(f"/compile/{name}") for name in ("mode", "dynamic", "fullgraph")}
        given = {name: value for name, value in named.items() if value not in (None, AUTO)}
        return {**(more if isinstance(more, dict) else {}), **given}

    @cached_property
    def gradient_bits(self) -> int | None:
        """Bits of gradients sent between data-parallel ranks: 8, 4, 0 (uncompressed), or None for "auto"."""
        asked = self.get(GRADIENT_BITS)
        return None if asked == AUTO else whole(asked) or 0

    @property
    def reduces_once(self) -> bool:
        """Whether ZeRO-2 reduces gradients once per step instead of in each micro-batch."""
        return self.zero_stage == 2 and self.get(ONE_REDUCTION) is True

    @cached_property
    def ep_size(self) -> int:
        """Number of expert-parallel ranks, each with whole experts, from the config or an argument."""
        asked = self.size("/expert_parallel/autoep_size") if self.on("/expert_parallel/enabled") else None
        return self.ep_override or asked or 1

    @property
    def token_pieces(self) -> int:
        """Number of pieces in which the tokens of a layer are sent to the ranks of their experts."""
        return self.size(TOKEN_PIECES) or 1

    @cached_property
    def cp_size(self) -> int:
        """Number of data-parallel ranks over which each sequence is split, from the config or an argument."""
        return self.cp_override or self.size(CONTEXT) or self.size(DEEPSPEED_CONTEXT) or 1

    @cached_property
    def dp_size(self) -> int | None:
        """Number of data-parallel ranks, including context ranks; None if the world size is unknown or does not fit."""
        cut = self.pp_size * self.tp_size
        return None if self.world_size is None or self.world_size % cut else self.world_size // cut

    @cached_property
    def batch_ranks(self) -> int | None:
        """Number of data-parallel ranks that read different samples; None if `dp_size` is None or does not fit."""
        return None if self.dp_size is None or self.dp_size % self.cp_size else self.dp_size // self.cp_size

    @cached_property
    def precision(self) -> str:
        """fp32, bf16 or fp16, by the file."""
        if self.on(f"/{self.bf16_section}/enabled"):
            return "bf16"
        return "fp16" if self.on("/fp16/enabled") else "fp32"

    @property
    def bf16_section(self) -> str:
        """The section that DeepSpeed reads for bf16."""
        return bf16_section(self.data)
