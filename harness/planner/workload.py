"""Everything that a prediction depends on besides the hardware: the workload, the program's habits, and the layout."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from harness.parallel.pipeline.partition import LayerCost, stage_boundaries
from harness.planner.lora import Lora
from harness.planner.shape import DecoderShape, LayerShape
from harness.schedules import DEFAULT, INTERLEAVED, SCHEDULES, ModelChunks

# Habits of training programs, which a layout does not contain; `ds-harness plan --like PROGRAM` reads `habits.json`.
#
# Each habit is the program's documented default, never fitted to measurements. The default is DeepSpeed with
# models of transformers, as this harness runs it.


@dataclass(frozen=True, kw_only=True)
class UpdateTraffic:
    """What summing gradients over micro-batches and the update move, in bytes a parameter, and their kernels.

    Attributes:
        first, later: of each parameter that a rank holds, in the first micro-batch of a step, and in every other.
        once: of the same at the end of a step; own: of each parameter that the rank updates.
        kernels_each: kernels that sum the gradient of one tensor in a micro-batch; kernels_once: those that treat it
            alone at the end of a step; kernels: those for lists of tensors there; None: by their size.
    """

    first: float
    later: float
    own: float
    once: float = 0.0
    kernels_each: int = 1
    kernels_once: int = 0
    kernels: int | None = None

    def mean_sum(self, micro_batches: int) -> float:
        """Return the bytes that summing moves in a micro-batch, mean over those of a step."""
        return (self.first + (micro_batches - 1) * self.later) / micro_batches


@dataclass(frozen=True, kw_only=True)
class Habits:
    """The habits of one program.

    Attributes:
        zero_stage: ZeRO stage that the program always uses; None if the layout chooses.
        zero_stage_of_pipeline: the same in a pipeline. There ZeRO-3 would gather parameters for each micro-batch;
            torchtitan keeps them gathered, and reduces gradients once.
        torch_attention: attention uses torch's own kernels, which are not the best on every device.
        cudnn_attention: of these it tries cuDNN's first on a device where that was measured.
        fused_elementwise: norms, rotations and activations are one kernel each, by hand or by a compiler.
        grouped_experts: the products of a rank's experts are one kernel (torch's grouped_mm); else one kernel each.
        tokens_travel: tokens are sent to the ranks of their experts, once to each node, even between tensor-parallel
            ranks; else only between data-parallel ranks.
        tiles_norms: if feed-forward blocks are computed in tiles, so are norms.
        loss_in_place: the loss writes its gradient over the logits and makes no copy of them.
        loss_in_one_pass: on a GPU it reads them once forward, and reads and writes them once backward.
        rounds_once: kernels of the harness round operands of fp8 products (harness/extras/fp8), those of weights once a
            step; experts stay in 16 bits.
        sums_in_place: a gradient is added to its sum when it is computed, and not stored itself.
        fused_sums: the matrix product that computes a gradient also adds it.
        sums_wide: bf16 gradients of micro-batches are summed in float32.
        update: what sums and the update move; None: by the other habits and the layout.
        reduces_wide: gradients of ZeRO-2 and ZeRO-3 travel in the precision of their sums.
        shares_sequence: tensor-parallel ranks always use sequence parallelism.
        gathers_again: they gather a block's input again for its backward (Korthikanti et al. 2022).
        narrow_gathers: they gather in the precision of the products.
        overlap_data: gradients are reduced while layers compute; overlap_parameters: ZeRO-1 gathers while they compute.
        overlap_interleaved: stages with several chunks send and receive while they compute.
        equal_stages: all stages have the same number of layers, apart from embedding and head; the number of chunks
            divides it.
        reduces_layers: gradients are reduced layer by layer.
    """

    zero_stage: int | None = None
    zero_stage_of_pipeline: int | None = None
    torch_attention: bool = True
    cudnn_attention: bool = False
    fused_elementwise: bool = False
    grouped_experts: bool = True
    tokens_travel: bool = False
    tiles_norms: bool = True
    loss_in_place: bool = True
    loss_in_one_pass: bool = False
    rounds_once: bool = False
    sums_in_place: bool = False
    fused_sums: bool = False
    sums_wide: bool = True
    update: UpdateTraffic | None = None
    reduces_wide: bool = False
    shares_sequence: bool = False
    gathers_again: bool = False
    narrow_gathers: bool = False
    overlap_data: bool = False
    overlap_parameters: bool = False
    overlap_interleaved: bool = False
    equal_stages: bool = False
    reduces_layers: bool = False


HABITS = {
    program: Habits(**stated)
    for program, stated in json.loads(Path(__file__).with_name("habits.json").read_text(encoding="utf-8")).items()
}
DEEPSPEED = HABITS["deepspeed"]


Recompute = Literal["none", "full"]
Kernels = Literal["single", "fused", "compiled"]
"""How a GPU computes norms, rotations and activations: by transformers' operations, by one kernel each, or compiled."""
Offload = Literal["none", "optimizer", "parameters", "optimizer+parameters"]
ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2, "fp4": 2}  # of stored tensors; products may use fewer


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The model, its samples and its precision.

    Attributes:
        precision: precision of the matrix products: fp32, bf16, fp16, fp8 or fp4.
        gradient_bytes: bytes of one summed gradient.
        states: states that the optimizer keeps of a matrix in the layers, for each element.
        other_states: the same of embeddings, head and vectors.
        state_bytes: bytes of an element of such a state; master_bytes: of the copy of a parameter that ZeRO updates.
        habits: habits of the training program.
        on_cpu: whether ranks are processes on a CPU, which exchange tensors through shared memory.
        kernels: which kernels a GPU runs for norms, rotary embeddings and activations: the single operations of a
            model's code, Liger's, or those of torch.compile.
        lora: the adapters that are trained; None if all parameters are.
    """

    shape: DecoderShape
    sequence: int
    precision: str = "bf16"
    gradient_bytes: int = 4
    states: int = 2
    other_states: int = 2
    state_bytes: float = 4
    master_bytes: int = 4
    habits: Habits = DEEPSPEED
    on_cpu: bool = False
    kernels: Kernels = "single"
    lora: Lora | None = None

    @property
    def element_bytes(self) -> int:
        """Bytes of one element of an activation or a parameter."""
        return ELEMENT_BYTES[self.precision]

    @property
    def fewer_passes(self) -> bool:
        """Whether norms and rotations take the fewer operations of harness/extras/fusing/fused.py on a CPU."""
        return self.on_cpu and self.precision == "fp32"

    @property
    def has_kernels(self) -> bool:
        """Whether norms, rotations and gated activations are one kernel each: harness/extras/fusing on a GPU."""
        return self.kernels == "fused" and not self.on_cpu


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """The layout of a workload over ranks.

    Attributes:
        pp_size, tp_size, dp_size, ep_size: ranks along each axis; expert-parallel ranks are tensor-parallel ranks, and
            their neighbours on the data axis where `ep_size` is a multiple of `tp_size`.
        cp_size: data-parallel ranks that share each sequence.
        micro_batch: samples; accumulation: micro-batches of a data-parallel rank in a step.
        sequences: sequences of a sample: two for preferences, which compare completions.
        zero_stage: what data-parallel ranks partition: 1 optimizer states, 2 gradients too, 3 parameters too.
        recompute: what the backward recomputes: nothing ("none"), or whole layers ("full").
        recompute_every: number of layers that are recomputed together, from the input of the first.
        host_activations: whether these inputs are kept in the host's memory.
        loss_tile, block_tile: tokens of a sample for which the loss, or feed-forward blocks and norms, are computed at
            a time; 0: all.
        attention_tile: queries for which an attention mask is made at a time; 0: all.
        schedule: the pipeline's schedule; with several chunks 1F1B stands for another one, see `schedule_name`.
        chunks: model chunks of each stage (Narayanan et al. 2021); 1 where they are folded.
        sequence_parallel: whether tensor-parallel ranks split the sequence between their layers (Korthikanti et al.
            2022).
        split_table: whether tensor-parallel ranks split an embedding that is not tied to the head, as in Megatron-LM
            and in transformers' plans.
        overlap_data: whether ZeRO-1 and ZeRO-2 reduce gradients while layers compute.
        gathers_once: whether ZeRO-3 gathers parameters once a step if all fit (`GATHERED`); else for each forward and
            each backward of a micro-batch.
        flat_sums: whether gradients are summed in flat tensors of their own (harness/deepspeed/flat_optimizer.py).
        sent_bytes: bytes of one gradient as data-parallel ranks send it; None: as it is summed.
        reduces_once: whether ZeRO-2 reduces gradients once a step, and not in each micro-batch.
        bucket: number of gradients that are reduced at once.
        boundaries: boundaries of the model chunks, if the run has chosen them; else `partition` chooses.
    """

    pp_size: int = 1
    tp_size: int = 1
    dp_size: int = 1
    ep_size: int = 1
    cp_size: int = 1
    micro_batch: int = 1
    sequences: int = 1
    accumulation: int = 1
    zero_stage: int = 0
    recompute: Recompute = "none"
    recompute_every: int = 1
    host_activations: bool = False
    loss_tile: int = 0
    block_tile: int = 0
    attention_tile: int = 0
    offload: Offload = "none"
    schedule: str = DEFAULT
    chunks: int = 1
    sequence_parallel: bool = False
    split_table: bool = False
    overlap_data: bool = False
    gathers_once: bool = False
    flat_sums: bool = False
    reduces_once: bool = False
    sent_bytes: float | None = None
    bucket: float = 5e8
    partition: str = "balanced"
    boundaries: tuple[int, ...] | None = None

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.pp_size * self.tp_size * self.dp_size

    @property
    def offloads_states(self) -> bool:
        """Whether the host's memory holds the optimizer's states."""
        return self.offload in ("optimizer", "optimizer+parameters")

    @property
    def offloads_parameters(self) -> bool:
        """Whether the host's memory holds the parameters."""
        return self.offload in ("parameters", "optimizer+parameters")

    @property
    def is_folded(self) -> bool:
        """Whether each stage has a chunk of the first half of the model and one of the second (Qi et al. 2024)."""
        return self.pp_size > 1 and SCHEDULES[self.schedule].folded

    @property
    def chunks_per_stage(self) -> int:
        """Number of model chunks on each stage."""
        return 2 if self.is_folded else self.chunks

    @property
    def schedule_name(self) -> str:
        """The value of `pipeline.schedule`."""
        return INTERLEAVED if self.schedule == DEFAULT and self.chunks > 1 else self.schedule

    @property
    def global_batch(self) -> int:
        """Number of samples in a step."""
        return self.micro_batch * self.accumulation * self.batch_ranks

    @property
    def batch_ranks(self) -> int:
        """Number of data-parallel ranks that read different samples."""
        return self.dp_size // self.cp_size

    def tokens(self, sequence: int, tile: int = 0) -> int:
        """Return a rank's tokens of a micro-batch with samples of `sequence` tokens; with `tile`, those of one tile."""
        shard = -(-sequence // self.cp_size)
        return self.micro_batch * self.sequences * (min(shard, tile) if tile else shard)


def layer_parameters(strategy: Strategy, layer: LayerShape) -> float:
    """Return the number of a rank's parameters in one decoder layer: matrices split, norms and most biases whole."""
    router = layer.hidden * layer.experts
    dense = layer.matrix_parameters - layer.expert_parameters - router
    return dense / strategy.tp_size + layer_experts(strategy, layer) + router + layer.vectors


def layer_experts(strategy: Strategy, layer: LayerShape) -> float:
    """Return the number of a rank's parameters in a layer's routed experts: some whole experts, or a part of each."""
    return layer.expert_parameters / max(strategy.ep_size, strategy.tp_size)


def trained_in_layer(workload: Workload, strategy: Strategy, layer: LayerShape) -> float:
    """Return the number of a rank's trained parameters in one decoder layer."""
    if workload.lora is None:
        return layer_parameters(strategy, layer)
    return workload.lora.parameters(layer, strategy.tp_size)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """The layers of one stage in all its chunks, (layer, count) by kind, and whether it has the first or last one."""

    layers: tuple[tuple[LayerShape, int], ...]
    is_first: bool
    is_last: bool

    @property
    def depth(self) -> int:
        """Number of decoder layers."""
        return sum(count for _, count in self.layers)


@lru_cache(maxsize=1024)
def stages_of(
    shape: DecoderShape,
    count: int,
    method: str,
    sequence: int,
    checkpointed: bool,
    each: int = 1,
    folded: bool = False,
    given: tuple[int, ...] | None = None,
) -> tuple[Stage, ...]:
    """Return the stages, of `each` chunks, into which `pipeline.partition` cuts a decoder.

    The method `measured` is planned as `balanced`, whose costs predict the measured ones. `given` are the boundaries of
    a run that has already chosen them. Raises UserError if there are too few layers.
    """
    chunks = ModelChunks(count, each, folded)
    boundaries = [0, len(shape.layers) + 2]
    if given is not None:
        boundaries = list(given)
    elif count > 1:
        boundaries = stage_boundaries(
            method,
            chunks.count,
            costs=[cost.flops_per_token() for cost in _costs(shape, sequence, checkpointed)],
            parameters=[shape.prologue_parameters, *(x.parameters for x in shape.layers), shape.epilogue_parameters],
            names=["Prologue", *("DecoderLayer" for _ in shape.layers), "Epilogue"],
        )
    return tuple(_stage(shape, boundaries, chunks.of_stage(stage)) for stage in range(count))


def _stage(shape: DecoderShape, boundaries: list[int], own: list[int]) -> Stage:
    """Return the stage with the chunks `own`; pipeline layer 0 is the prologue, the last one the epilogue."""
    inside: list[LayerShape] = []
    for chunk in own:
        start = boundaries[chunk]
        stop = boundaries[chunk + 1]
        inside = [*inside, *shape.layers[max(0, start - 1) : min(stop - 1, len(shape.layers))]]
    return Stage(
        layers=tuple(Counter(inside).items()),
        is_first=0 in own,
        is_last=len(boundaries) - 2 in own,
    )


def _costs(shape: DecoderShape, sequence: int, checkpointed: bool) -> list[LayerCost]:
    """Return the costs of the pipeline layers, counted as a run counts them."""
    tables = 2 if shape.position_rows else 1
    return [
        LayerCost(lookup_width=tables * shape.hidden),
        *(
            LayerCost(
                matmul_parameters=layer.active_parameters,
                vector_parameters=layer.vectors,
                attention_width=layer.output,
                sequence_length=sequence,
                checkpointed=checkpointed,
            )
            for layer in shape.layers
        ),
        LayerCost(
            matmul_parameters=shape.vocab * shape.hidden,
            vector_parameters=max(0, shape.outer_vectors),
            logits=shape.vocab,
        ),
    ]
