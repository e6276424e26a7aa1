"""The lists of changes to DeepSpeed while it builds an engine, and to the engine then, in order, each with its reason.

DeepSpeed decides much inside its engines: how a norm is computed, when gradients are reduced, in which order stages
compute. Each `Patch` changes one of these for one engine; a `BuildPatch` changes how DeepSpeed builds it. The order
matters where two patches wrap the same function:
`after` names the patches that must come before, and `why` gives the reason. A test checks the order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from harness.deepspeed.engine import ask_the_norm_once, check_every_gradient, forget_outputs
from harness.deepspeed.expert_groups import knowing_experts
from harness.deepspeed.gradient_reduction import (
    give_every_gradient,
    keep_own_gradients,
    reduce_in_place,
    sum_tied_gradients,
)
from harness.deepspeed.instructions import announce_instructions, tell_labels
from harness.deepspeed.kept_in_fp32 import keeping_fp32, reduce_fp32_gradients
from harness.deepspeed.pipeline import LayerCall
from harness.deepspeed.zero3_parameters import restore_linear
from harness.parallel.gradients.compressed import CompressedReduction
from harness.parallel.pipeline.schedules.instructions import follow_schedule
from harness.parallel.pipeline.staged_module import LayerSequence, StagedModule
from harness.parallel.tensor.layers import overlap_sums
from harness.parallel.tensor.partial_gradients import defer_sums, sum_once
from harness.parallel.tensor.shard import shard_of
from harness.parallel.zero import copy_hooked_inputs
from harness.resilience.process.activity import beat
from harness.training.engine.context import EngineContext, LayerTraits
from harness.training.engine.gradients import UnusedParameters, compress_gradients, correct_clipping
from harness.training.engine.losses import GuardedLoss
from harness.training.engine.muon import find_matrices


@dataclass(frozen=True, kw_only=True)
class BuildPatch:
    """One change of DeepSpeed while it builds an engine.

    Attributes:
        name: the thing that is changed.
        why: what DeepSpeed does without the change, and why it has to be in place before the engine exists.
        during: returns the context for `deepspeed.initialize` around this rank's layers.
    """

    name: str
    why: str
    during: Callable[[EngineContext, nn.Module], AbstractContextManager[object]]


def _with_torchs_linear(context: EngineContext, _module: nn.Module) -> AbstractContextManager[object]:
    if context.resolved.zero_stage != 3:
        restore_linear()
    return nullcontext()


def _with_experts(context: EngineContext, module: nn.Module) -> AbstractContextManager[object]:
    trained = any(parameter.requires_grad for parameter in over_data(module))
    return knowing_experts(context.groups.ep_group, context.groups.ep_copies, marked=trained)


BUILD_PATCHES: tuple[BuildPatch, ...] = (
    BuildPatch(
        name="torch's linear",
        why="an earlier ZeRO-3 engine in this process has replaced torch.nn.functional.linear, and does not put it "
        "back. Only another ZeRO-3 engine may keep the replacement",
        during=_with_torchs_linear,
    ),
    BuildPatch(
        name="parameters kept in float32",
        why="DeepSpeed casts all parameters of a bf16 engine, and joins those of ZeRO-3 in one tensor of one dtype, "
        "both in its constructor",
        during=lambda _context, _module: keeping_fp32(),
    ),
    BuildPatch(
        name="experts on other data ranks",
        why="DeepSpeed recognises only layers of its own MoE classes, and would average the gradients of experts over "
        "ranks that hold other experts. Its constructor looks for them, and its optimizers read the groups there",
        during=_with_experts,
    ),
)


def over_data(module: nn.Module) -> list[nn.Parameter]:
    """Return the experts' parameters of this rank that differ between data-parallel ranks."""
    return [p for p in module.parameters() if (shard := shard_of(p)) is not None and shard.over_data]


@contextmanager
def build_patches(context: EngineContext, module: nn.Module) -> Iterator[None]:
    """Build an engine in this context: all `BUILD_PATCHES` are in place."""
    with ExitStack() as stack:
        for patch in BUILD_PATCHES:
            stack.enter_context(patch.during(context, module))
        yield


@dataclass(kw_only=True)
class NewEngine:
    """A newly built DeepSpeed engine, with what its patches need.

    Attributes:
        module: this rank's layers.
        compression: the compressed reduction of gradients, set by a patch; None if DeepSpeed reduces them.
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
        """Whether a non-finite step must change no weight."""
        return self.context.args.nonfinite != "warn"


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One change of an engine.

    Attributes:
        name: the thing that is changed.
        why: what DeepSpeed does without the change, and why it comes at this place if that matters.
        apply: changes the engine.
        when: whether an engine needs the change.
        after: names of patches that must be applied before.
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


def _release_outputs(new: NewEngine) -> None:
    new.loss.release = partial(forget_outputs, new.deepspeed)


def announce_layers(calls: Sequence[LayerCall]) -> None:
    """Report the start of each layer's forward and backward as progress.

    For engines without pipeline instructions (ZeRO-2, ZeRO-3), which report nothing else within a step.
    """
    for index, call in enumerate(calls):
        if isinstance(call, nn.Module):
            call.register_forward_pre_hook(partial(_forward, f"forward of layer {index}"))
            call.register_forward_hook(partial(_backward, f"backward of layer {index}"))


def _forward(doing: str, _layer: nn.Module, _inputs: object) -> None:
    beat(doing)


def _backward(doing: str, _layer: nn.Module, _inputs: object, output: object) -> None:
    """Report the start of a layer's backward, when the gradient of its output arrives."""
    for tensor in tree_leaves(output):
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(lambda _gradient: beat(doing))
            return


PATCHES: tuple[Patch, ...] = (
    # what the optimizer does
    Patch(
        name="reduction in float32",
        why="ZeRO-3 reduces all gradients in one dtype; those of parameters kept in float32 would lose precision",
        apply=lambda new: reduce_fp32_gradients(new.deepspeed.optimizer),
    ),
    Patch(
        name="Muon's matrices",
        why="ZeRO updates flat tensors; Muon must find the matrices in them, and their shards on other ranks",
        apply=lambda new: find_matrices(new.deepspeed, new.context.groups),
    ),
    Patch(
        name="gradient norm",
        why="a plain fp32 engine counts a tied weight on each stage that has it, and weights that tensor-parallel "
        "ranks hold whole only on the first stage; the bf16 optimizer sums squares in float32; ZeRO-1 has one "
        "collective for each parameter group, and stages may have different numbers of groups. This patch wraps "
        "the optimizer's step, so it comes before patches that hook into that step",
        apply=lambda new: correct_clipping(new.deepspeed, new.context.groups, skip_nonfinite=new.acts_on_nonfinite),
    ),
    Patch(
        name="buckets in place",
        why="ZeRO-1 and ZeRO-2 copy each bucket of gradients before the reduction, and back after it",
        apply=lambda new: reduce_in_place(new.deepspeed.optimizer),
    ),
    Patch(
        name="check of every gradient",
        why="ZeRO's optimizers look for non-finite gradients only in fp16",
        when=lambda new: new.acts_on_nonfinite,
        apply=lambda new: check_every_gradient(new.deepspeed.optimizer),
    ),
    Patch(
        name="one question about the norm",
        why="ZeRO-1 and ZeRO-2 wait for the device three times: to check every gradient, for the norm, and to clip. A "
        "finite norm proves finite gradients, so one wait is enough. This patch replaces the "
        "check that the one before has set",
        when=lambda new: new.acts_on_nonfinite,
        apply=lambda new: ask_the_norm_once(new.deepspeed.optimizer),
        after=("check of every gradient",),
    ),
    # engines without stages: ZeRO-2 and ZeRO-3
    Patch(
        name="inputs that hooks see",
        why="ZeRO-3's hooks replace a layer's inputs by views, which autograd does not let dropout change in place",
        when=lambda new: new.context.resolved.zero_stage == 3 and new.traits.draws,
        apply=lambda new: copy_hooked_inputs(new.module),
    ),
    Patch(
        name="layers for the watch",
        why="an engine without a pipeline has no instructions that show the watchdog where a rank hangs",
        when=lambda new: isinstance(new.module, LayerSequence),
        apply=lambda new: announce_layers(new.module.calls) if isinstance(new.module, LayerSequence) else None,
    ),
    # the pipeline engine: what happens to gradients between the last backward pass and the update
    Patch(
        name="compressed reduction",
        why="DeepSpeed reduces gradients in their own dtype; with compression they are sent in 8 or 4 bits",
        when=_is_staged,
        apply=_compress,
    ),
    Patch(
        name="no reduction on one data rank",
        why="DeepSpeed copies all gradients into a flat tensor and back, even for a single data rank. Compression does "
        "not meet this patch: it acts on several data ranks",
        when=lambda new: new.is_staged and new.context.groups.dp_group is None,
        apply=lambda new: keep_own_gradients(new.deepspeed),
    ),
    Patch(
        name="partial and tied gradients",
        why="DeepSpeed sums tied gradients in `grad`, where most of its optimizers do not look, and does not know of "
        "gradients that are partial sums on each tensor-parallel rank: these are summed first, once a step",
        when=_is_staged,
        apply=_sum_partial_gradients,
    ),
    Patch(
        name="sums beside weight gradients",
        why="a tensor-parallel all-reduce can overlap with the computation of weight gradients. Not on a CPU: there "
        "the same cores compute and sum, and a step took 1.04 times as long",
        when=lambda new: new.is_staged and new.context.device.type != "cpu",
        apply=lambda new: overlap_sums(new.module),
    ),
    Patch(
        name="a gradient for every parameter",
        why="ZeRO-1 reduces only existing gradients, so ranks that use different parameters would call different "
        "collectives and hang. This patch acts before tied gradients are summed, so it wraps that patch",
        when=_is_staged,
        apply=lambda new: give_every_gradient(new.deepspeed),
        after=("partial and tied gradients",),
    ),
    Patch(
        name="parameters without a gradient",
        why="DeepSpeed applies weight decay to parameters that no sample uses, unlike torch. This patch looks before "
        "missing gradients are filled with zeros, so it wraps that patch; and it hooks into the step that the norm "
        "has wrapped",
        apply=lambda new: UnusedParameters(new.deepspeed),
        after=("gradient norm", "a gradient for every parameter"),
    ),
    # the pipeline engine: its instructions, and their order
    Patch(
        name="labels for the tiles of the loss",
        why="DeepSpeed passes labels only to the loss, but with tiling the last layer computes the loss of each tile. "
        "This patch comes before the schedule, which wraps the forward pass and changes the micro-batch",
        when=lambda new: new.is_staged and new.loss.tiles is not None,
        apply=lambda new: tell_labels(new.deepspeed, new.loss.expect),
    ),
    Patch(
        name="schedule",
        why="DeepSpeed knows only 1F1B, whatever `pipeline.schedule` says. This patch wraps the execution of "
        "instructions",
        when=_is_staged,
        apply=lambda new: follow_schedule(new.deepspeed, new.context.resolved.schedule, new.context.resolved.chunks),
        after=("labels for the tiles of the loss",),
    ),
    Patch(
        name="instructions for the watch",
        why="the watchdog finds a hanging rank by its current instruction. It must see those of any schedule",
        when=_is_staged,
        apply=lambda new: announce_instructions(new.deepspeed, beat),
        after=("schedule",),
    ),
    Patch(
        name="outputs of the last stage",
        why="DeepSpeed keeps the logits of a micro-batch in memory until those of a later one replace them",
        when=_is_staged,
        apply=_release_outputs,
    ),
)


def apply_patches(new: NewEngine) -> None:
    """Apply the patches that an engine needs, in order; all ranks call it."""
    for patch in PATCHES:
        if patch.when(new):
            patch.apply(new)
