"""What is changed of a DeepSpeed engine that has just been built, in order, and why.

DeepSpeed decides much inside of its engines: how a norm is counted, when gradients are reduced, in which order stages
compute. Each `Patch` changes one of these for one engine. The order matters where two patches change the same thing:
`after` names what must stand before, and the reason is in `why`. A test holds the list to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn

from harness.deepspeed.engine import ask_the_norm_once, check_every_gradient, forget_outputs
from harness.deepspeed.gradient_reduction import (
    give_every_gradient,
    keep_own_gradients,
    reduce_in_place,
    sum_tied_gradients,
)
from harness.deepspeed.instructions import announce_instructions, tell_labels
from harness.deepspeed.kept_in_fp32 import reduce_fp32_gradients
from harness.parallel.gradients.compressed import CompressedReduction
from harness.parallel.pipeline.schedules.instructions import follow_schedule
from harness.parallel.pipeline.staged_module import LayerSequence, StagedModule
from harness.parallel.tensor.layers import overlap_sums
from harness.parallel.tensor.partial_gradients import defer_sums, sum_once
from harness.parallel.zero import copy_hooked_inputs
from harness.resilience.process.activity import beat
from harness.resilience.watch.watcher import announce_layers
from harness.training.engine.context import EngineContext, LayerTraits
from harness.training.engine.gradients import UnusedParameters, compress_gradients, correct_clipping
from harness.training.engine.losses import GuardedLoss
from harness.training.engine.muon import find_matrices


@dataclass(kw_only=True)
class NewEngine:
    """An engine of DeepSpeed's, and what its patches need to know.

    Attributes:
        module: this rank's layers.
        compression: averages the gradients in few bits; None where DeepSpeed averages them. A patch sets it.
    """

    deepspeed: DeepSpeedEngine
    module: nn.Module
    context: EngineContext
    loss: GuardedLoss
    traits: LayerTraits
    compression: CompressedReduction | None = None

    @property
    def is_staged(self) -> bool:
        """Whether PipelineEngine drives the layers."""
        return isinstance(self.module, StagedModule)

    @property
    def acts_on_nonfinite(self) -> bool:
        """Whether a step that is not finite is to change no weight."""
        return self.context.args.nonfinite != "warn"


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One change of an engine.

    Attributes:
        name: what is changed.
        why: what DeepSpeed does without it, and why it stands at this place where that matters.
        apply: changes the engine.
        when: whether this engine needs it.
        after: names of patches that must have been applied before.
    """

    name: str
    why: str
    apply: Callable[[NewEngine], object]
    when: Callable[[NewEngine], bool] = lambda _: True
    after: tuple[str, ...] = ()


def _is_staged(new: NewEngine) -> bool:
    return new.is_staged


def _compress(new: NewEngine) -> None:
    new.compression = compress_gradients(
        new.deepspeed, new.context.groups, new.context.resolved.gradient_bits, new.context.device
    )


def _sum_partial_gradients(new: NewEngine) -> None:
    defer_sums(list(new.module.parameters()))
    sum_tied_gradients(new.deepspeed, partial(sum_once, list(new.module.parameters())))


def _follow_schedule(new: NewEngine) -> None:
    follow_schedule(new.deepspeed, new.context.resolved.schedule, new.context.resolved.chunks)


def _release_outputs(new: NewEngine) -> None:
    new.loss.release = partial(forget_outputs, new.deepspeed)


PATCHES: tuple[Patch, ...] = (
    # what the optimizer does
    Patch(
        name="reduction in float32",
        why="ZeRO-3 reduces all gradients in one dtype; those of parameters kept in float32 would lose bits",
        apply=lambda new: reduce_fp32_gradients(new.deepspeed.optimizer),
    ),
    Patch(
        name="Muon's matrices",
        why="ZeRO steps on flat tensors; Muon must find the matrices in them, and their shards on other ranks",
        apply=lambda new: find_matrices(new.deepspeed, new.context.groups),
    ),
    Patch(
        name="gradient norm",
        why="a plain fp32 engine counts tied weights once a stage and whole ones too seldom; the optimizer for bf16 "
        "sums squares in float32; ZeRO-1 sums group by group, of which stages may have other numbers. It wraps the "
        "optimizer's step, so it comes before what hooks into that step",
        apply=lambda new: correct_clipping(new.deepspeed, new.context.groups, skip_nonfinite=new.acts_on_nonfinite),
    ),
    Patch(
        name="buckets in place",
        why="ZeRO-1 and ZeRO-2 copy each bucket of gradients before they sum it, and back",
        apply=lambda new: reduce_in_place(new.deepspeed.optimizer),
    ),
    Patch(
        name="check of every gradient",
        why="ZeRO's optimizers look for gradients that are not finite in fp16 alone",
        when=lambda new: new.acts_on_nonfinite,
        apply=lambda new: check_every_gradient(new.deepspeed.optimizer),
    ),
    Patch(
        name="one question about the norm",
        why="ZeRO-1 and ZeRO-2 wait for the device for the check of every gradient, for the norm, and again to clip "
        "by it. The norm says what that check says, so this stands after it",
        when=lambda new: new.acts_on_nonfinite,
        apply=lambda new: ask_the_norm_once(new.deepspeed.optimizer),
        after=("check of every gradient",),
    ),
    # engines without stages: ZeRO-2 and ZeRO-3
    Patch(
        name="inputs that hooks see",
        why="ZeRO-3's hooks pass on views of a layer's inputs, which dropout may not change in place",
        when=lambda new: new.context.resolved.zero_stage == 3 and new.traits.draws,
        apply=lambda new: copy_hooked_inputs(new.module),
    ),
    Patch(
        name="layers for the watch",
        why="such an engine has no instructions by which a rank that hangs could be found",
        when=lambda new: isinstance(new.module, LayerSequence),
        apply=lambda new: announce_layers(new.module.calls) if isinstance(new.module, LayerSequence) else None,
    ),
    # the pipeline engine: what happens to gradients between the last backward pass and the update
    Patch(
        name="compressed reduction",
        why="DeepSpeed sends gradients in their own dtype; here in 8 or 4 bits, where that is asked for",
        when=_is_staged,
        apply=_compress,
    ),
    Patch(
        name="no reduction on one data rank",
        why="DeepSpeed copies all gradients into a flat tensor and back, though no other rank has any. It replaces "
        "ReduceGrads whole; compression, which has changed it already, needs other data ranks",
        when=lambda new: new.is_staged and new.context.groups.dp_group is None,
        apply=lambda new: keep_own_gradients(new.deepspeed),
        after=("compressed reduction",),
    ),
    Patch(
        name="partial and tied gradients",
        why="DeepSpeed sums tied gradients from `grad` alone, where most optimizers do not look, and knows no gradient "
        "that is a part on each tensor-parallel rank: those are summed first, once a step",
        when=_is_staged,
        apply=_sum_partial_gradients,
    ),
    Patch(
        name="sums beside weight gradients",
        why="a tensor-parallel sum can travel while weight gradients are computed. Not on a CPU: the cores that sum "
        "are those that compute, and a step took 1.04 times as long",
        when=lambda new: new.is_staged and new.context.device.type != "cpu",
        apply=lambda new: overlap_sums(new.module),
    ),
    Patch(
        name="a gradient for every parameter",
        why="ZeRO-1 reduces the gradients that there are, so ranks that use other parameters would wait for each "
        "other. It acts before the sums of tied gradients, which it wraps",
        when=_is_staged,
        apply=lambda new: give_every_gradient(new.deepspeed),
        after=("partial and tied gradients",),
    ),
    Patch(
        name="parameters without a gradient",
        why="DeepSpeed decays parameters that no sample uses, unlike torch. It must look before gradients of zeros are "
        "given, so it wraps that patch; and it hooks into the step that the norm has wrapped",
        apply=lambda new: UnusedParameters(new.deepspeed),
        after=("gradient norm", "a gradient for every parameter"),
    ),
    # the pipeline engine: its instructions, and their order
    Patch(
        name="labels for the tiles of the loss",
        why="DeepSpeed hands the labels to the loss alone, but the last layer computes the loss of each tile. It is "
        "told before what the schedule wraps around a forward pass has changed the micro-batch",
        when=lambda new: new.is_staged and new.loss.tiles is not None,
        apply=lambda new: tell_labels(new.deepspeed, new.loss.expect),
    ),
    Patch(
        name="schedule",
        why="DeepSpeed runs 1F1B alone, whatever `pipeline.schedule` says. It wraps what executes the instructions",
        when=_is_staged,
        apply=_follow_schedule,
        after=("labels for the tiles of the loss",),
    ),
    Patch(
        name="instructions for the watch",
        why="a rank that hangs is found by the instruction that it is in; this sees the instructions of any schedule",
        when=_is_staged,
        apply=lambda new: announce_instructions(new.deepspeed, beat),
        after=("schedule",),
    ),
    Patch(
        name="outputs of the last stage",
        why="DeepSpeed keeps the logits of a micro-batch until those of a later one take their place",
        when=_is_staged,
        apply=_release_outputs,
    ),
)


def apply_patches(new: NewEngine) -> None:
    """Apply the patches that an engine needs, in their order; all ranks call it."""
    for patch in PATCHES:
        if patch.when(new):
            patch.apply(new)
