"""Optimizers of bitsandbytes (Dettmers et al. 2022, arXiv 2110.02861): states in 8 bits, or in pages, or both.

A state in 8 bits takes a byte for each weight, and four more for each block of 256. On a GPU, the pages of a paged
state move to the host's memory while other tensors need theirs.
"""

from __future__ import annotations

from collections.abc import Mapping

from harness.optimizers import adam, lion
from harness.optimizers.optimizer import OptimizerClass, OptimizerType, Range

OF_ADAM = adam.ADAM.family
OF_LION = lion.LION.family
IN_8_BITS = 1 + 4 / 256
"""Bytes of a value in 8 bits, with its part of the scale of its block."""
ADAM_OPTIONS = ("lr", "betas", "eps", "weight_decay", "amsgrad", "optim_bits", "args", "min_8bit_size")
LION_OPTIONS = ("lr", "betas", "weight_decay", "args", "min_8bit_size")
PAGED = ("is_paged",)
RMSPROP_OPTIONS = ("lr", "alpha", "eps", "weight_decay", "momentum", "centered", "args", "min_8bit_size")
ADEMAMIX_OPTIONS = ("lr", "betas", "alpha", "t_alpha", "t_beta3", "eps", "weight_decay")
SIZE = ("min_8bit_size",)
ARGUMENTS = ("lr", "betas", "eps", "weight_decay")
"""Options that take a run's arguments."""


def _record(
    name: str,
    options: tuple[str, ...],
    *,
    made_by: str,
    family: str,
    flags: tuple[str, ...] = (),
    states: int = 2,
    state_bytes: float = IN_8_BITS,
    ranges: Mapping[str, Range] | None = None,
) -> OptimizerType:
    return OptimizerType(
        name=name,
        device=OptimizerClass(
            path=f"bitsandbytes.optim.{name}", options=options, refused=("amsgrad",) if "amsgrad" in options else ()
        ),
        made_by=f"harness.extras.blockwise.optimizer:{made_by}",
        ranges={"min_8bit_size": "count", **(ranges or {})},
        flags=dict.fromkeys(flags, tuple(each for each in ARGUMENTS if each in options)),
        family=family,
        states=states,
        state_bytes=state_bytes,
        more_states=(),
        tested_with_zero=True,
        package="bitsandbytes",
    )


def _rmsprop(name: str, made_by: str, *flags: str, state_bytes: float = IN_8_BITS) -> OptimizerType:
    return _record(
        name,
        RMSPROP_OPTIONS,
        made_by=made_by,
        family="RMSprop of bitsandbytes",
        flags=flags,
        states=1,
        state_bytes=state_bytes,
        ranges={"alpha": "share"},
    )


def _ademamix(
    name: str, made_by: str, flag: str, options: tuple[str, ...], state_bytes: float = IN_8_BITS
) -> OptimizerType:
    return _record(
        name,
        ADEMAMIX_OPTIONS + options,
        made_by=made_by,
        family="AdEMAMix",
        flags=(flag,),
        states=3,
        state_bytes=state_bytes,
        ranges={"betas": "decay", "alpha": "not_negative"},
    )


ADAM = _record("Adam8bit", ADAM_OPTIONS + PAGED, made_by="ADAM_8BIT", family=OF_ADAM)
PAGED_ADAM = _record("PagedAdam8bit", ADAM_OPTIONS + PAGED, made_by="PAGED_ADAM_8BIT", family=OF_ADAM)
ADAMW = _record(
    "AdamW8bit", ADAM_OPTIONS + PAGED, made_by="ADAMW_8BIT", family=OF_ADAM, flags=("adamw_8bit", "adamw_bnb_8bit")
)
PAGED_ADAMW = _record(
    "PagedAdamW8bit", ADAM_OPTIONS, made_by="PAGED_ADAMW_8BIT", family=OF_ADAM, flags=("paged_adamw_8bit",)
)
PAGED_ADAMW_32BIT = _record(
    "PagedAdamW32bit",
    ADAM_OPTIONS,
    made_by="PAGED_ADAMW",
    family=OF_ADAM,
    flags=("paged_adamw_32bit",),
    state_bytes=4,
)
LION = _record("Lion8bit", LION_OPTIONS + PAGED, made_by="LION_8BIT", family=OF_LION, flags=("lion_8bit",), states=1)
PAGED_LION = _record(
    "PagedLion8bit", LION_OPTIONS, made_by="PAGED_LION_8BIT", family=OF_LION, flags=("paged_lion_8bit",), states=1
)
PAGED_LION_32BIT = _record(
    "PagedLion32bit",
    LION_OPTIONS,
    made_by="PAGED_LION",
    family=OF_LION,
    flags=("paged_lion_32bit",),
    states=1,
    state_bytes=4,
)
RMSPROP = _rmsprop("RMSprop32bit", "RMSPROP", "rmsprop_bnb", "rmsprop_bnb_32bit", state_bytes=4)
RMSPROP_8BIT = _rmsprop("RMSprop8bit", "RMSPROP_8BIT", "rmsprop_bnb_8bit")
# Pagliardini, Ablin and Grangier 2024, The AdEMAMix Optimizer: Better, Faster, Older (arXiv 2409.03137)
ADEMAMIX = _ademamix("AdEMAMix", "ADEMAMIX", "ademamix", ("optim_bits", *SIZE, *PAGED), state_bytes=4)
ADEMAMIX_8BIT = _ademamix("AdEMAMix8bit", "ADEMAMIX_8BIT", "ademamix_8bit", SIZE + PAGED)
PAGED_ADEMAMIX = _ademamix(
    "PagedAdEMAMix", "PAGED_ADEMAMIX", "paged_ademamix_32bit", ("optim_bits", *SIZE), state_bytes=4
)
PAGED_ADEMAMIX_8BIT = _ademamix("PagedAdEMAMix8bit", "PAGED_ADEMAMIX_8BIT", "paged_ademamix_8bit", SIZE)
