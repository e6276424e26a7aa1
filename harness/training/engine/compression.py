"""Whether an engine's gradients are compressed between data-parallel ranks, and how."""

from __future__ import annotations

from dataclasses import replace

import torch
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import nn

from harness.config import Resolved
from harness.console import Console
from harness.deepspeed.gradient_reduction import average_with, trained_parameters
from harness.parallel.gradients.compressed import ALIGNED, EXACT, PACKED, CompressedReduction, wire_share
from harness.parallel.gradients.link import measure
from harness.parallel.tensor.shard import shard_of
from harness.topology.groups import Groups


def settle_compression(resolved: Resolved, groups: Groups, device: torch.device, console: Console) -> Resolved:
    """Return the config with a number of bits, measured where it says "auto", and report it; all ranks call it."""
    bits = resolved.gradient_bits
    if groups.layout.dp_size == 1:
        return replace(resolved, gradient_bits=0)
    if bits is None:
        found = measure(groups.dp_group, device)
        console.say(str(found))
        return replace(resolved, gradient_bits=found.bits)
    if bits:
        console.say(f"gradient compression: {bits} bits, {wire_share(bits):.3f} of the bytes of float32")
    return resolved


def compress_gradients(
    engine: PipelineEngine, groups: Groups, bits: int | None, device: torch.device
) -> CompressedReduction | None:
    """Have a pipeline's engine average gradients in so many bits; None where there is nothing to do (0 bits)."""
    if not bits or groups.dp_group is None:
        return None
    parameters = trained_parameters(engine)
    tied = {id(p) for weights in engine.module.tied_modules.values() for p in weights.parameters()}
    reduction = CompressedReduction(
        bits=bits,
        group=groups.dp_group,
        device=device,
        sizes=[p.numel() for p in parameters],
        kinds=[_kind(p, is_tied=id(p) in tied) for p in parameters],
    )
    average_with(engine, reduction.average)
    return reduction


def _kind(parameter: nn.Parameter, *, is_tied: bool) -> str:
    """Return how a gradient lies among the others, so that ranks with the same weight get the same mean.

    Tensor-parallel neighbours that hold copies of a part of a weight, beside parts of their own, could not.
    """
    shard = shard_of(parameter)
    if shard is not None and shard.copied:
        return EXACT
    return ALIGNED if is_tied or shard is not None else PACKED
