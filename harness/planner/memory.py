"""Predict the bytes that a rank of a stage holds at the peak of a step.

Parameters, gradients and optimizer states are counted as DeepSpeed's optimizers allocate them (bf16_optimizer.py, zero/
stage_1_and_2.py, zero/stage3.py) and ranks share them (Rajbhandari et al. 2020). Activations are counted as autograd
keeps them for the backward (Korthikanti et al. 2022, section 4), for as many micro-batches as are in flight: stages -
stage under 1F1B (Narayanan et al. 2021, section 2.2.1).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from harness.planner.lora import Target, linear_layers
from harness.planner.shape import LayerShape
from harness.planner.traffic import expert_ranks
from harness.planner.workload import Stage, Strategy, Workload, layer_experts, layer_parameters, trained_in_layer
from harness.schedules import SCHEDULES, ModelChunks

ALLOCATOR_SHARE = 0.04  # of activations: the GPU allocator rounds blocks up and leaves gaps between them
# logits that the cross entropy exponentiates at a time (harness/parallel/tensor/cross_entropy.py)
LOSS_CHUNK = 2**23
LOSS_CHUNK_ON_CPU = 2**18
# of one NCCL communicator: 24 channels (assumed), each with the buffers of three protocols (NCCL, src/init.cc,
# computeBuffSizes)
COMMUNICATOR = 24 * (4_194_304 + 524_288 + 4_915_200)
FLAT_BUCKET = 5e8  # gradients in a bucket, DeepSpeed's MEMORY_OPT_ALLREDUCE_SIZE
GATHERED = 5e8  # parameters kept after a forward: the backward reuses them within stage3_max_reuse_distance
SUB_GROUP = 1e9  # elements that ZeRO-3 steps on at once, DeepSpeed's sub_group_size
SHARED_PIECE = 2**22  # bytes; each rank of a host maps twice that (harness/extras/host_memory.py)


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Bytes of one rank of a stage at its peak, by purpose; `host` is in the host's memory.

    Activations and logits are those that exist at the peak, when gradients may have replaced some of them.
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
        """Bytes on the device between two steps."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        """Bytes on the device."""
        return self.states + self.activations + self.logits + self.buffers


def stage_memory(workload: Workload, strategy: Strategy, stage: Stage, index: int) -> StageMemory:
    """Return the memory of a rank of stage `index`."""
    held = trained_parameters(workload, strategy, stage)
    own = owned_parameters(strategy, held, trained_experts(workload, strategy, stage))
    parameters, gradients, optimizer, host = _states(
        workload, strategy, held, own, _kept_states(workload, strategy, stage)
    )
    frozen = frozen_bytes(workload, strategy, stage)
    host, parameters = (host + frozen, 0.0) if strategy.offloads_parameters else (host, parameters + frozen)
    parameters += code_bytes(workload, strategy, stage)
    host += host_activations(workload, strategy, stage, index)
    activations = stage_activations(workload, strategy, stage, index)
    logits = _logits(workload, strategy) if stage.is_last else 0.0
    if workload.lora is not None and strategy.recompute == "full":  # the logits are gone when the last layer recomputes
        logits = max(0.0, logits - _recomputed(workload, strategy, stage))
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
            gathered=local_parameters(workload, strategy, stage),
            in_flight=in_flight(strategy, index),
        ),
    )
    share = min(1.0, passing / made) if made else 0.0  # as the backward frees activations, gradients take their place
    state = _state_bytes(workload, strategy)
    gaps = 0.0 if workload.on_cpu else ALLOCATOR_SHARE * made
    buffers = max(0.0, passing - made) + gaps + shared_bytes(workload, strategy, held, state)
    buffers += exchanged_bytes(workload, strategy, stage) + mask_bytes(workload, strategy, stage)
    buffers += communicator_bytes(workload, strategy)
    if strategy.pp_size > 1:
        buffers += 2 * min(strategy.pp_size, strategy.accumulation, 2) * state  # buffers to send and to receive
    return StageMemory(
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations * share,
        logits=logits * share,
        buffers=buffers,
        host=host,
    )


def exchanged_bytes(workload: Workload, strategy: Strategy, stage: Stage) -> float:
    """Return the bytes of queries that context ranks exchange at a time: those sent, and those received."""
    if strategy.cp_size == 1:
        return 0.0
    widest = max((layer.query for layer, _ in stage.layers), default=0)
    return 2 * strategy.tokens(workload.sequence) * widest * workload.element_bytes / strategy.tp_size


def communicator_bytes(workload: Workload, strategy: Strategy) -> float:
    """Return the bytes of the process groups of their own in which ZeRO-1's new weights travel, on a GPU.

    The usual communicators are counted with the device's context (`Hardware.context_bytes`), but not these.
    """
    if workload.on_cpu or not strategy.flat_sums:
        return 0.0
    groups = (strategy.dp_size > 1) + (strategy.ep_size > 1 and expert_ranks(strategy) > 1)
    return float(groups * COMMUNICATOR)


def mask_bytes(workload: Workload, strategy: Strategy, stage: Stage, *, packed: bool = False) -> float:
    """Return the bytes of the attention mask [tokens, tokens], one byte a pair. torch's attention needs it for a window
    shorter than a sample, and for `packed` documents."""
    length = workload.sequence
    has_window = any(layer.window and layer.window < length for layer, _ in stage.layers)
    if not workload.habits.torch_attention or not (has_window or packed):
        return 0.0
    return float(strategy.micro_batch * strategy.sequences * length * min(length, strategy.attention_tile or length))


def local_parameters(workload: Workload, strategy: Strategy, stage: Stage) -> float:
    """Return the number of parameters on a rank of a stage before ZeRO divides them.

    Tensor-parallel ranks split the head, and the embedding table if it is tied or `split_table` is set.
    """
    shape = workload.shape
    tp = strategy.tp_size
    total = sum(count * layer_parameters(strategy, layer) for layer, count in stage.layers)
    if stage.is_first:
        total += _table(workload, strategy)
    if stage.is_last:
        total += shape.outer_vectors
        total += 0 if shape.tied and stage.is_first else shape.vocab * shape.hidden / tp
    return total


def trained_parameters(workload: Workload, strategy: Strategy, stage: Stage) -> float:
    """Return how many of those parameters are trained: all, or the adapters, which are counted besides."""
    if workload.lora is None:
        return local_parameters(workload, strategy, stage)
    return sum(count * trained_in_layer(workload, strategy, layer) for layer, count in stage.layers)


def trained_experts(workload: Workload, strategy: Strategy, stage: Stage) -> float:
    """Return how many of a rank's trained parameters are in routed experts."""
    return local_experts(strategy, stage) if workload.lora is None else 0.0


def frozen_bytes(workload: Workload, strategy: Strategy, stage: Stage) -> float:
    """Return the bytes of a rank's parameters that are not trained; ZeRO-3 divides them, too."""
    if workload.lora is None:
        return 0.0
    held = local_parameters(workload, strategy, stage)
    narrow = 0.0
    if workload.lora.weight_bytes is not None:  # linear layers
        shapes = [
            (count, inputs * outputs) for layer, count in stage.layers for _, inputs, outputs in linear_layers(layer)
        ]
        narrow = sum(count * elements for count, elements in shapes) / strategy.tp_size
    whole = (held - narrow) * workload.element_bytes + narrow * (workload.lora.weight_bytes or 0.0)
    return owned_parameters(strategy, whole, 0.0) if strategy.zero_stage == 3 else whole


def code_bytes(workload: Workload, strategy: Strategy, stage: Stage) -> float:
    """Return the bytes of the weights' codes in fp8, by rows and by columns, if a rank keeps them for a step."""
    read_again = strategy.accumulation > 1 or strategy.recompute != "none"
    if workload.precision != "fp8" or not workload.habits.rounds_once or not read_again or strategy.zero_stage == 3:
        return 0.0
    rounded = (
        count * (layer.attention_parameters + (layer.into_ffn + 1) * layer.hidden * layer.dense_ffn)
        for layer, count in stage.layers
    )
    return 2.0 * sum(rounded) / strategy.tp_size


def _below(workload: Workload, strategy: Strategy, stage: Stage) -> float:
    """Return the number of a rank's trained parameters in a stage's first layer, and in the embedding before it."""
    first = trained_in_layer(workload, strategy, stage.layers[0][0]) if stage.layers else 0.0
    return first + (_table(workload, strategy) if stage.is_first and workload.lora is None else 0.0)


def _table(workload: Workload, strategy: Strategy) -> float:
    shape = workload.shape
    split = strategy.tp_size if shape.tied or strategy.split_table else 1
    return shape.vocab * shape.hidden / split + shape.position_rows * shape.hidden


def local_experts(strategy: Strategy, stage: Stage) -> float:
    """Return the number of a rank's parameters in routed experts before ZeRO divides them."""
    return sum(count * layer_experts(strategy, layer) for layer, count in stage.layers)


def owned_parameters(strategy: Strategy, held: float, experts: float) -> float:
    """Return how many of the `held` parameters a rank owns when ZeRO divides them.

    ZeRO divides a parameter among the ranks that hold a copy; an expert has fewer copies than the rest.
    """
    return (held - experts) / strategy.dp_size + experts / expert_ranks(strategy)


def _kept_states(workload: Workload, strategy: Strategy, stage: Stage) -> float:
    """Return how many states the optimizer keeps for each parameter of a stage, on average."""
    if workload.states == workload.other_states or workload.lora is not None:
        return workload.states
    inside = sum(count * layer_parameters(strategy, layer) for layer, count in stage.layers)
    held = local_parameters(workload, strategy, stage)
    return (inside * workload.states + (held - inside) * workload.other_states) / held


def _states(
    workload: Workload, strategy: Strategy, held: float, own: float, kept: float
) -> tuple[float, float, float, float]:
    """Return the bytes of parameters, gradients and optimizer states on the device, and the offloaded bytes.

    fp32 has the optimizer's `kept` states (such as two moments) besides parameters and gradients; 16 bits, and
    DeepSpeed's optimizers for ZeRO, also have a master copy. Flat sums hold all gradients of a rank. From stage 2 on a
    rank keeps only the sums of its part, unless ZeRO-2 reduces once a step. Parameters and states are offloaded
    separately.
    """
    width = workload.element_bytes
    stage = strategy.zero_stage
    parameters = (own if stage == 3 else held) * width
    each = kept * workload.state_bytes + workload.master_bytes
    if stage == 0:
        gradients = held * width
        optimizer = held * (each if width == 2 else each - workload.master_bytes)
    elif strategy.flat_sums:
        gradients = held * max(workload.gradient_bytes, width)
        optimizer = own * (each if width == 2 else each - workload.master_bytes)
    elif stage == 1:
        summed = workload.gradient_bytes if workload.precision != "fp16" else 0
        own_gradient = 0 if workload.habits.sums_in_place else width
        # gradients are summed apart from those of a micro-batch only in a wider precision
        gradients = held * (own_gradient + (summed if summed > width else 0))
        optimizer = own * each
    else:
        kept_sums = held + own if strategy.reduces_once else own
        gradients = kept_sums * max(workload.gradient_bytes, width)
        optimizer = own * each
    host = 0.0
    if strategy.offloads_states:
        # ZeRO-3 keeps the copy of the gradients that the optimizer reads
        again = own * workload.master_bytes if stage == 3 else 0.0
        host = optimizer + gradients + again
        optimizer = 0.0
        gradients = gradients if stage < 2 else 0.0
    if strategy.offloads_parameters:
        host += parameters
        parameters = 0.0
    return parameters, gradients, optimizer, host


def _state_bytes(workload: Workload, strategy: Strategy) -> float:
    """Return the bytes of a micro-batch's hidden state between two layers."""
    return float(strategy.tokens(workload.sequence) * workload.shape.hidden * workload.element_bytes)


def in_flight(strategy: Strategy, index: int) -> float:
    """Return the largest number of micro-batches whose activations a stage holds at once."""
    chunks = ModelChunks(strategy.pp_size, strategy.chunks_per_stage, strategy.is_folded)
    return SCHEDULES[strategy.schedule_name].in_flight(chunks, strategy.accumulation, index)


def stage_activations(workload: Workload, strategy: Strategy, stage: Stage, index: int) -> float:
    """Return the most bytes of activations that a stage keeps for the backward.

    With recomputation it keeps the input of each run of layers for every micro-batch in flight, and all activations of
    the run that is being recomputed. A schedule may also keep the operands of deferred weight gradients, for `index`
    micro-batches.
    """
    flight = in_flight(strategy, index)
    parallel = strategy.tp_size if strategy.sequence_parallel else 1
    each = {layer: layer_activations(workload, strategy, layer) for layer, _ in stage.layers}
    put_off = min(index, strategy.accumulation) if SCHEDULES[strategy.schedule].defers_by_stage else 0
    whole = sum(count * each[layer] for layer, count in stage.layers)
    if strategy.recompute == "full":
        kept = kept_states(strategy, stage) * _state_bytes(workload, strategy) / parallel
        return flight * kept + put_off * whole + _recomputed(workload, strategy, stage)
    return (min(flight + put_off, strategy.accumulation) if put_off else flight) * whole


def kept_states(strategy: Strategy, stage: Stage) -> int:
    """Return the number of hidden states of a micro-batch that the device keeps for recomputation.

    If the host's memory holds them, the device has two: one in use, and one that is being copied.
    """
    states = ceil(stage.depth / strategy.recompute_every)
    return min(states, 2) if strategy.host_activations else states


def host_activations(workload: Workload, strategy: Strategy, stage: Stage, index: int) -> float:
    """Return the bytes of hidden states that the host's memory holds for recomputation."""
    if not strategy.host_activations or strategy.recompute != "full":
        return 0.0
    parallel = strategy.tp_size if strategy.sequence_parallel else 1
    states = ceil(stage.depth / strategy.recompute_every) - kept_states(strategy, stage)
    return in_flight(strategy, index) * states * _state_bytes(workload, strategy) / parallel


def _at_once(strategy: Strategy, stage: Stage) -> int:
    """Return the number of layers that the backward recomputes together; 1 without recomputation."""
    return min(strategy.recompute_every, stage.depth) if strategy.recompute == "full" else 1


def _recomputed(workload: Workload, strategy: Strategy, stage: Stage) -> float:
    """Return the most bytes of activations that the backward recomputes at a time.

    Beside a frozen model they are most of what a rank holds, so the gradients that pass through its widest layer count.
    """
    layers = [layer_activations(workload, strategy, layer) for layer, _ in stage.layers]
    widths = [layer.hidden + layer.into_ffn * layer.dense_ffn / strategy.tp_size for layer, _ in stage.layers]
    passing = strategy.tokens(workload.sequence) * max(widths, default=0.0) * workload.element_bytes
    found = _at_once(strategy, stage) * max(layers, default=0.0)
    return found if workload.lora is None else found + passing


@lru_cache(maxsize=65536)
def layer_activations(workload: Workload, strategy: Strategy, layer: LayerShape) -> float:
    """Return the bytes that autograd keeps of one layer for one micro-batch."""
    tp = strategy.tp_size
    width = workload.element_bytes
    operand = _input_bytes(workload)
    tokens = strategy.tokens(workload.sequence)
    shared = tp if strategy.sequence_parallel else 1
    whole_input = (
        width if shared > 1 and not workload.habits.gathers_again else 0
    )  # the next product keeps the gathered input
    inputs = _kept_inputs(workload)
    of_norm = _norm_bytes(workload, layer) - width * (1 - inputs) - whole_input * inputs
    outside = layer.hidden * layer.norms * (of_norm / shared + whole_input * inputs)
    outside -= layer.hidden * (width - operand) * (2 if layer.dense_ffn and not layer.experts else 1)
    repeated = layer.heads // max(layer.kv_heads, 1)
    ranks = strategy.cp_size * tp  # several ranks may have copies of one key
    keys = (layer.key + layer.value) * (1 if workload.habits.fused_elementwise or repeated == 1 else repeated)
    copies = 1 if keys == (layer.key + layer.value) * repeated else max(1.0, ranks / max(layer.kv_heads, 1))
    attention = (layer.query + keys * copies + layer.output) * width / tp
    attention += layer.output * operand * _keeps_input(workload, "output") / tp
    # the input of the activation, what it is multiplied by, their product, and without kernels the activation's output
    active = (layer.into_ffn + (1 if workload.has_kernels else 2) if layer.gated else 2) * width
    inside = layer.dense_ffn * (active - width + operand * _keeps_input(workload, "down")) / tp
    if layer.experts:
        whole = tp if strategy.ep_size > 1 else 1  # whole experts: ranks divide their tokens instead
        inside += layer.top_k * (layer.expert_ffn * active / tp + 2 * layer.hidden * width / whole)
        inside += layer.experts * 8
    if workload.lora is not None:  # between the two matrices of each adapter
        outside += workload.lora.rank * workload.lora.matrices(layer) * width
    if not strategy.block_tile:
        return tokens * (outside + attention + inside)
    kept = layer.hidden * layer.norms * 2 * width / shared  # the input and the output of each norm
    kept = kept if workload.habits.tiles_norms else outside
    tile = strategy.tokens(workload.sequence, strategy.block_tile)
    return tokens * (kept + attention) + tile * (outside + inside)


def _input_bytes(workload: Workload) -> int:
    """Return the bytes that a linear layer keeps of each element of its input: of its codes in fp8, if it is trained.

    The layer rounds its input by columns for the gradient of its weight, and keeps these codes alone
    (harness/extras/fp8/product.py). Experts and adapters keep their inputs.
    """
    narrow = workload.precision == "fp8" and workload.habits.rounds_once and workload.lora is None
    return 1 if narrow else workload.element_bytes


def _keeps_input(workload: Workload, *targets: Target) -> bool:
    """Return whether the input of one of these linear layers is kept, for the gradient of its weight or adapter."""
    return workload.lora is None or workload.lora.adapts(*targets)


def _kept_inputs(workload: Workload) -> float:
    """Return how many of the outputs of a layer's norms are kept: as inputs of attention and of the feed-forward."""
    return (_keeps_input(workload, "query", "key", "value") + _keeps_input(workload, "gate", "up")) / 2


def _norm_bytes(workload: Workload, layer: LayerShape) -> float:
    """Return the bytes that a norm keeps for each element: its input, and its output, which the next product needs.

    If it is written in single operations, as in transformers' models, a norm also keeps the input in fp32 and the
    normalised value. The harness's own norms (harness/extras/fusing) do not: on a GPU, and in float32 on a CPU.
    """
    width = workload.element_bytes
    fused = workload.habits.fused_elementwise or layer.native_norms
    fused = fused or ((workload.fewer_passes or workload.has_kernels) and not layer.plain_norms)
    return 2 * width if fused else 4 + 2 * width


def _logits(workload: Workload, strategy: Strategy) -> float:
    """Return the bytes of logits and loss.

    With a loss in place: the logits, which their gradient overwrites, and one chunk of exponentials, with its fp32 copy
    if logits are narrower. Otherwise: the logits, their log-probabilities in fp32, and the gradients of both.
    """
    tokens = strategy.tokens(workload.sequence, strategy.loss_tile)
    elements = tokens * ceil(workload.shape.vocab / strategy.tp_size)
    width = workload.element_bytes
    if workload.habits.loss_in_place:
        chunk = LOSS_CHUNK_ON_CPU if workload.on_cpu else LOSS_CHUNK
        return elements * width + min(elements, chunk) * (4 if width == 4 else 8)
    return elements * (2 * width + 8 if width == 2 else 4 * width)


# Bytes that are allocated and freed within a step, besides parameters, summed gradients and optimizer states.
#
# The peak is at one of four moments: when a backward begins (all activations exist), when it reaches its last layer
# (all other gradients exist), when gradients are reduced, and when the optimizer reads a flat copy of them. Each is
# counted as DeepSpeed 0.19.8 allocates: runtime/engine.py (`allreduce_bucket`), zero/stage_1_and_2.py
# (`copy_grads_in_partition`, `get_flat_partition`, `step`), zero/stage3.py (`_prepare_fp32_grad_for_sub_group`),
# zero/partitioned_param_coordinator.py (`__params_to_release`).


@dataclass(frozen=True, kw_only=True)
class StageLoad:
    """The sizes from which the peak of a stage is computed.

    Attributes:
        parameters: number of trained parameters before ZeRO divides them; `own`: how many of them this rank owns.
        gradients: bytes of their sums on the device.
        made: bytes of activations and logits.
        layer: bytes of the first layer's activations; `below`: number of parameters in that layer and before it.
        in_flight: largest number of micro-batches in flight.
    """

    parameters: float
    own: float
    gradients: float
    made: float
    layer: float
    below: float
    gathered: float
    in_flight: float


def passing_bytes(workload: Workload, strategy: Strategy, stage: Stage, load: StageLoad) -> float:
    """Return the bytes at the peak besides parameters, sums and optimizer states; activations and logits included."""
    at_last_layer = _at_last_layer(workload, strategy, load)
    at_reduction = _at_reduction(workload, strategy, stage, load)
    at_backward = _at_backward(workload, strategy, stage, load)
    return max(at_backward, at_last_layer, at_reduction, _at_update(workload, strategy, load))


def shared_bytes(workload: Workload, strategy: Strategy, held: float, state: float) -> float:
    """Return the bytes of memory shared with ranks of the same host: pages that a rank has read count as its own."""
    if not workload.on_cpu:
        return 0.0
    of_data = 2 * strategy.dp_size * min(SHARED_PIECE, held * workload.element_bytes) if strategy.dp_size > 1 else 0.0
    return of_data + (2 * strategy.tp_size * min(SHARED_PIECE, state) if strategy.tp_size > 1 else 0.0)


def _at_backward(workload: Workload, strategy: Strategy, stage: Stage, load: StageLoad) -> float:
    """Return the bytes when a backward begins: all activations, and the gradient of the largest matrix.

    No gradients exist before a step's first backward, unless a flat tensor is allocated for them. If a step has more
    micro-batches than are in flight, later backward passes begin with all sums. ZeRO-2 copies its part of each
    micro-batch's gradients into one more flat tensor; on a CPU its pages are allocated as they are filled.
    """
    width = workload.element_bytes
    zero = strategy.zero_stage
    again = strategy.accumulation > load.in_flight
    largest = largest_matrix(workload, strategy, stage) * width
    if workload.habits.sums_in_place:
        return load.made + _buckets(workload, strategy, load)
    if zero == 3:
        whole = load.made + _gathered(workload, strategy, stage, load) + largest
        if workload.on_cpu and strategy.bucket >= load.parameters:  # it is full only at the end of the backward
            return whole
        return whole + _buckets(workload, strategy, load)
    if zero == 2:
        begun = load.made + 2 * largest
        if workload.on_cpu:  # each backward makes new buckets, which take memory as they are filled
            return begun - (0.0 if again or _sums_apart(workload) else load.gradients)
        whole = begun + _buckets(workload, strategy, load)
        return whole + (load.gradients if again and not _sums_apart(workload) else 0.0)
    is_there = again or strategy.flat_sums or (zero == 0 and width == 2)
    return load.made + largest - (0.0 if is_there else load.gradients)


def _at_last_layer(workload: Workload, strategy: Strategy, load: StageLoad) -> float:
    """Return the bytes when a backward reaches the first layer: its activations, and all other gradients.

    In the step's first backward the gradients of that layer, and of the embedding before it, do not exist yet.
    """
    again = strategy.accumulation > load.in_flight or strategy.flat_sums or workload.habits.sums_in_place
    if strategy.zero_stage >= 2:
        return 0.0  # each gradient is reduced to this rank's part at once: the peak is where the backward begins
    return load.layer - (0.0 if again else load.below * workload.element_bytes)


def _at_reduction(workload: Workload, strategy: Strategy, stage: Stage, load: StageLoad) -> float:
    """Return the bytes at the end of the last backward.

    Without ZeRO gradients are copied into flat buckets, but not on a single data rank. Flat sums are reduced where they
    lie, and this rank's part of the means is received apart. DeepSpeed's ZeRO-1 and ZeRO-2 copy this rank's part into
    one flat tensor, and matrices larger than a bucket one by one. ZeRO-3's parameters stay gathered between the
    micro-batches of a step.
    """
    width = workload.element_bytes
    zero = strategy.zero_stage
    if workload.habits.sums_in_place:
        return 0.0
    if zero == 3:
        stay = strategy.accumulation > 1 and strategy.gathers_once and load.gathered <= GATHERED
        return _buckets(workload, strategy, load) + (_gathered(workload, strategy, stage, load) if stay else 0.0)
    if strategy.flat_sums:
        sent = strategy.sent_bytes or workload.gradient_bytes
        copied = load.parameters * sent if sent != workload.gradient_bytes else 0.0
        return 0.0 if strategy.dp_size == 1 else copied + load.own * sent
    if zero == 0:
        return 0.0 if strategy.dp_size == 1 else min(load.parameters, FLAT_BUCKET) * max(width, workload.gradient_bytes)
    moved = largest_matrix(workload, strategy, stage) * width + _buckets(workload, strategy, load)
    if zero == 1:  # on a CPU a bucket takes memory as it is filled, while the gradients in it free the same
        return (0.0 if workload.on_cpu else moved) + load.own * width
    again = strategy.accumulation > load.in_flight and not _sums_apart(workload)
    return moved + (load.gradients if again else 0.0)


def _at_update(workload: Workload, strategy: Strategy, load: StageLoad) -> float:
    """Return the bytes of the flat fp32 copy of a rank's gradients that the optimizer reads.

    ZeRO-1 and ZeRO-2 make it from this rank's part; stage 1 has freed the other ranks' parts by then.
    ZeRO-2 with fp32 sums of 16-bit gradients has it already. ZeRO-3 makes it for one sub-group at a time. In fp16 it
    exists twice for a moment, in fp16 and in fp32.
    """
    width = workload.element_bytes
    zero = strategy.zero_stage
    if workload.habits.sums_in_place or strategy.offloads_states or zero == 0 or strategy.flat_sums:
        return 0.0
    part = load.own
    if zero == 3:
        summed = max(workload.gradient_bytes, width)
        return min(part, SUB_GROUP) * (summed if summed == 4 else summed + 4)
    if zero == 2 and _sums_apart(workload):
        return 0.0
    copied = part * (width if width == 4 else width + 4)
    return copied + (part * width - load.gradients if zero == 1 else 0.0)


def _sums_apart(workload: Workload) -> bool:
    """Return whether gradients are summed in a wider dtype than their own (`_use_compact_grad_partition_buffer`)."""
    return workload.gradient_bytes > workload.element_bytes


def _buckets(workload: Workload, strategy: Strategy, load: StageLoad) -> float:
    """Return the bytes of ZeRO's buckets: one fills while the other is reduced.

    DeepSpeed allocates each at full size, even for few parameters. There is a second one if gradients are reduced while
    layers compute, and in a pipeline (zero/stage_1_and_2.py, `setup_buckets`, `reduce_gradients`). ZeRO-3 has one, and
    copies its content for the reduction. On a CPU buckets take memory only as they are filled. There ZeRO-3 has no
    bucket, but gradients accumulate up to the size of one, and their means need memory too.
    """
    ranks = strategy.dp_size
    if strategy.zero_stage == 0 or strategy.flat_sums:
        return 0.0
    filled = min(strategy.bucket, load.parameters)
    if workload.on_cpu or workload.habits.sums_in_place:
        if strategy.dp_size == 1:
            return 0.0
        return (1 + 1 / ranks if workload.on_cpu and strategy.zero_stage == 3 else 2) * filled * workload.element_bytes
    if strategy.zero_stage == 3:
        return (strategy.bucket + filled) * workload.element_bytes
    is_double = strategy.overlap_data or strategy.pp_size > 1
    return (strategy.bucket + (strategy.bucket if is_double else filled)) * workload.element_bytes


def _gathered(workload: Workload, strategy: Strategy, stage: Stage, load: StageLoad) -> float:
    """Return the bytes of ZeRO-3's gathered parameters at the end of a forward: those that the backward needs soon.

    A single data rank gathers none, but copies those that are offloaded to the host.
    """
    if strategy.dp_size == 1 and not strategy.offloads_parameters:
        return 0.0
    layer = max((_matrix(strategy, layer) for layer, _ in stage.layers), default=0.0)
    return max(min(load.gathered, GATHERED), 2 * layer) * workload.element_bytes


def largest_matrix(workload: Workload, strategy: Strategy, stage: Stage) -> float:
    """Return the number of elements of a rank's largest parameter, whose gradient is allocated at once."""
    shape = workload.shape
    if workload.lora is not None:
        widths = [max(inputs, outputs) for layer, _ in stage.layers for _, inputs, outputs in linear_layers(layer)]
        return float(workload.lora.rank * max(widths, default=0))
    table = shape.vocab * shape.hidden / strategy.tp_size if stage.is_first or stage.is_last else 0.0
    return max([table, *[_matrix(strategy, layer) for layer, _ in stage.layers]])


def _matrix(strategy: Strategy, layer: LayerShape) -> float:
    """Return the number of elements of a layer's largest matrix; fused experts are one tensor."""
    dense = layer.hidden * max(layer.query, layer.output, layer.dense_ffn) / strategy.tp_size
    experts = layer.experts * layer.into_ffn * layer.hidden * layer.expert_ffn / max(strategy.ep_size, strategy.tp_size)
    return max(dense, experts)
