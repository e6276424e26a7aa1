"""Gradient compression of a run: whether, in how many bits, and how each gradient is packed."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from harness.config import Resolved
from harness.console import Console
from harness.deepspeed.step_gradients import trained_parameters
from harness.extras.compression.quantization import wire_share
from harness.extras.compression.reduction import ALIGNED, EXACT, PACKED, CompressedReduction
from harness.extras.compression.trial import measure
from harness.parallel.pipeline.staged_module import StagedModule
from harness.parallel.tensor.shard import shard_of
from harness.topology.groups import Groups


def settled(resolved: Resolved, groups: Groups, console: Console) -> Resolved:
    """Return the config with the bits of gradient compression, measured if "auto", and report it; all ranks call it."""
    bits = resolved.gradient_bits
    if groups.layout.dp_size == 1:
        return replace(resolved, gradient_bits=0)
    if bits is None:
        found = measure(groups.dp_group, groups.device)
        console.say(str(found))
        return replace(resolved, gradient_bits=found.bits)
    if bits:
        console.say(f"gradient compression: {bits} bits, {wire_share(bits):.3f} of the bytes of float32")
    return resolved


def reduction(module: StagedModule, groups: Groups, bits: int) -> CompressedReduction | None:
    """Return what averages the gradients of a stage in `bits` bits; None for a single data rank."""
    if groups.dp_group is None:
        return None
    parameters = trained_parameters(module)
    tied = {id(p) for weights in module.tied_modules.values() for p in weights.parameters()}
    return CompressedReduction(
        bits=bits,
        group=groups.dp_group,
        device=groups.device,
        sizes=[p.numel() for p in parameters],
        kinds=[_kind(p, is_tied=id(p) in tied) for p in parameters],
    )


def _kind(parameter: nn.Parameter, *, is_tied: bool) -> str:
    """Return how a gradient is packed, so that ranks with copies of a weight round it to the same mean.

    Rounding depends on the other values in a block, so copies of a weight need equal neighbours on all ranks.
    PACKED gradients are adjacent: weights that all tensor-parallel ranks hold whole, in the same order. ALIGNED ones
    begin a new block: tied weights, whose neighbours differ by stage, and shards, whose values differ by rank. EXACT
    ones are not rounded: shards that overlap with those of other ranks.
    """
    shard = shard_of(parameter)
    if shard is not None and shard.copied:
        return EXACT
    return ALIGNED if is_tied or shard is not None else PACKED
