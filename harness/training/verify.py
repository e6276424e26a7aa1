"""`--verify_plan`: before a model is built, its cut is tried on a tiny copy, and a wrong one refused on all ranks.

`auto` tries what the matrix of tested families (`models/matrix.json`) does not hold as right in this layout, by the
installed transformers, and all shares that are not equal; `on` tries always, and refuses what cannot be tried; `off`
never tries.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from harness.config.errors import UserError
from harness.models.causal import CausalModel, assemble
from harness.models.matrix import is_tested
from harness.models.skeleton import ModelSource
from harness.models.tiny import shrink
from harness.models.verify import Difference, find_difference, looks_ahead, worst_of
from harness.parallel.comm import TensorParallel
from harness.training.build import Setting
from harness.training.console import Console


def verify_plan(causal: CausalModel, setting: Setting, console: Console) -> None:
    """Try the cut of `causal` as the arguments ask; UserError, on every rank, if it is not the model.

    All ranks call it, once they know that the model can be cut at all.
    """
    source, wish, tensor = causal.source, setting.args.verify_plan, setting.groups.layout.tensor
    known = not causal.unequal and is_tested(source.config, tensor > 1)
    if wish == "off" or (wish == "auto" and known):
        return
    begun = time.perf_counter()
    found: tuple[float, str | None, str | None] = (0.0, None, None)  # how far off, refusal, why it was not tried
    try:
        found = _refusal(causal, setting)
    except UserError as error:
        found = (0.0, None, str(error))
    refusal, untried = _worst(found)
    if refusal is not None:
        raise UserError(refusal)
    if untried is not None and wish == "on":
        raise UserError(f"--verify_plan on: {untried}")
    if untried is not None:
        console.warn(f"the sharding of this {source.config.model_type} model was not verified: {untried}")
    else:
        console.say(
            f"verified: the sharded model matches the whole one (tiny copy, {time.perf_counter() - begun:.1f} s)"
        )


def _refusal(causal: CausalModel, setting: Setting) -> tuple[float, str | None, str | None]:
    source, tensor = causal.source, TensorParallel.of(setting.groups.tensor)
    tiny = shrink(source.config, tensor=tensor.size)
    if looks_ahead(tiny, setting.device):
        text = (
            f"model type {source.config.model_type!r}: its logits depend on later tokens, so it is not a causal decoder"
        )
        hint = "set is_decoder to true in its config.json" if hasattr(source.config, "is_decoder") else "choose another"
        return float("inf"), f"{text}: {hint}", None
    unequal: set[str] = set()
    cut = partial(_cut, setting=setting, unequal=unequal)
    difference = worst_of(find_difference(tiny, cut, TensorParallel(), setting.device), tensor)
    if difference is None and tensor.size > 1:
        difference = find_difference(tiny, cut, tensor, setting.device)
    if difference is None:
        equal = sorted(causal.unequal - unequal)
        untried = f"the ranks hold unequal shares of {equal[0]}, but equal ones in the tiny copy" if equal else None
        return 0.0, None, untried
    return difference.off, _told(source, setting, difference), None


def _cut(source: ModelSource, tensor: TensorParallel, setting: Setting, unequal: set[str]) -> CausalModel:
    """The cut model; `unequal` gets the names of parameters of which ranks hold unequal shares."""
    cut = assemble(
        source,
        tensor=tensor,
        device=setting.device,
        dtype=torch.float32,
        seed=setting.args.seed,
        finish=lambda layer: None,
        whole_experts=setting.resolved.expert > 1,
    )
    unequal |= cut.unequal
    return cut


def _told(source: ModelSource, setting: Setting, difference: Difference) -> str:
    name = source.config.model_type
    if difference.tensor_parallel:
        size = setting.groups.layout.tensor
        return (
            f"model type {name!r}, split over {size} tensor-parallel ranks, does not match the whole one: {difference} "
            "(on a tiny copy): correct its plan, or set tensor_parallel.autotp_size to 1"
        )
    return (
        f"model type {name!r}, cut into its layers, does not match the whole one: {difference} (on a tiny copy): "
        "it cannot be trained here; please report the family"
    )


def _worst(own: tuple[float, str | None, str | None]) -> Any:
    """The same answer for all ranks: the refusal that is furthest off, and why any rank has not tried."""
    all_found: list[Any] = [own]
    if dist.is_initialized() and dist.get_world_size() > 1:
        all_found = [None] * dist.get_world_size()
        dist.all_gather_object(all_found, own)
    _, refusal, _ = max(all_found, key=lambda found: (found[1] is not None, found[0]))
    return refusal, next((found[2] for found in all_found if found[2] is not None), None)
