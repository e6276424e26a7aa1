"""`--verify_plan`: compare the sharded model with the whole one on a tiny copy, before the real model is built.

A sharding that does not match is refused on all ranks. `auto` skips the test if the matrix of tested families
(`models/matrix.json`) lists this family as correct in this layout with the installed transformers; but it always tests
unequal shares, sequence parallelism, context parallelism and tiles. `on` always tests, and refuses a model that cannot
be tested. `off` never tests.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from harness.console import Console
from harness.errors import UserError
from harness.hf.causal import CausalModel, assemble
from harness.hf.skeleton import ModelSource
from harness.parallel.comm import ALONE, TensorParallel
from harness.topology.agreement import all_gather_object, any_rank
from harness.topology.groups import Groups
from harness.topology.layout import Layout
from harness.training.engine.spec import EngineSpec
from harness.verify.comparison import NOT_CAUSAL, Difference, find_difference, looks_ahead, worst_of
from harness.verify.matrix import is_tested
from harness.verify.tiny_copy import shrink

TINY_TILE = 5
"""Tokens of a tile in the tiny copy, whose sequences are short."""


def verify_plan(causal: CausalModel, spec: EngineSpec, groups: Groups, console: Console) -> None:
    """Test the sharding of `causal` as the arguments ask. UserError, on every rank, if it does not match the model.

    All ranks call it, after the model has been cut without an error.
    """
    source = causal.source
    requested = spec.args.verify_plan
    tensor = groups.layout.tp_size
    known = not (causal.unequal or causal.shares_sequence or causal.apart.is_any) and is_tested(
        source.config, tensor > 1, experts=groups.ep_group is not None
    )
    if requested == "off" or (requested == "auto" and not any_rank(not known)):  # hosts may have different matrices
        return
    start_time = time.perf_counter()
    found: tuple[float, str | None, str | None] = (0.0, None, None)  # difference, refusal, why it was not tested
    try:
        found = _refusal(causal, spec, groups)
    except UserError as error:
        found = (0.0, None, str(error))
    refusal, untried = _worst(found)
    if refusal is not None:
        raise UserError(refusal)
    if untried is not None and requested == "on":
        raise UserError(f"--verify_plan on: {untried}")
    if untried is not None:
        console.warn(f"the sharding of this {source.config.model_type} model was not verified: {untried}")
    else:
        console.say(
            f"verified: the sharded model matches the whole one (tiny copy, {time.perf_counter() - start_time:.1f} s)"
        )


def _refusal(causal: CausalModel, spec: EngineSpec, groups: Groups) -> tuple[float, str | None, str | None]:
    source = causal.source
    tensor = TensorParallel.of(groups.tp_group)
    tiny = shrink(source.config, tensor=tensor.size)
    if looks_ahead(tiny, groups.device):
        text = f"model type {source.config.model_type!r}: {NOT_CAUSAL}"
        hint = "set is_decoder to true in its config.json" if hasattr(source.config, "is_decoder") else "choose another"
        return float("inf"), f"{text}: {hint}", None
    unequal: set[str] = set()
    neighbours = TensorParallel.of(groups.ep_group)
    cut = partial(_cut, spec=spec, groups=groups, model=causal, unequal=unequal)
    # Step by step, so that the refusal names the cause: first the model as a list of layers on each rank alone, then
    # sharded over tensor-parallel ranks with distributed experts, then with the tokens split over context ranks.
    difference = find_difference(tiny, cut, ALONE, groups.device)
    difference = worst_of(worst_of(difference, tensor), neighbours)
    separate = difference is None and (tensor.size > 1 or neighbours.size > 1)
    if separate:
        together = partial(cut, neighbours=neighbours)
        difference = find_difference(tiny, together, tensor, groups.device, neighbours=neighbours)
    if causal.apart.context is not None:
        difference = worst_of(difference, tensor, causal.apart.context)
        if difference is None:
            shared = partial(cut, shared=True)
            difference = find_difference(tiny, shared, tensor, groups.device, causal.apart.context)
    if difference is None:
        equal = sorted(causal.unequal - unequal)
        untried = f"the ranks hold unequal shares of {equal[0]}, but equal ones in the tiny copy" if equal else None
        return 0.0, None, untried
    return difference.off, _told(source, spec, groups.layout, difference, separate=separate), None


def _cut(
    source: ModelSource,
    tensor: TensorParallel,
    spec: EngineSpec,
    groups: Groups,
    model: CausalModel,
    unequal: set[str],
    *,
    shared: bool = False,
    neighbours: TensorParallel = ALONE,
) -> CausalModel:
    """Return the sharded model.

    Args:
        model: the sharded real model.
        unequal: gets the names of parameters with unequal shares.
        shared: whether context ranks share the tokens.
        neighbours: the ranks over which experts are distributed.
    """
    apart = model.apart
    cut = assemble(
        source,
        tensor=tensor,
        device=groups.device,
        dtype=torch.float32,
        seed=spec.args.seed,
        finish=lambda _: None,
        experts=None if model.experts is None else replace(model.experts, ranks=neighbours, pieces=1),
        sequence_parallel=spec.resolved.sequence_parallel,
        apart=replace(
            apart,
            context=apart.context if shared else None,
            loss_tile=min(apart.loss_tile, TINY_TILE),
            block_tile=min(apart.block_tile, TINY_TILE),
            attention_tile=min(apart.attention_tile, TINY_TILE),
        ),
    )
    unequal |= cut.unequal
    return cut


def _told(source: ModelSource, spec: EngineSpec, layout: Layout, difference: Difference, *, separate: bool) -> str:
    """Return the text of the refusal; `separate`: whether ranks held different experts when the comparison failed."""
    name = source.config.model_type
    if difference.context:
        return (
            f"model type {name!r}, with its tokens spread over {layout.cp_size} context ranks, does not "
            f"match the whole one: {difference} (on a tiny copy): remove context_parallel.size"
        )
    if difference.tensor_parallel:
        size = layout.tp_size
        if spec.resolved.sequence_parallel and difference.off == float("inf"):
            return (
                f"model type {name!r} cannot have its sequence split over {size} tensor-parallel ranks: its layers "
                "combine one rank's tokens with those of all ranks (seen on a tiny copy): remove "
                "tensor_parallel.sequence_parallel"
            )
        if spec.resolved.sequence_parallel:
            return (
                f"model type {name!r}, with its sequence split over {size} tensor-parallel ranks, does not match the "
                f"whole one: {difference} (on a tiny copy): remove tensor_parallel.sequence_parallel"
            )
        return (
            f"model type {name!r}, split over {size} tensor-parallel ranks, does not match the whole one: {difference} "
            "(on a tiny copy): correct its plan, or set tensor_parallel.autotp_size to 1"
        )
    if separate:
        return (
            f"model type {name!r}, with its experts on {layout.ep_size} ranks, does not match the whole "
            f"one: {difference} (on a tiny copy): correct its expert-parallel plan, or remove expert_parallel"
        )
    return (
        f"model type {name!r}, cut into its layers, does not match the whole one: {difference} (on a tiny copy): "
        "it cannot be trained here; please report the family"
    )


def _worst(own: tuple[float, str | None, str | None]) -> tuple[str | None, str | None]:
    """Return, equal on all ranks, the refusal with the largest difference, and why a rank did not test."""
    all_found = all_gather_object(own) if dist.is_initialized() and dist.get_world_size() > 1 else [own]
    _, refusal, _ = max(all_found, key=lambda found: (found[1] is not None, found[0]))
    return refusal, next((found[2] for found in all_found if found[2] is not None), None)
