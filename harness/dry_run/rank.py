"""Build with the run's own code what one rank of a run would build, and let it make two steps.

The model is prepared, cut and put into DeepSpeed's engine as in a run. Its tensors have shapes but no values, and there
are no other ranks. Both steps have as few micro-batches as possible; only the second one, which finds the optimizer's
states in place, is counted.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from harness.arguments import TrainingArguments
from harness.batches.collate import MicroBatch
from harness.config import Resolved
from harness.config.model.sharding import Range
from harness.deepspeed import gradient_norm
from harness.deepspeed.initialize import replacing
from harness.deepspeed.no_peers import Received, announce_halves, cut_step, expect_from_peers
from harness.deepspeed.schedule import Observer, announcer
from harness.deepspeed.zero3_parameters import held_tensor
from harness.device.process_group import start
from harness.dry_run.ledger import Ledger, Message, Traffic
from harness.dry_run.memory import Memory, Step
from harness.dry_run.step_timeline import predicted_step
from harness.dry_run.tape import Tape
from harness.dry_run.timeline import TimelineSpan
from harness.dry_run.world import fake_tensors, fake_world
from harness.errors import headline
from harness.extras.compression import of_run as compression
from harness.extras.expert_exchange.exchange import Route, exchange_tokens
from harness.extras.fp8.layers import fp8_layers
from harness.extras.fp8.product import on_device
from harness.extras.fusing import fusing
from harness.extras.router_loss import router_capture
from harness.hf.adapters import Adapters
from harness.hf.layers.dry_run import ASKS_FOR_VALUES
from harness.hf.skeleton import ModelSource
from harness.parallel.comm import TensorParallel
from harness.parallel.pipeline.instructions import most_in_flight, most_kept
from harness.parallel.pipeline.staged_module import LayerSequence, StagedModule, build_layers, pack_payload
from harness.parallel.plans.experts import run_experts_by
from harness.parallel.tensor import cross_entropy
from harness.parallel.values import Value
from harness.planner.hardware import Hardware
from harness.schedules import DEFAULT, SCHEDULES
from harness.topology.env import LaunchEnv
from harness.topology.groups import Groups, build_groups
from harness.topology.layout import Layout
from harness.training.engine.build import build_engine
from harness.training.engine.engine import Engine, PipelineStages
from harness.training.engine.losses import with_objective
from harness.training.engine.spec import DTYPES, EngineSpec
from harness.training.parts import Parts
from harness.training.parts.objective import Objective
from harness.training.prepare.stages import choose_boundaries
from harness.training.prepare.trainable import TrainableModel, require_compilable, trainable_decoder
from harness.verify.token_split import token_split_support

OF_A_MICRO_BATCH = (
    *("LoadMicroBatch", "ForwardPass", "BackwardPass", "InputGradients", "WeightGradients"),
    *("SendActivation", "RecvActivation", "SendGrad", "RecvGrad"),
)
"""The instructions that each micro-batch repeats."""
EXPERTS = "the memory of experts: counted as if each token had weights of its own, which is too much"


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """What one rank builds, holds and sends in a step.

    Attributes:
        chunks: model chunk -> indices of its first and last layer.
        kinds: class name -> number of layers.
        elements: number of elements of its parameters.
        memory: None if no step could be made.
        timeline: of a step; None if it was not asked for, or no step could be made.
        notes: what could not be found out, or differs from a run.
    """

    groups: Groups
    chunks: dict[int, tuple[int, int]]
    kinds: dict[str, int]
    elements: int
    memory: Memory | None
    messages: dict[Message, Traffic]
    notes: list[str]
    timeline: list[TimelineSpan] | None = None


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """The settings of a dry run, read and checked.

    Attributes:
        block_size: tokens of a sequence.
        max_steps: steps of the run, for its learning-rate schedule.
        objective: what is trained on instead of the next token.
    """

    args: TrainingArguments
    source: ModelSource
    adaptation: Adapters | None
    resolved: Resolved
    layout: Layout
    block_size: int
    max_steps: int
    objective: Objective | None = None

    @property
    def rows(self) -> int:
        """The sequences of a micro-batch."""
        return self.resolved.micro_batch * (1 if self.objective is None else self.objective.sequences)

    @property
    def example(self) -> MicroBatch:
        """A micro-batch: token ids [rows, block_size], and the labels."""
        if self.objective is not None:
            return self.objective.example(self.resolved.micro_batch, self.block_size)
        ids = torch.zeros((self.rows, self.block_size), dtype=torch.long)
        return ids, ids


@dataclass(frozen=True, kw_only=True)
class SimulatedRank:
    """A rank that is built, without the others and without memory for its tensors.

    Attributes:
        counted_apart: whether the products of experts are batched, as if each token had weights of its own.
    """

    plan: DryRun
    spec: EngineSpec
    groups: Groups
    trainable: TrainableModel
    boundaries: Sequence[int]
    engine: Engine
    ledger: Ledger
    counted_apart: bool


@contextmanager
def simulated_rank(plan: DryRun, env: LaunchEnv) -> Iterator[SimulatedRank]:
    """Build the rank `env.rank`, which can make steps while the context lasts.

    Raises UserError for what a run would refuse.
    """
    with fake_world(env):
        groups = build_groups(plan.layout, plan.resolved.chunks.loss_stage, start(env))
        spec = EngineSpec(
            args=plan.args,
            # A step is cut to few micro-batches, of which schedules with one chunk a stage have one order. Layers stay
            # uncompiled: torch's compiler would ask for values.
            resolved=replace(plan.resolved, schedule=_schedule(plan.resolved), compile_backend=None),
            max_steps=plan.max_steps,
            compression=compression,
        )
        parts = Parts(
            fp8=partial(fp8_layers, kernel=on_device),
            fusing=fusing,
            plan_tokens=token_split_support,
            routers=router_capture,
            token_exchange=exchange_tokens,
        )
        trainable = trainable_decoder(plan.source, spec, groups, plan.block_size, plan.adaptation, parts=parts)
        if plan.objective is not None:
            loss = partial(plan.objective.loss, data_group=groups.dp_group)
            trainable = replace(trainable, loss=with_objective(trainable.loss, loss))
        if plan.resolved.compile_backend is not None:
            require_compilable(trainable, plan.resolved.compile_backend, plan.resolved.compile_options)
        boundaries = choose_boundaries(trainable, spec.resolved, None)
        with (
            # These two make loops over blocks one pass over everything: blocks are there to fit into a CPU's cache, and
            # without memory they only cost time.
            replacing(
                (gradient_norm, "BLOCK", 2**62),
                (cross_entropy, "IN_CACHE", _logits_at_once(plan)),
                (Route, "of", partial(_even_routes, layout=plan.layout)),
            ),
            fake_tensors(),
            Ledger(plan.layout, env.rank) as ledger,
        ):
            engine = build_engine(spec, groups, trainable.layers, boundaries, trainable.loss, trainable.traits)
            yield SimulatedRank(
                plan=plan,
                spec=spec,
                groups=groups,
                trainable=trainable,
                boundaries=boundaries,
                engine=engine,
                ledger=ledger,
                counted_apart=_experts_by_token(engine.deepspeed.module, spec.dtype),
            )


def dry_run_rank(plan: DryRun, env: LaunchEnv, hardware: Hardware | None = None) -> RankReport:
    """Build the rank `env.rank`, let it make two steps, and report. Raises UserError for what a run would refuse.

    Args:
        hardware: the device of which the report shall have a timeline.
    """
    with simulated_rank(plan, env) as rank:
        groups, boundaries, trainable = rank.groups, rank.boundaries, rank.trainable
        memory: Memory | None = None
        messages: dict[Message, Traffic] = {}
        timeline: list[TimelineSpan] | None = None
        untried: str | None = None
        overlaps = getattr(rank.engine.deepspeed, "overlaps", False)
        try:
            memory, messages = _two_steps(rank)
            if hardware is not None:
                rank.engine.deepspeed.overlaps = overlaps
                tape = Tape(hardware, plan.layout, env.rank)
                timeline = predicted_step(rank.engine, plan.resolved, tape, plan.example)
        except ASKS_FOR_VALUES as error:
            untried = f"a step, as it looks at values ({type(error).__name__}: {headline(error)})"
        chunks = {
            chunk: (boundaries[chunk], boundaries[chunk + 1] - 1)
            for chunk in plan.resolved.chunks.of_stage(groups.coordinate.stage)
        }
        return RankReport(
            groups=groups,
            chunks=chunks,
            kinds=dict(Counter(name for a, b in chunks.values() for name in trainable.names[a : b + 1])),
            elements=sum(held_tensor(parameter).numel() for parameter in rank.engine.deepspeed.module.parameters()),
            memory=memory,
            messages=messages,
            notes=[note for note in (untried, EXPERTS if rank.counted_apart else None) if note],
            timeline=timeline,
        )


def _schedule(resolved: Resolved) -> str:
    return resolved.schedule if resolved.chunks.per_stage > 1 else DEFAULT


def _logits_at_once(plan: DryRun) -> int:
    """Return how many logits become float32 at a time: as many as on a GPU, or a sixteenth of a tile's if that is more.

    At a million tokens a GPU's number makes hundreds of thousands of operations, each of which takes a tenth of a
    millisecond here. A sixteenth counts at most half a byte too much for each logit of a tile.
    """
    vocabulary: int = plan.source.config.get_text_config(decoder=True).vocab_size
    tile = plan.rows * plan.resolved.loss_tile * vocabulary // plan.layout.tp_size
    return max(cross_entropy.ELEMENTS_AT_ONCE, tile // 16)


def _even_routes(
    pieces: Sequence[Tensor], _ranges: Sequence[Range], place: TensorParallel, *, layout: Layout
) -> list[Route]:
    """Return routes that send equally many tokens to each expert: `Route.of` would need the router's choices."""
    routes = []
    for piece in pieces:
        each = max(piece.numel() // layout.tp_size // place.size, 1)
        none = torch.zeros(each * place.size, dtype=torch.long)
        routes.append(Route(order=none, sizes=[[each] * place.size] * place.size, experts=none))
    return routes


def _two_steps(rank: SimulatedRank) -> tuple[Memory, dict[Message, Traffic]]:
    """Return memory and messages of the second of two steps, in which the optimizer already has its states."""
    engine, plan, ledger = rank.engine, rank.plan, rank.ledger
    deepspeed = engine.deepspeed
    accumulation = plan.resolved.accumulation
    pipeline = isinstance(engine, PipelineStages)
    count = Step(ledger, deepspeed)
    expect_peers(rank)
    if pipeline:
        deepspeed.overlaps = False  # what one micro-batch sends is counted for each, but gradients are sent once a step
        if plan.resolved.chunks.per_stage > 1:
            deepspeed.observe(Observer(begin=count.begin_at, end=lambda _name, _place: count.end()))
        else:
            deepspeed.observe(announcer(count.begin))
    else:
        announce_halves(deepspeed, count.begin)
    micro_batches = 1 if pipeline else min(2, accumulation)
    if not (spared := gc.get_freeze_count()):  # otherwise the caller froze the gc, and unfreezing would undo that too
        gc.freeze()  # the collections before backward passes then look at the step's own objects only
    for _ in range(2):
        ledger.begin_step()
        count.kept.clear()
        make_step(rank, micro_batches)
    if not spared:
        gc.unfreeze()
    repeated = OF_A_MICRO_BATCH if pipeline else ("BackwardPass", "OptimizerStep")
    times = dict.fromkeys(repeated, accumulation if pipeline else accumulation - 1)
    return _on_device(count.memory(_in_flight(engine, plan, count.kept)), engine, plan), ledger.messages(times)


def expect_peers(rank: SimulatedRank) -> None:
    """Have a pipeline's stage "receive" in its steps what its neighbours would send."""
    engine, plan = rank.engine, rank.plan
    engine.compared = True  # skip the comparison of the batches with those of other ranks: there are none
    if isinstance(engine, PipelineStages):
        cut_step(engine.deepspeed, 1)
        own = plan.resolved.chunks.of_stage(rank.groups.coordinate.stage)
        ids, _ = plan.example
        earlier = {
            chunk: _before(rank.trainable, rank.boundaries, rank.spec.dtype, chunk, ids) for chunk in own if chunk
        }
        expect_from_peers(engine.deepspeed, earlier)


def make_step(rank: SimulatedRank, micro_batches: int) -> None:
    """Make one optimizer step with fewer micro-batches than a run's."""
    engine = rank.engine
    cut_step(engine.deepspeed, micro_batches)
    engine.train_step([rank.plan.example] * micro_batches if engine.reads_data else [], 0, rank.plan.block_size)


def _on_device(memory: Memory, engine: Engine, plan: DryRun) -> Memory:
    """Return the memory with offloaded tensors counted as `host`; here they have the same device as all others.

    At the peak of a step all offloaded states exist. Of the hidden states that wait for recomputation, two are on the
    device: the one in use, and the one that is being copied.
    """
    zero = plan.resolved.config.get("zero_optimization", {})
    sections = [zero.get(name) or {} for name in ("offload_optimizer", "offload_param")]
    optimizer, parameters = (section.get("device", "none") != "none" for section in sections)
    states = sum(memory.optimizer.values()) + sum(memory.gradients.values()) if optimizer else 0
    states += sum(memory.parameters.values()) if parameters and plan.resolved.zero_stage == 3 else 0
    waiting = 0
    if plan.resolved.config.get("activation_checkpointing", {}).get("cpu_checkpointing"):
        waiting = max(recomputed_blocks(engine.deepspeed.module) - 2, 0) * _hidden_bytes(plan)
    on_host = states + round(memory.in_flight * waiting)
    kept = max(memory.activations - waiting, 0)
    return replace(memory, activations=kept, peak=max(memory.peak - on_host, 0), host=on_host)


def _hidden_bytes(plan: DryRun) -> int:
    """Return the bytes of this rank's hidden state of a micro-batch between two layers."""
    width = plan.source.config.get_text_config(decoder=True).hidden_size
    shares = plan.layout.cp_size * (plan.layout.tp_size if plan.resolved.sequence_parallel else 1)
    tokens = plan.rows * -(-plan.block_size // shares)
    return int(tokens * width * DTYPES[plan.resolved.precision].itemsize)


def _in_flight(engine: Engine, plan: DryRun, kept: Mapping[int, int]) -> float:
    """Return the number of micro-batches whose activations the schedule keeps at once on this rank.

    Args:
        kept: bytes of activations of one micro-batch, by model chunk.
    """
    if not isinstance(engine, PipelineStages):
        return 1
    stage = engine.groups.coordinate.stage
    accumulation = plan.resolved.accumulation
    passes = list(SCHEDULES[plan.resolved.schedule].order(plan.resolved.chunks, accumulation, stage))
    if plan.resolved.chunks.per_stage > 1:
        return round(most_kept(passes, kept) / sum(kept.values()), 3)
    return most_in_flight(passes)


def _before(
    trainable: TrainableModel, boundaries: Sequence[int], dtype: torch.dtype, stage: int, ids: Value
) -> Received:
    """Return what the previous stage sends for these ids: all earlier layers are built, run and freed one by one.

    If only a hidden state travels, the first layer suffices: all later ones have outputs of the same shape.
    """
    causal = trainable.causal
    bare = causal is not None and causal.outer.schema.bare and causal.router is None
    value: Value = ids
    with torch.no_grad():
        for index in range(1 if bare else boundaries[stage]):
            layer = build_layers(trainable.layers, index, index + 1, 0).calls[0]
            if isinstance(layer, nn.Module):
                _experts_by_token(layer, dtype)
            value = layer(value)
    return pack_payload(value)


def _experts_by_token(module: nn.Module, dtype: torch.dtype) -> bool:
    """Switch fused experts to batched matrix products, unless in bf16; return whether there are any.

    torch's grouped products can run on tensors without values only in bf16.
    """
    if dtype == torch.bfloat16:
        return False
    experts: list[Any] = [each for each in module.modules() if hasattr(each, "is_concatenated")]
    for each in experts:
        run_experts_by(each.config, "batched_mm")
    return bool(experts)


def recomputed_blocks(module: nn.Module) -> int:
    """Return the number of recomputed runs of layers in a stage or in a whole model."""
    if isinstance(module, LayerSequence):
        return sum(recomputed for _, recomputed in module.blocks)
    return sum(recomputed for _, recomputed in module.blocks()) if isinstance(module, StagedModule) else 0
