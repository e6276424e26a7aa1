"""What is trained, and how it is laid out: all that a prediction depends on besides the hardware."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from harness.config.values.layout_keys import INTERLEAVED
from harness.planner.habits import DEEPSPEED, Habits
from harness.planner.shape import DecoderShape, LayerShape

Recompute = Literal["none", "full"]
Schedule = Literal["1f1b", "gpipe", "zero-bubble", "zero-bubble-v"]
Offload = Literal["none", "optimizer", "optimizer+parameters"]
ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2, "fp4": 2}  # of what is stored; products may use fewer


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is trained.

    Attributes:
        precision: of the matrix products: fp32, bf16, fp16, fp8 or fp4.
        gradient_bytes: of one summed gradient.
        habits: of the program that trains.
        on_cpu: whether ranks are processes of a host's processor: they exchange tensors through memory that they share.
    """

    shape: DecoderShape
    sequence: int
    precision: str = "bf16"
    gradient_bytes: int = 4
    habits: Habits = DEEPSPEED
    on_cpu: bool = False

    @property
    def element_bytes(self) -> int:
        """Of an activation or a parameter in use."""
        return ELEMENT_BYTES[self.precision]

    @property
    def fewer_passes(self) -> bool:
        """Whether norms and rotations are counted as harness/hf/fused.py has them: where it was measured."""
        return self.on_cpu and self.precision == "fp32"


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """How it is laid out.

    Attributes:
        pp_size, tp_size, dp_size, ep_size: ranks along each axis; expert-parallel ranks are data-parallel ranks, or
            tensor-parallel ranks where `ep_size` is equal to `tp_size`.
        micro_batch: samples; accumulation: micro-batches of a data-parallel rank in a step.
        zero_stage: what data-parallel ranks share out: 1 optimizer states, 2 gradients too, 3 parameters too.
        recompute: what the backward computes again: nothing, or whole layers.
        recompute_every: layers that are recomputed at once, from the input of their first.
        schedule: of the pipeline; under gpipe all forward passes come first.
        chunks: model chunks of each stage, which go round the stages (Narayanan et al. 2021, interleaved schedule).
        sequence_parallel: whether tensor-parallel ranks share out what lies between their layers (Korthikanti et al.
            2022).
        split_table: whether tensor-parallel ranks share an embedding that is not tied to the head, as in Megatron-LM
            and in the plans of transformers.
        overlap_data: whether gradients and ZeRO-3's parameters travel while layers compute.
        gathers_once: whether ZeRO-3 gathers parameters once a step where there is room for all (`GATHERED`), else for
            each forward and each backward of a micro-batch.
        whole_gradients: whether each data-parallel rank gets all summed gradients, though it needs only its part.
        bucket: gradients that are reduced at once.
        boundaries: of the parts of the model in a run that has chosen them; else `partition` does.
    """

    pp_size: int = 1
    tp_size: int = 1
    dp_size: int = 1
    ep_size: int = 1
    micro_batch: int = 1
    accumulation: int = 1
    zero_stage: int = 0
    recompute: Recompute = "none"
    recompute_every: int = 1
    offload: Offload = "none"
    schedule: Schedule = "1f1b"
    chunks: int = 1
    sequence_parallel: bool = False
    split_table: bool = False
    overlap_data: bool = False
    gathers_once: bool = False
    whole_gradients: bool = False
    bucket: float = 5e8
    partition: str = "balanced"
    boundaries: tuple[int, ...] | None = None

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.pp_size * self.tp_size * self.dp_size

    @property
    def is_folded(self) -> bool:
        """Whether each stage has a part of the first half of the model and one of the second (Qi et al. 2024)."""
        return self.pp_size > 1 and self.schedule == "zero-bubble-v"

    @property
    def chunks_per_stage(self) -> int:
        """Model chunks on each stage."""
        return 2 if self.is_folded else self.chunks

    @property
    def schedule_name(self) -> str:
        """The schedule as `pipeline.schedule` names it."""
        return self.schedule if self.chunks == 1 else INTERLEAVED

    @property
    def global_batch(self) -> int:
        """Samples a step."""
        return self.micro_batch * self.accumulation * self.dp_size


def layer_parameters(strategy: Strategy, layer: LayerShape) -> float:
    """Return a rank's parameters of one decoder layer: matrices split, norms and most biases whole."""
    router = layer.hidden * layer.experts
    dense = layer.matrix_parameters - layer.expert_parameters - router
    return dense / strategy.tp_size + layer_experts(strategy, layer) + router + layer.vectors


def layer_experts(strategy: Strategy, layer: LayerShape) -> float:
    """Return a rank's parameters of a layer's routed experts: whole ones over expert ranks, or parts of each."""
    return layer.expert_parameters / max(strategy.ep_size, strategy.tp_size)
