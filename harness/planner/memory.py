"""Bytes that a rank of a stage holds at the peak of a step.

Parameters, gradients and optimizer states are what DeepSpeed's optimizers allocate (bf16_optimizer.py, zero/
stage_1_and_2.py, zero/stage3.py), shared out as in Rajbhandari et al. 2020. Activations are counted by what autograd
keeps for the backward, after Korthikanti et al. 2022, section 4, and kept for as many micro-batches as are in flight
under 1F1B (Narayanan et al. 2021, section 2.2.1): stages - stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from harness.config.values.layout_keys import GPIPE
from harness.planner.passing import StageLoad, passing_bytes, shared_bytes
from harness.planner.shape import LayerShape
from harness.planner.stages import Stage
from harness.planner.traffic import data_ranks, expert_ranks
from harness.planner.workload import Strategy, Workload, layer_experts, layer_parameters

ALLOCATOR_SHARE = 0.04  # of activations: a GPU's blocks are rounded up, and gaps between them stay unused
# logits that the cross entropy exponentiates at a time (harness/parallel/tensor/cross_entropy.py)
LOSS_CHUNK, LOSS_CHUNK_ON_CPU = 2**23, 2**18


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Bytes of one rank of a stage when it holds most, by what they are for; `host` of its host's memory.

    Of activations and logits it is what stands then beside whole gradients, which take their place in a backward.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buffers: float
    host: float = 0.0

    @property
    def states(self) -> float:
        """What is there between two steps, on the device."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        """On the device."""
        return self.states + self.activations + self.logits + self.buffers


def stage_memory(workload: Workload, strategy: Strategy, stage: Stage, index: int) -> StageMemory:
    """Return what a rank of stage `index` holds."""
    held = local_parameters(workload, strategy, stage)
    own = owned_parameters(strategy, held, local_experts(strategy, stage))
    parameters, gradients, optimizer, host = _states(workload, strategy, held, own)
    activations = stage_activations(workload, strategy, stage, index)
    logits = _logits(workload, strategy) if stage.is_last else 0.0
    made = activations + logits
    passing = passing_bytes(
        workload,
        strategy,
        stage,
        StageLoad(
            parameters=held,
            own=own,
            gradients=gradients,
            made=made,
            layer=_at_once(strategy, stage) * layer_activations(workload, strategy, stage.layers[0][0])
            if stage.layers
            else 0.0,
            below=_below(workload, strategy, stage),
            in_flight=in_flight(strategy, index),
        ),
    )
    share = min(1.0, passing / made) if made else 0.0  # what gradients take the place of as they are made
    state = _state_bytes(workload, strategy)
    gaps = 0.0 if workload.on_cpu else ALLOCATOR_SHARE * made
    buffers = max(0.0, passing - made) + gaps + shared_bytes(workload, strategy, held, state)
    if strategy.pp_size > 1:
        buffers += 2 * min(strategy.pp_size, strategy.accumulation, 2) * state  # what is sent and received
    return StageMemory(
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations * share,
        logits=logits * share,
        buffers=buffers,
        host=host,
    )


def local_parameters(workload: Workload, strategy: Strategy, stage: Stage) -> float:
    """Return the parameters of a rank of a stage before ZeRO shares them out.

    The head is split over tensor-parallel ranks, and so is a table, where it is tied or `split_table` says so.
    """
    shape, tp = workload.shape, strategy.tp_size
    total = sum(count * layer_parameters(strategy, layer) for layer, count in stage.layers)
    if stage.is_first:
        total += _table(workload, strategy)
    if stage.is_last:
        total += shape.outer_vectors
        total += 0 if shape.tied and stage.is_first else shape.vocab * shape.hidden / tp
    return total


def _below(workload: Workload, strategy: Strategy, stage: Stage) -> float:
    """Return a rank's parameters of a stage's first layer, and of the embedding before it."""
    first = layer_parameters(strategy, stage.layers[0][0]) if stage.layers else 0.0
    return first + (_table(workload, strategy) if stage.is_first else 0.0)


def _table(workload: Workload, strategy: Strategy) -> float:
    shape = workload.shape
    split = strategy.tp_size if shape.tied or strategy.split_table else 1
    return shape.vocab * shape.hidden / split + shape.position_rows * shape.hidden


def local_experts(strategy: Strategy, stage: Stage) -> float:
    """Return a rank's parameters of routed experts before ZeRO shares them out."""
    return sum(count * layer_experts(strategy, layer) for layer, count in stage.layers)


def owned_parameters(strategy: Strategy, held: float, experts: float) -> float:
    """Return how many of the `held` parameters a rank owns where ZeRO shares them out.

    Each parameter goes to the ranks that hold copies of it: of an expert there are fewer than of the rest.
    """
    return (held - experts) / data_ranks(strategy) + experts / expert_ranks(strategy)


def _states(workload: Workload, strategy: Strategy, held: float, own: float) -> tuple[float, float, float, float]:
    """Return bytes of parameters, gradients and optimizer states on the device, and of what lies in the host's memory.

    fp32 without ZeRO: AdamW's two moments beside parameters and gradients. ZeRO holds a master copy in fp32 besides,
    whatever the precision. bf16 at stage 1 keeps its gradients in bf16 and sums them in fp32, both whole; fp16 only in
    fp16; from stage 2 on a rank keeps the sums of its part alone.
    """
    width, stage = workload.element_bytes, strategy.zero_stage
    parameters = (own if stage == 3 else held) * width
    if stage == 0:
        gradients, optimizer = held * width, held * 8
        if width == 2:
            optimizer += held * 4
    elif stage == 1:
        summed = workload.gradient_bytes if workload.precision != "fp16" else 0
        each = 0 if workload.habits.sums_in_place else width
        gradients, optimizer = held * (each + (summed if width == 2 else 0)), own * 12
    else:
        gradients, optimizer = own * max(workload.gradient_bytes, width), own * 12
    host = 0.0
    if strategy.offload != "none":
        host, optimizer = optimizer + gradients, 0.0
        gradients = gradients if stage < 2 else 0.0
    if strategy.offload == "optimizer+parameters":
        host, parameters = host + parameters, 0.0
    return parameters, gradients, optimizer, host


def _state_bytes(workload: Workload, strategy: Strategy) -> float:
    """Return the bytes of a micro-batch's hidden state between two layers."""
    tokens = strategy.micro_batch * workload.sequence
    return tokens * workload.shape.hidden * workload.element_bytes


def in_flight(strategy: Strategy, index: int) -> float:
    """Return how many micro-batches' activations a stage holds at most.

    1F1B: one for each stage from here on. Interleaved, in passes of a part: a group of micro-batches in each part but
    one, and two for each stage behind (Narayanan et al. 2021, section 2.2, as harness/parallel/pipeline/schedules runs
    it). GPipe: all of them. ZB-V: as many as there are stages, on each of them (Qi
    et al. 2024, section 6).
    """
    stages, times, chunks = strategy.pp_size, strategy.accumulation, strategy.chunks
    if strategy.schedule == GPIPE:
        return times
    if strategy.is_folded:
        return min(stages, times)
    if chunks > 1:
        group = ceil(times / max(1, times // stages))
        ahead = 2 * (stages - 1 - index) + (chunks - 1) * group + 1
        return min(ahead / chunks, times)
    return min(stages - index, times)


def stage_activations(workload: Workload, strategy: Strategy, stage: Stage, index: int) -> float:
    """Return the bytes that a stage keeps for the backward at most.

    Of each run of layers that is recomputed its input is kept, for every micro-batch in flight, and all of one run
    while it is computed again. Under zero-bubble a stage also keeps what its weight gradients need that are put off:
    `index` micro-batches'.
    """
    flight = in_flight(strategy, index)
    parallel = strategy.tp_size if strategy.sequence_parallel else 1
    each = {layer: layer_activations(workload, strategy, layer) for layer, _ in stage.layers}
    put_off = min(index, strategy.accumulation) if strategy.schedule == "zero-bubble" else 0
    whole = sum(count * each[layer] for layer, count in stage.layers)
    if strategy.recompute == "full":
        kept = ceil(stage.depth / strategy.recompute_every) * _state_bytes(workload, strategy) / parallel
        return flight * kept + put_off * whole + _at_once(strategy, stage) * max(each.values(), default=0.0)
    return (min(flight + put_off, strategy.accumulation) if put_off else flight) * whole


def _at_once(strategy: Strategy, stage: Stage) -> int:
    """Return how many layers of a stage have all their activations while they are computed again."""
    return min(strategy.recompute_every, stage.depth) if strategy.recompute == "full" else 1


@lru_cache(maxsize=65536)
def layer_activations(workload: Workload, strategy: Strategy, layer: LayerShape) -> float:
    """Return the bytes that autograd keeps of one layer for one micro-batch."""
    tp, width = strategy.tp_size, workload.element_bytes
    tokens = strategy.micro_batch * workload.sequence
    shared = tp if strategy.sequence_parallel else 1
    whole_input = (
        width if shared > 1 and not workload.habits.gathers_again else 0
    )  # gathered, it is kept by the next product
    outside = layer.hidden * layer.norms * ((_norm_bytes(workload, layer) - whole_input) / shared + whole_input)
    repeated = layer.heads // max(layer.kv_heads, 1)
    keys = (layer.key + layer.value) * (1 if workload.habits.fused_elementwise or repeated == 1 else repeated)
    attention = (layer.query + keys + 2 * layer.output) * width / tp
    active = (layer.into_ffn + 2 if layer.gated else 2) * width  # into the activation, out of it, and their product
    inside = layer.dense_ffn * active / tp
    if layer.experts:
        whole = tp if strategy.ep_size > 1 else 1  # whole experts: their tokens are shared out instead
        inside += layer.top_k * (layer.expert_ffn * active / tp + 2 * layer.hidden * width / whole)
        inside += layer.experts * 8
    return tokens * (outside + attention + inside)


def _norm_bytes(workload: Workload, layer: LayerShape) -> float:
    """Return what a norm keeps of each element: its input and its output, which the next product reads.

    Written out in single operations, as models of transformers do: the input in fp32 and the normalised value too. In
    float32 the harness has norms of its own (harness/hf/fused.py), measured on a CPU alone and so not counted on a GPU.
    """
    width = workload.element_bytes
    fused = workload.habits.fused_elementwise or (workload.fewer_passes and not layer.plain_norms)
    return 2 * width if fused else 4 + 2 * width


def _logits(workload: Workload, strategy: Strategy) -> float:
    """Return the bytes of logits and loss.

    In place: the logits, over which their gradient is written, and what is exponentiated at a time, with its fp32 copy
    where they are narrower. Else the logits, their logarithms of probabilities in fp32, and the gradients of both.
    """
    tokens = strategy.micro_batch * workload.sequence
    elements = tokens * ceil(workload.shape.vocab / strategy.tp_size)
    width = workload.element_bytes
    if workload.habits.loss_in_place:
        chunk = LOSS_CHUNK_ON_CPU if workload.on_cpu else LOSS_CHUNK
        return elements * width + min(elements, chunk) * (4 if width == 4 else 8)
    return elements * (2 * width + 8 if width == 2 else 4 * width)
