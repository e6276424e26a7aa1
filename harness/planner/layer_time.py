"""Predict the seconds of a decoder layer, of the embedding and of the head, for one micro-batch on one rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from math import ceil

from harness.planner.hardware import Hardware
from harness.planner.lora import linear_layers
from harness.planner.shape import LayerShape, context
from harness.planner.traffic import all_reduce, expert_exchange, group_along, half_ring, tensor_group
from harness.planner.update_traffic import update_traffic
from harness.planner.workload import Strategy, Workload, trained_in_layer

# Seconds of a decoder layer on one device: matrix products, attention, and kernels bound by memory.
#
# A roofline (Williams et al. 2009): a kernel's time is the longer of two: its operations at the rate that its shape
# reaches, and its bytes at the memory's rate. A matrix product is slower if its tiles do not fill the processors of the
# device in whole waves, and if the inner dimension is short (NVIDIA, Matrix Multiplication Background: tile and wave
# quantization).


# Rows and columns of a tile, and its rate next to the largest one's: a small tile reads its inputs more often.
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.92), (128, 64, 0.75), (64, 64, 0.55))
START_UP = 64  # starting and ending a tile costs as much as this inner dimension, which is two of its steps
# Fast kernels need rows that begin at multiples of 16 bytes; other sizes use slow ones (same source, on alignment;
# CUTLASS reaches about a third without vector loads).
ALIGNED, UNALIGNED_RATE = 8, 0.3
IN_CACHE = 32 * 2**20  # of a matrix that is read twice; the last cache of a GPU with fp8 has at least 48 MB
PRODUCT_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "fp4": 0.5}

# Operations that a host issues for a layer's forward, counted on a decoder of transformers. Backward issues twice as
# many: one gradient for each input. Issuing a collective takes as long as a few operations.
OPERATIONS, COLLECTIVE_OPERATIONS = 50, 3
EXCHANGE_OPERATIONS = 30  # to sort a layer's tokens by expert, send them, and put the outputs in their places
# Python's time on a host, in operations: the harness and its engine around a layer (forward and backward); an
# all-reduce within a layer, with its autograd function; a layer's recomputation, without its forward; ZeRO-3's hooks on
# a layer's modules (both); a micro-batch, without its layers (both); and a layer's part in an update.
HOST_LAYER, HOST_COLLECTIVE, HOST_RECOMPUTED, HOST_ZERO_3, HOST_MICRO_BATCH, HOST_UPDATE = 50, 23, 185, 900, 420, 70
# Memory traffic of a forward in elements per output element: as one kernel each (FUSED), or as the single operations of
# a model's Python code (PLAIN). Backward moves twice as much: it reads inputs and gradients.
FUSED = {"norm": 2, "residual": 3, "gate": 3, "activation": 2, "rotation": 2}
PLAIN = {"norm": 10, "residual": 3, "gate": 5, "activation": 4, "rotation": 8}
# The same on a GPU in 16 bits, of models of transformers: bytes of an element, and kernels, each forward and backward,
# as traced by scripts/bench/account.py. "inputs" adds up the gradients of an input that several matrices read.
NARROW = {
    "norm": ((36, 92), (8, 16)),  # computed in fp32
    "residual": ((6, 6), (1, 1)),
    "inputs": ((0, 6), (0, 1)),
    "gate": ((10, 18), (2, 3)),
    "activation": ((8, 16), (2, 2)),
    "rotation": ((20, 26), (10, 14)),
}
# The same of kernels that compute each as one, and of layers as torch.compile fuses them.
AS_ONE = {**NARROW, "norm": ((4, 8), (1, 2)), "gate": ((6, 10), (1, 1)), "rotation": ((4, 8), (1, 1))}
AS_ONE["activation"] = ((4, 6), (1, 1))
COMPILED = {
    **NARROW,
    "norm": ((8, 16), (1, 3)),
    "gate": ((9, 17), (2, 3)),
    "activation": ((6, 10), (2, 2)),
    "rotation": ((6, 9), (4, 4)),
}
BY_KERNELS = {"single": NARROW, "fused": AS_ONE, "compiled": COMPILED}
# A norm in 16 bits, whose Python code computes in fp32, moves per element 6 bytes to widen, 8 to square, 4 to average,
# 8 to scale, 6 to narrow, and 4 to multiply by its weight.
NARROW_NORM_BYTES = 36
# The same for norms and rotations of harness/extras/fusing/fused.py on a CPU.
FEWER = {"norm": 5, "rotation": 5}
# Rate of attention's backward kernel relative to its forward kernel (Dao 2023, section 4.1: 63% and 73% of the peak).
BACKWARD_RATE = 63 / 73


@dataclass(frozen=True)
class Seconds:
    """Seconds of one micro-batch: forward, and backward without recomputation."""

    forward: float
    backward: float

    def plus(self, other: Seconds) -> Seconds:
        """Return the sum of both."""
        return Seconds(self.forward + other.forward, self.backward + other.backward)


@lru_cache(maxsize=65536)
def matmul(
    hardware: Hardware, precision: str, rows: int, inner: int, columns: int, copies: int = 1, kernels: int = 1
) -> float:
    """Return the seconds of `copies` products of [rows, inner] by [inner, columns] in `kernels` kernels."""
    rate = hardware.reached_flops(precision) * inner / (inner + START_UP)
    if hardware.compute_units > 1 and (inner % ALIGNED or columns % ALIGNED):
        rate *= UNALIGNED_RATE
    work = 2.0 * copies * rows * inner * columns
    best = min(
        ceil(copies * ceil(rows / tall) * ceil(columns / wide) / hardware.compute_units)
        * hardware.compute_units * tall * wide / speed
        for tall, wide, speed in TILES
    ) / (copies * rows * columns)  # fmt: skip
    moved = copies * (PRODUCT_BYTES[precision] * inner * (rows + columns) + 2.0 * rows * columns)
    return max(work * best / rate, moved / hardware.memory_bytes_per_second) + kernels * hardware.kernel_seconds


def product(
    hardware: Hardware,
    precision: str,
    rows: int,
    inner: int,
    columns: int,
    copies: int = 1,
    kernels: int = 1,
    *,
    frozen: bool = False,
) -> Seconds:
    """Return the seconds of a linear layer's product, and of the products for the gradients of input and weight.

    A `frozen` weight has no gradient.
    """
    if not rows * inner * columns * copies:
        return Seconds(0.0, 0.0)
    forward = matmul(hardware, precision, rows, inner, columns, copies, kernels)
    of_input = matmul(hardware, precision, rows, columns, inner, copies, kernels)
    of_weight = 0.0 if frozen else matmul(hardware, precision, inner, rows, columns, copies, kernels)
    return Seconds(forward, of_input + of_weight)


# Seconds in which a host issues operations: its Python, and the library's way to a kernel.
#
# A device works meanwhile, so only the longer time counts. If the device is the host's own processor, both times add
# up, and so does DeepSpeed's Python beside the operations. That is given as a number of operations, measured as the
# processor time of steps of a model so narrow that its arithmetic takes no time (transformers' llama, DeepSpeed 0.19.8,
# two ranks).


def with_issue(
    hardware: Hardware, workload: Workload, strategy: Strategy, layer: LayerShape, device: Seconds
) -> Seconds:
    """Return the seconds of a layer from those of the `device`'s work: the host may need longer to issue it."""
    operations = _operations(workload, strategy, layer)
    hooks = HOST_ZERO_3 if strategy.zero_stage == 3 and workload.habits.zero_stage is None else 0
    if not hardware.is_host:
        issued = operations + (2 * COLLECTIVE_OPERATIONS if strategy.tp_size > 1 else 0)
        forward, backward = ((part + hooks / 2) * hardware.dispatch_seconds for part in (issued, 2 * issued))
        return Seconds(max(device.forward, forward), max(device.backward, backward))
    calls = 0 if strategy.tp_size == 1 else 2 * (2 if strategy.sequence_parallel else 1)
    both = calls * HOST_COLLECTIVE + (HOST_LAYER + hooks) / 2
    again = HOST_RECOMPUTED if strategy.recompute == "full" else 0
    once = hardware.dispatch_seconds
    return device.plus(Seconds((operations + both) * once, (2 * operations + both + again) * once))


def _operations(workload: Workload, strategy: Strategy, layer: LayerShape) -> int:
    """Return the operations that a host issues for a layer's forward.

    Routing takes as many operations as a dense layer. If experts are multiplied one by one, each takes two products,
    and below 16 bits two casts of their inputs.
    """
    if not layer.experts:
        return OPERATIONS
    each = 4 if PRODUCT_BYTES[workload.precision] < 2 else 2
    is_sent = strategy.ep_size > strategy.tp_size and not workload.habits.tokens_travel
    sent = EXCHANGE_OPERATIONS if is_sent else 0
    return 2 * OPERATIONS + sent + (0 if workload.habits.grouped_experts else each * held_experts(strategy, layer))


def held_experts(strategy: Strategy, layer: LayerShape) -> int:
    """Return how many routed experts a rank holds."""
    return max(1, layer.experts // strategy.ep_size)


def micro_batch_issue(hardware: Hardware) -> float:
    """Return the seconds of a host's Python for a micro-batch on a stage, besides its layers."""
    return HOST_MICRO_BATCH * hardware.dispatch_seconds if hardware.is_host else 0.0


def update_issue(hardware: Hardware, layers: int) -> float:
    """Return the seconds of a host's Python for an update of `layers` layers."""
    return HOST_UPDATE * layers * hardware.dispatch_seconds if hardware.is_host else 0.0


# Memory traffic of each logit in bytes, besides the product that writes it. The harness's kernels for GPUs read each
# logit once, and read and write it once. Without them its loss computes exponentials in forward and backward, a part
# of the logits at a time: each widens to fp32, subtracts the maximum, exponentiates, sums or scales, and narrows.
# torch's widens all logits, and keeps their softmax. So does Megatron's, in more operations (Megatron-LM,
# `vocab_parallel_cross_entropy`).
LOGIT_BYTES = Seconds(28, 36)
LOGIT_BYTES_OF_TORCH = Seconds(16, 22)
LOGIT_BYTES_OF_MEGATRON = Seconds(34, 14)
# logits of such a part, and its kernels
LOGITS_AT_ONCE = 2**23
LOSS_KERNELS = Seconds(5.0, 9.0)
# On a CPU most of that stays in a core's cache: forward writes once and reads twice, backward reads and writes. An
# exponential takes about as long as moving four bytes.
LOGIT_BYTES_IN_CACHE = Seconds(16.0, 12.0)


@lru_cache(maxsize=65536)
def layer_seconds(hardware: Hardware, workload: Workload, strategy: Strategy, layer: LayerShape) -> Seconds:
    """Return the seconds of a layer's own work, or of issuing it on the host if that takes longer."""
    tokens = strategy.tokens(workload.sequence)
    attention = _attention(hardware, workload, strategy, layer)
    products = _projections(hardware, workload, strategy, layer, tokens)
    elementwise = _elementwise(hardware, workload, strategy, layer, tokens)
    summed = _summed(hardware, workload, strategy, layer)
    device = products.plus(attention).plus(elementwise).plus(summed)
    return with_issue(hardware, workload, strategy, layer, device)


def _share(width: int, ranks: int) -> int:
    """Return a rank's share of a width; the largest one, if shares differ."""
    return -(-width // ranks)


def _projections(hardware: Hardware, workload: Workload, strategy: Strategy, layer: LayerShape, tokens: int) -> Seconds:
    """Return the seconds of all matrix products except those of scores and values in attention."""
    tp = strategy.tp_size
    precision = workload.precision
    linear = partial(product, frozen=workload.lora is not None)
    total = _adapters(hardware, workload, strategy, layer, tokens)
    for inner, columns in layer.attention_matrices:
        is_cut = columns not in (layer.q_rank, layer.kv_rank + layer.rope)
        total = total.plus(linear(hardware, precision, tokens, inner, _share(columns, tp) if is_cut else columns))
    total = total.plus(linear(hardware, precision, tokens, _share(layer.output, tp), layer.hidden))
    if layer.more > 0:
        total = total.plus(linear(hardware, precision, tokens, layer.hidden, _share(layer.more // layer.hidden, tp)))
    for at, (width, rows, copies) in enumerate(_feed_forward(strategy, layer, tokens)):
        if PRODUCT_BYTES[precision] < 2 and workload.habits.rounds_once and (at or not layer.dense_ffn):
            precision = "bf16"  # of experts
        kernels = 1 if workload.habits.grouped_experts else copies
        for _ in range(1 if workload.habits.fused_elementwise else layer.into_ffn):
            columns = width * (layer.into_ffn if workload.habits.fused_elementwise else 1)
            total = total.plus(linear(hardware, precision, rows, layer.hidden, columns, copies, kernels))
        total = total.plus(linear(hardware, precision, rows, width, layer.hidden, copies, kernels))
    if PRODUCT_BYTES[workload.precision] < 2 and workload.habits.rounds_once:
        total = total.plus(rounding_seconds(hardware, workload, strategy, layer, tokens))
    elif PRODUCT_BYTES[workload.precision] < 2:  # inputs, weights and gradients are narrowed before each product
        moved = _cast_bytes(workload) * tokens * (2 * layer.hidden + layer.output / tp + layer.dense_ffn / tp)
        routed = layer.hidden + layer.expert_ffn
        moved += _cast_bytes(workload) * tokens * layer.top_k * routed
        cast = moved / hardware.memory_bytes_per_second
        total = total.plus(Seconds(cast, 2 * cast))
    return total


def rounding_seconds(
    hardware: Hardware, workload: Workload, strategy: Strategy, layer: LayerShape, tokens: int
) -> Seconds:
    """Return the seconds of rounding operands to fp8 by the harness's kernels, as scripts/bench/account.py counts them.

    One kernel rounds an input for its two products, or the gradients of all outputs of layers that read one input.
    Weights are rounded once a step, by rows for the forward pass and by columns for the backward pass.
    """
    tp = strategy.tp_size
    width = _share(layer.dense_ffn, strategy.tp_size)
    sizes = [(inner, _share(columns, tp)) for inner, columns in layer.attention_matrices]
    sizes += [(_share(layer.output, tp), layer.hidden), (layer.hidden, layer.into_ffn * width), (width, layer.hidden)]
    sizes += [(layer.hidden, _share(max(layer.more, 0) // layer.hidden, tp))]
    sizes = [(inner, columns) for inner, columns in sizes if inner and columns] or [(0, 0)]
    weights = sum(inner * columns for inner, columns in sizes) / strategy.accumulation
    weights *= workload.element_bytes + PRODUCT_BYTES[workload.precision]
    start = (1 + 1 / strategy.accumulation) * len(sizes) * hardware.kernel_seconds
    forward, backward = (
        (weights + sum(_rounded_bytes(workload, tokens * each) for each in widths)) / hardware.memory_bytes_per_second
        for widths in zip(*sizes, strict=True)
    )
    return Seconds(forward + start, backward + start)


def _rounded_bytes(workload: Workload, elements: float) -> float:
    """Return the bytes of rounding a matrix by rows and by columns: it is read twice, but once if a cache holds it."""
    size = elements * workload.element_bytes
    return elements * _cast_bytes(workload) + (size if size > IN_CACHE else 0.0)


def _adapters(hardware: Hardware, workload: Workload, strategy: Strategy, layer: LayerShape, tokens: int) -> Seconds:
    """Return the seconds of a layer's adapters, and of reading its weights in 4 bits, forward and backward."""
    total = Seconds(0.0, 0.0)
    lora = workload.lora
    if lora is None:
        return total
    precision = "bf16" if PRODUCT_BYTES[workload.precision] < 2 else workload.precision
    elements = 0
    for name, inputs, outputs in linear_layers(layer):
        elements += inputs * outputs
        if name in lora.targets:
            cut = _share(inputs if name in ("output", "down") else outputs, strategy.tp_size)
            inner, columns = (cut, outputs) if name in ("output", "down") else (inputs, cut)
            total = total.plus(product(hardware, precision, tokens, inner, lora.rank))
            total = total.plus(product(hardware, precision, tokens, lora.rank, columns))
    if lora.weight_bytes is not None:
        moved = elements / strategy.tp_size * (lora.weight_bytes + workload.element_bytes)
        read = moved / hardware.memory_bytes_per_second
        total = total.plus(Seconds(read, read))
    return total


def _cast_bytes(workload: Workload) -> float:
    """Return the bytes that narrowing to fp8 or fp4 moves for each element: one read, and two writes.

    It writes the tensor and its transpose, for the output and for the weight gradient. fp4 first reads the whole tensor
    once more for its scale (NVIDIA 2025, Pretraining Large Language Models with NVFP4, section 2).
    """
    reads = 2 if workload.precision == "fp4" else 1
    return reads * workload.element_bytes + 2 * PRODUCT_BYTES[workload.precision]


def _summed(hardware: Hardware, workload: Workload, strategy: Strategy, layer: LayerShape) -> Seconds:
    """Return the seconds of adding a micro-batch's weight gradients to their sum."""
    traffic = update_traffic(workload, strategy)
    moved = trained_in_layer(workload, strategy, layer) * traffic.mean_sum(strategy.accumulation)
    start = traffic.kernels_each * tensors_of(layer) * hardware.kernel_seconds
    return Seconds(0.0, moved / hardware.memory_bytes_per_second + start)


def tensors_of(layer: LayerShape) -> int:
    """Return the number of a layer's parameters, as models of transformers have them: all experts in one each."""
    attention = 1 + (3 if not layer.kv_rank else len(layer.attention_matrices))
    networks = (layer.dense_ffn > 0) + (layer.experts > 0)
    return attention + networks * (layer.into_ffn + 1) + layer.norms


def _feed_forward(strategy: Strategy, layer: LayerShape, tokens: int) -> list[tuple[int, int, int]]:
    """Return width, rows and number of the feed-forward networks on one rank."""
    parts = [(_share(layer.dense_ffn, strategy.tp_size), tokens, 1)] if layer.dense_ffn else []
    if layer.experts:
        held = held_experts(strategy, layer)
        ranks = 1 if strategy.ep_size > 1 else strategy.tp_size
        routed = tokens * layer.top_k
        if strategy.ep_size > 1:  # tensor-parallel ranks have the same tokens; an expert gets each token once
            routed = -(-routed // strategy.tp_size)
        parts.append((_share(layer.expert_ffn, ranks), max(1, routed // held), held))
    return parts


def _attention(hardware: Hardware, workload: Workload, strategy: Strategy, layer: LayerShape) -> Seconds:
    """Return the seconds of scores, softmax and weighted sum in a fused kernel.

    Forward takes 2 x context x (query + output) FLOPs a token. Backward takes 2.5 times that, because it recomputes the
    scores (Dao 2023).
    """
    length = workload.sequence
    tp = strategy.tp_size
    precision = "bf16" if PRODUCT_BYTES[workload.precision] < 2 else workload.precision
    tokens = strategy.tokens(length)  # all heads of these tokens, or a share of the heads of all tokens
    work = 2.0 * tokens * context(layer, length) * (layer.query + layer.output) / tp
    share = hardware.torch_attention_efficiency if workload.habits.torch_attention else hardware.attention_efficiency
    if workload.habits.cudnn_attention and layer.heads:
        share = hardware.own_attention_efficiency(layer.query / layer.heads)
    seconds = work / (hardware.flops[precision] * share)
    forward = seconds + hardware.kernel_seconds
    return Seconds(forward, 2.5 * forward / BACKWARD_RATE)


def _elementwise(hardware: Hardware, workload: Workload, strategy: Strategy, layer: LayerShape, tokens: int) -> Seconds:
    """Return the seconds of norms, residuals, rotations and activations."""
    if _has_narrow_norms(workload):
        return _narrow_elementwise(hardware, workload, strategy, layer, tokens)
    passes = FUSED if workload.habits.fused_elementwise or workload.has_kernels else PLAIN
    tp = strategy.tp_size
    fewer = FEWER if workload.fewer_passes and passes is PLAIN else passes
    norm: float = (passes if layer.plain_norms else fewer)["norm"]
    if layer.native_norms:
        norm = FUSED["norm"]
    elif passes is PLAIN and workload.element_bytes < 4:
        norm = NARROW_NORM_BYTES / workload.element_bytes
    outside = layer.hidden * (layer.norms * norm + 2 * passes["residual"])
    inside = (layer.query + layer.key) * fewer["rotation"]
    active = _active_width(strategy, layer) * passes["gate" if layer.gated else "activation"]
    routed = 4.0 * layer.top_k * layer.hidden  # tokens are sorted by expert, and sorted back
    moved = outside / (tp if strategy.sequence_parallel else 1) + inside / tp + active + routed
    forward = tokens * moved * workload.element_bytes / hardware.memory_bytes_per_second
    kernels = (8 if workload.habits.fused_elementwise else 30) * hardware.kernel_seconds
    return Seconds(forward + kernels, 2 * forward + kernels)


def _narrow_elementwise(
    hardware: Hardware, workload: Workload, strategy: Strategy, layer: LayerShape, tokens: int
) -> Seconds:
    """Return the same on a GPU in 16 bits, for layers of a model of transformers."""
    passes = BY_KERNELS[workload.kernels]
    tp = strategy.tp_size
    shared = strategy.tp_size if strategy.sequence_parallel else 1
    norm = AS_ONE["norm"] if layer.native_norms else passes["norm"]
    into = 3 if not layer.kv_rank else len(layer.attention_matrices)  # query, key and value read one input
    repeated = (layer.into_ffn - 1 if layer.dense_ffn else 0) + into - 1
    if PRODUCT_BYTES[workload.precision] < 2 and workload.habits.rounds_once and strategy.zero_stage < 2:
        repeated = 0  # one product has the sum
    counted = (
        (layer.hidden / shared, layer.norms, norm),
        (layer.hidden / shared, 2, passes["residual"]),
        (layer.hidden / shared, repeated, passes["inputs"]),
        ((layer.query + layer.key) / tp, 1, passes["rotation"]),
        (_active_width(strategy, layer), 1, passes["gate" if layer.gated else "activation"]),
        (layer.top_k * layer.hidden / shared, 1, ((8, 16), (4, 4))),  # tokens are sorted by expert, and sorted back
    )
    total = Seconds(0.0, 0.0)
    for width, times, each in counted:
        if width:
            total = total.plus(_passes(hardware, tokens * width, times, each))
    return total


def _has_narrow_norms(workload: Workload) -> bool:
    """Return whether norms and the like are counted by `NARROW`."""
    return workload.element_bytes < 4 and not workload.habits.fused_elementwise and not workload.on_cpu


def _passes(
    hardware: Hardware, elements: float, times: int, passes: tuple[tuple[int, int], tuple[int, int]]
) -> Seconds:
    """Return the seconds of `times` computations on so many elements, each with these bytes and kernels."""
    forward, backward = (
        times * (elements * moved / hardware.memory_bytes_per_second + kernels * hardware.kernel_seconds)
        for moved, kernels in zip(*passes, strict=True)
    )
    return Seconds(forward, backward)


def _active_width(strategy: Strategy, layer: LayerShape) -> float:
    """Return the width of a rank's activations between the matrices of its feed-forward networks."""
    tp = strategy.tp_size
    return layer.dense_ffn / tp + layer.top_k * layer.expert_ffn / (tp if strategy.ep_size <= 1 else 1)


@lru_cache(maxsize=65536)
def head_seconds(hardware: Hardware, workload: Workload, strategy: Strategy) -> Seconds:
    """Return the seconds of logits and loss."""
    tokens = strategy.tokens(workload.sequence)
    columns = _share(workload.shape.vocab, strategy.tp_size)
    precision = "bf16" if PRODUCT_BYTES[workload.precision] < 2 else workload.precision
    logits = tokens * columns / hardware.memory_bytes_per_second
    added = 0.0 if workload.lora is not None else update_traffic(workload, strategy).mean_sum(strategy.accumulation)
    summed = columns * workload.shape.hidden * added / hardware.memory_bytes_per_second
    of_others = LOGIT_BYTES_OF_MEGATRON if workload.habits.fused_elementwise else LOGIT_BYTES_OF_TORCH
    on_gpu = LOGIT_BYTES if workload.habits.loss_in_place else of_others
    if workload.habits.loss_in_one_pass:
        on_gpu = Seconds(1.0 * workload.element_bytes, 2.0 * workload.element_bytes)
    each = LOGIT_BYTES_IN_CACHE if workload.on_cpu else on_gpu
    moved = Seconds(each.forward * logits, each.backward * logits + summed)
    in_parts = workload.habits.loss_in_place and not workload.habits.loss_in_one_pass and not workload.on_cpu
    parts = ceil(tokens * columns / LOGITS_AT_ONCE) if in_parts else 0
    start = parts * hardware.kernel_seconds
    moved = moved.plus(Seconds(LOSS_KERNELS.forward * start, LOSS_KERNELS.backward * start))
    if _has_narrow_norms(workload):
        moved = moved.plus(_passes(hardware, tokens * workload.shape.hidden, 1, BY_KERNELS[workload.kernels]["norm"]))
    is_frozen = workload.lora is not None
    return product(hardware, precision, tokens, workload.shape.hidden, columns, frozen=is_frozen).plus(moved)


@lru_cache(maxsize=65536)
def embedding_seconds(hardware: Hardware, workload: Workload, strategy: Strategy) -> Seconds:
    """Return the seconds of the look-up, and of accumulating the dense gradient of the table."""
    tokens = strategy.tokens(workload.sequence)
    moved = 3.0 * tokens * workload.shape.hidden * workload.element_bytes
    elements = workload.shape.vocab * workload.shape.hidden / strategy.tp_size
    is_frozen = workload.shape.tied or workload.lora is not None
    added = 0.0 if is_frozen else update_traffic(workload, strategy).mean_sum(strategy.accumulation)
    table = elements * (workload.element_bytes + added)
    rate = hardware.memory_bytes_per_second
    return Seconds(moved / rate, (2 * moved + table) / rate)


@lru_cache(maxsize=65536)
def layer_traffic(hardware: Hardware, workload: Workload, strategy: Strategy, layer: LayerShape) -> Seconds:
    """Return the seconds of a layer's tensor-parallel traffic.

    Tensor parallelism all-reduces the hidden state after attention and after the feed-forward part, forward and
    backward (Shoeybi et al. 2019, section 3). Sequence parallelism has an all-gather and a reduce-scatter instead of
    each, and one more all-gather backward if inputs are gathered again (Korthikanti et al. 2022, section 4.2.2). With
    `narrow_gathers` inputs are gathered in the precision of the products (Transformer Engine's Linear).
    """
    tokens = strategy.tokens(workload.sequence)
    state = float(tokens * layer.hidden * workload.element_bytes)
    group = tensor_group(hardware, strategy)
    narrow = (
        min(1.0, PRODUCT_BYTES[workload.precision] / workload.element_bytes) if workload.habits.narrow_gathers else 1.0
    )
    gather = half_ring(group, narrow * state)
    forward = 2 * (all_reduce(group, state) - half_ring(group, state) + gather)
    again = strategy.sequence_parallel and workload.habits.gathers_again
    backward = forward + (2 * gather if again else 0.0)
    return Seconds(forward, backward)


def again_in_tiles(hardware: Hardware, workload: Workload, strategy: Strategy, layer: LayerShape) -> float:
    """Return the seconds in which a backward recomputes a layer's feed-forward blocks tile by tile."""
    if not strategy.block_tile:
        return 0.0
    tokens = strategy.tokens(workload.sequence)
    total = 0.0
    for width, rows, copies in _feed_forward(strategy, layer, tokens):
        columns = width * layer.into_ffn
        total += matmul(hardware, workload.precision, rows, layer.hidden, columns, copies)
        total += matmul(hardware, workload.precision, rows, width, layer.hidden, copies)
    return total


@lru_cache(maxsize=65536)
def context_traffic(hardware: Hardware, workload: Workload, strategy: Strategy, layer: LayerShape) -> float:
    """Return the seconds in which context ranks exchange queries, keys, values and outputs in a forward; a backward
    takes the same.

    Each rank keeps its own share and sends the rest (Jacobs et al. 2023, arXiv 2309.14509, section 3.2). If there are
    fewer key heads than ranks, each goes to several ranks.
    """
    if strategy.cp_size == 1:
        return 0.0
    group = group_along(hardware, strategy.cp_size, strategy.tp_size)
    copies = max(1.0, strategy.cp_size * strategy.tp_size / max(layer.kv_heads, 1))
    width = layer.query + layer.output + (layer.key + layer.value) * copies
    size = strategy.tokens(workload.sequence) * width * workload.element_bytes / strategy.tp_size
    moved = size * (group.size - 1) / group.size / group.bytes_per_second
    return moved + 4 * (group.start_seconds + group.ring_seconds / group.size)


def expert_traffic(hardware: Hardware, workload: Workload, strategy: Strategy, layer: LayerShape) -> float:
    """Return the seconds in which a layer's tokens travel to their experts and back in a forward; a backward takes
    the same.

    The harness sends them between neighbours on the data axis: each tensor-parallel rank sends the tokens of its own
    experts.
    """
    if not layer.experts or strategy.ep_size == 1:
        return 0.0
    tokens = strategy.tokens(workload.sequence)
    state = float(tokens * layer.hidden * workload.element_bytes)
    if workload.habits.tokens_travel:
        stride = 1 if strategy.ep_size <= strategy.tp_size else strategy.tp_size
        share = state / strategy.tp_size
        return 2 * expert_exchange(hardware, strategy.ep_size, stride, share, layer.top_k)
    copies = layer.top_k / strategy.tp_size
    neighbours = max(strategy.ep_size // strategy.tp_size, 1)
    return 2 * expert_exchange(hardware, neighbours, strategy.tp_size, state, copies, once_a_node=False)
