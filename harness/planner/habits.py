"""What a training program does that no layout says: by one word, `ds-harness plan --like WORD`.

Each habit is the program's documented default, and none was chosen by how well it predicts. The default is DeepSpeed
with models of transformers, as this harness runs it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Habits:
    """The habits of one program.

    Attributes:
        zero_stage: what data-parallel ranks always share out; None where the layout chooses. In a pipeline, which would
            gather parameters for each micro-batch, `zero_stage_of_pipeline`.
        torch_attention: attention runs by torch's own kernels, which are not a device's best everywhere.
        fused_elementwise: norms, rotations and activations are one kernel each, by hand or by a compiler.
        grouped_experts: the products of a rank's experts are one kernel (grouped_mm of torch), or one each.
        tokens_travel: tokens are sent to the ranks of their experts; else these ranks see the same tokens.
        loss_in_place: the loss writes its gradient over the logits and makes no copy of them.
        sums_in_place: a gradient is added to its sum as it is made, without one of its own; fused_sums: by the product
            that makes it.
        reduces_wide: gradients of ZeRO-2 and ZeRO-3 travel in the precision of their sums.
        shares_sequence: tensor-parallel ranks always share out what lies between their layers; gathers_again: they
            gather the input of a block again for its backward (Korthikanti et al. 2022); narrow_gathers: in the
            precision of the products.
        overlap_data, overlap_parameters: gradients and parameters of ZeRO-1 travel while layers compute.
        overlap_interleaved: stages with several parts send and receive while they compute.
    """

    zero_stage: int | None = None
    zero_stage_of_pipeline: int | None = None
    torch_attention: bool = True
    fused_elementwise: bool = False
    grouped_experts: bool = True
    tokens_travel: bool = False
    loss_in_place: bool = True
    sums_in_place: bool = False
    fused_sums: bool = False
    reduces_wide: bool = False
    shares_sequence: bool = False
    gathers_again: bool = False
    narrow_gathers: bool = False
    overlap_data: bool = False
    overlap_parameters: bool = False
    overlap_interleaved: bool = False


DEEPSPEED = Habits()
MEGATRON = Habits(
    zero_stage=1,
    zero_stage_of_pipeline=1,
    torch_attention=False,
    fused_elementwise=True,
    grouped_experts=False,
    tokens_travel=True,
    loss_in_place=False,
    sums_in_place=True,
    fused_sums=True,
    shares_sequence=True,
    gathers_again=True,
    narrow_gathers=True,
    overlap_data=True,
    overlap_parameters=True,
    overlap_interleaved=True,
)
TORCHTITAN = Habits(
    zero_stage=3,
    zero_stage_of_pipeline=1,  # reshard_after_forward is off there, and gradients are reduced once
    tokens_travel=True,
    loss_in_place=False,
    reduces_wide=True,
    shares_sequence=True,
    overlap_data=True,
)
HABITS = {"deepspeed": DEEPSPEED, "megatron": MEGATRON, "torchtitan": TORCHTITAN}
