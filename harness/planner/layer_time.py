"""Seconds of a decoder layer, of the embedding and of the head, for one micro-batch on one rank."""

from __future__ import annotations

from functools import lru_cache

from harness.planner.compute import PRODUCT_BYTES, Seconds, product
from harness.planner.hardware import Hardware
from harness.planner.host_time import held_experts, with_issue
from harness.planner.shape import LayerShape, context
from harness.planner.traffic import all_reduce, expert_exchange, half_ring, tensor_group
from harness.planner.workload import Strategy, Workload, layer_parameters

# Elements that one element of a value is moved to and from memory for, forward; one kernel each, or written out in
# single operations as a model's Python code does. Backward moves twice as much: it reads inputs and gradients.
FUSED = {"norm": 2, "residual": 3, "gate": 3, "activation": 2, "rotation": 2}
PLAIN = {"norm": 10, "residual": 3, "gate": 5, "activation": 4, "rotation": 8}
# Of norms and rotations as harness/hf/fused.py has them; measured on a CPU alone, so not counted on a GPU.
FEWER = {"norm": 5, "rotation": 5}
# Rate of the backward kernel of attention beside the forward one (Dao 2023, section 4.1: 63% of the peak beside 73%).
BACKWARD_RATE = 63 / 73
# Bytes that each logit is moved for. Forward: written, widened to fp32, its maximum found and taken off, exponentials,
# their sum. Backward: scaled, and narrowed again.
LOGIT_BYTES = Seconds(32.0, 18.0)
# On a CPU they are worked on where they lie in a core's cache: written, read twice; read and written. An exponential
# takes about as long as moving four bytes.
LOGIT_BYTES_IN_CACHE = Seconds(16.0, 12.0)


@lru_cache(maxsize=65536)
def layer_seconds(hardware: Hardware, workload: Workload, strategy: Strategy, layer: LayerShape) -> Seconds:
    """Return the seconds of a layer's own work; the host's where it is slower to issue it."""
    tokens = strategy.micro_batch * workload.sequence
    attention = _attention(hardware, workload, strategy, layer)
    products = _projections(hardware, workload, strategy, layer, tokens)
    elementwise = _elementwise(hardware, workload, strategy, layer, tokens)
    summed = _summed(hardware, workload, strategy, layer)
    device = products.plus(attention).plus(elementwise).plus(summed)
    return with_issue(hardware, workload, strategy, layer, device)


def _share(width: int, ranks: int) -> int:
    """Return a rank's share of a width, the largest where the shares differ."""
    return -(-width // ranks)


def _projections(hardware: Hardware, workload: Workload, strategy: Strategy, layer: LayerShape, tokens: int) -> Seconds:
    """Return the seconds of all matrix products outside of the core of attention."""
    tp, precision = strategy.tp_size, workload.precision
    total = Seconds(0.0, 0.0)
    for inner, columns in layer.attention_matrices:
        is_cut = columns not in (layer.q_rank, layer.kv_rank + layer.rope)
        total = total.plus(product(hardware, precision, tokens, inner, _share(columns, tp) if is_cut else columns))
    total = total.plus(product(hardware, precision, tokens, _share(layer.output, tp), layer.hidden))
    if layer.more > 0:
        total = total.plus(product(hardware, precision, tokens, layer.hidden, _share(layer.more // layer.hidden, tp)))
    for width, rows, copies in _feed_forward(strategy, layer, tokens):
        kernels = 1 if workload.habits.grouped_experts else copies
        for _ in range(1 if workload.habits.fused_elementwise else layer.into_ffn):
            columns = width * (layer.into_ffn if workload.habits.fused_elementwise else 1)
            total = total.plus(product(hardware, precision, rows, layer.hidden, columns, copies, kernels))
        total = total.plus(product(hardware, precision, rows, width, layer.hidden, copies, kernels))
    if PRODUCT_BYTES[precision] < 2:  # inputs, weights and gradients are narrowed before each product
        moved = _cast_bytes(workload) * tokens * (2 * layer.hidden + layer.output / tp + layer.dense_ffn / tp)
        routed = layer.hidden + layer.expert_ffn
        moved += _cast_bytes(workload) * tokens * layer.top_k * routed
        cast = moved / hardware.memory_bytes_per_second
        total = total.plus(Seconds(cast, 2 * cast))
    return total


def _cast_bytes(workload: Workload) -> float:
    """Return the bytes that narrowing moves for each element: it is read, and written as it is and transposed.

    Both layouts are needed, for the output and for the gradient of the weight. fp4 reads all once more before, for the
    scale of the whole tensor (NVIDIA 2025, Pretraining Large Language Models with NVFP4, section 2).
    """
    reads = 2 if workload.precision == "fp4" else 1
    return reads * workload.element_bytes + 2 * PRODUCT_BYTES[workload.precision]


def _summed(hardware: Hardware, workload: Workload, strategy: Strategy, layer: LayerShape) -> Seconds:
    """Return the seconds of adding a micro-batch's weight gradients to the sum: both read, the sum written.

    With `fused_sums` they are never read.
    """
    each = 2 * workload.gradient_bytes + (0 if workload.habits.fused_sums else workload.element_bytes)
    moved = layer_parameters(strategy, layer) * each
    return Seconds(0.0, moved / hardware.memory_bytes_per_second)


def _feed_forward(strategy: Strategy, layer: LayerShape, tokens: int) -> list[tuple[int, int, int]]:
    """Return width, rows and copies of the feed-forward parts of one rank."""
    parts = [(_share(layer.dense_ffn, strategy.tp_size), tokens, 1)] if layer.dense_ffn else []
    if layer.experts:
        held = held_experts(strategy, layer)
        ranks = 1 if strategy.ep_size > 1 else strategy.tp_size
        routed = tokens * layer.top_k
        if strategy.ep_size > 1:  # the tokens of tensor-parallel ranks are the same; experts see each once
            routed = -(-routed // strategy.tp_size)
        parts.append((_share(layer.expert_ffn, ranks), max(1, routed // held), held))
    return parts


def _attention(hardware: Hardware, workload: Workload, strategy: Strategy, layer: LayerShape) -> Seconds:
    """Return the seconds of scores, softmax and the weighted sum, which stay on the chip.

    Forward 2 x context x (query + output) operations a token, and 2.5 times that backward, where scores are computed
    again (Dao 2023).
    """
    samples, length, tp = strategy.micro_batch, workload.sequence, strategy.tp_size
    precision = "bf16" if PRODUCT_BYTES[workload.precision] < 2 else workload.precision
    tokens = samples * length
    work = 2.0 * tokens * context(layer, length) * (layer.query + layer.output) / tp
    share = hardware.torch_attention_efficiency if workload.habits.torch_attention else hardware.attention_efficiency
    seconds = work / (hardware.flops[precision] * share)
    forward = seconds + hardware.kernel_seconds
    return Seconds(forward, 2.5 * forward / BACKWARD_RATE)


def _elementwise(hardware: Hardware, workload: Workload, strategy: Strategy, layer: LayerShape, tokens: int) -> Seconds:
    """Return the seconds of norms, residuals, rotations and activations."""
    passes = FUSED if workload.habits.fused_elementwise else PLAIN
    tp = strategy.tp_size
    fewer = FEWER if workload.fewer_passes and not workload.habits.fused_elementwise else passes
    norm = (passes if layer.plain_norms else fewer)["norm"]
    outside = layer.hidden * (layer.norms * norm + 2 * passes["residual"])
    inside = (layer.query + layer.key) * fewer["rotation"]
    routed_width = layer.top_k * layer.expert_ffn
    widths = layer.dense_ffn / tp + routed_width / (tp if strategy.ep_size <= 1 else 1)
    active = widths * passes["gate" if layer.gated else "activation"]
    routed = 4.0 * layer.top_k * layer.hidden  # tokens are put in the order of experts and back
    moved = outside / (tp if strategy.sequence_parallel else 1) + inside / tp + active + routed
    forward = tokens * moved * workload.element_bytes / hardware.memory_bytes_per_second
    kernels = (8 if workload.habits.fused_elementwise else 30) * hardware.kernel_seconds
    return Seconds(forward + kernels, 2 * forward + kernels)


@lru_cache(maxsize=65536)
def head_seconds(hardware: Hardware, workload: Workload, strategy: Strategy) -> Seconds:
    """Return the seconds of logits and loss."""
    tokens = strategy.micro_batch * workload.sequence
    columns = _share(workload.shape.vocab, strategy.tp_size)
    precision = "bf16" if PRODUCT_BYTES[workload.precision] < 2 else workload.precision
    logits = tokens * columns / hardware.memory_bytes_per_second
    summed = columns * workload.shape.hidden * 2 * workload.gradient_bytes / hardware.memory_bytes_per_second
    each = LOGIT_BYTES_IN_CACHE if workload.on_cpu else LOGIT_BYTES
    moved = Seconds(each.forward * logits, each.backward * logits + summed)
    return product(hardware, precision, tokens, workload.shape.hidden, columns).plus(moved)


@lru_cache(maxsize=65536)
def embedding_seconds(hardware: Hardware, workload: Workload, strategy: Strategy) -> Seconds:
    """Return the seconds of the look-up, and of adding up the dense gradient of the table."""
    tokens = strategy.micro_batch * workload.sequence
    moved = 3.0 * tokens * workload.shape.hidden * workload.element_bytes
    table = 2.0 * workload.shape.vocab * workload.shape.hidden * workload.element_bytes / strategy.tp_size
    rate = hardware.memory_bytes_per_second
    return Seconds(moved / rate, (2 * moved + table) / rate)


@lru_cache(maxsize=65536)
def layer_traffic(hardware: Hardware, workload: Workload, strategy: Strategy, layer: LayerShape) -> Seconds:
    """Return the seconds of a layer's tensor-parallel traffic.

    Tensor parallel: an all-reduce of the hidden state behind attention and one behind the feed-forward part, as many
    backward (Shoeybi et al. 2019, section 3); with sequence parallelism an all-gather and a reduce-scatter each, and
    one more all-gather backward where inputs are gathered again (Korthikanti et al. 2022, section 4.2.2); with
    `narrow_gathers` what is gathered has as many bytes as the products read (Transformer Engine's Linear).
    """
    tokens = strategy.micro_batch * workload.sequence
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


def expert_traffic(hardware: Hardware, workload: Workload, strategy: Strategy, layer: LayerShape) -> float:
    """Return the seconds in which a layer's tokens travel to their experts and back, forward; a backward takes the
    same."""
    if not layer.experts or strategy.ep_size == 1 or not workload.habits.tokens_travel:
        return 0.0
    tokens = strategy.micro_batch * workload.sequence
    state = float(tokens * layer.hidden * workload.element_bytes)
    stride = 1 if strategy.ep_size <= strategy.tp_size else strategy.tp_size
    return 2 * expert_exchange(hardware, strategy.ep_size, stride, state / strategy.tp_size, layer.top_k)
