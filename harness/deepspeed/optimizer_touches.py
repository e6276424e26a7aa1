"""The touches of DeepSpeed's optimizers: their states, saved and loaded, and what ZeRO-3 gathers and sums."""

from __future__ import annotations

from harness.deepspeed.pipeline_touches import BF16, ZERO_1_2
from harness.deepspeed.touch import Touch

STAGE3 = "deepspeed.runtime.zero.stage3"
COORDINATOR = "deepspeed.runtime.zero.partitioned_param_coordinator:PartitionedParameterCoordinator"
ZERO_3 = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"

OPTIMIZER_TOUCHES = (
    # optimizer_states
    Touch(
        "optimizer_states: ZeRO-3's parameters",
        f"{ZERO_3}._reassign_or_swap_out_partitioned_parameters",
        "called once a checkpoint is loaded: brings a group's float32 values to its parameters",
        parameters=("args", "kwargs"),  # of the decorator; it takes the group's index
    ),
    Touch(
        "optimizer_states: parameters that ZeRO-3 keeps whole",
        ZERO_3,
        "divided and gathered again once a checkpoint is loaded",
        sets=("persistent_parameters",),
    ),
    Touch(
        "optimizer_states: hpZ's second copies",
        f"{ZERO_3}.invalidate_secondary_tensor",
        "called once a checkpoint is loaded",
        parameters=(),
    ),
    Touch(
        "optimizer_states: parameters of ZeRO-1 and ZeRO-2", f"{ZERO_1_2}.update_lp_params", "likewise", parameters=()
    ),
    Touch("optimizer_states: parameters in bf16", f"{BF16}.update_lp_params", "likewise", parameters=()),
    # nvme_states
    Touch(
        "nvme_states: which sub-groups lie on NVMe",
        f"{ZERO_3}._swappable_optimizer_subgroup",
        "asked for each sub-group",
        uses=("swap_optimizer", "optimizer_swapper"),
        parameters=("sub_group_id",),
    ),
    Touch(
        "nvme_states: reading a sub-group",
        f"{ZERO_3}._optimizer_states_and_gradient_swap_in",
        "called before a checkpoint is saved or loaded",
        parameters=("sub_group_id", "timer_names"),
    ),
    Touch(
        "nvme_states: leaving a sub-group as it is",
        f"{ZERO_3}._release_swap_buffers",
        "called once its values are copied",
        parameters=("sub_group_id",),
    ),
    Touch(
        "nvme_states: writing a sub-group",
        f"{ZERO_3}._optimizer_states_and_gradient_swap_out",
        "called once a checkpoint is loaded",
        parameters=("sub_group_id", "timer_names"),
    ),
    Touch(
        "nvme_states: tensors of the optimizer's state",
        "deepspeed.runtime.swap_tensor.optimizer_utils:OptimizerSwapper.purge_state",
        "forgets them once a checkpoint is loaded, as they may be others then",
        parameters=(),
    ),
    # collectives, zero3_parameters
    Touch(
        "collectives: means of ZeRO-3's gradients",
        STAGE3,
        "`reduce_scatter_coalesced` is replaced in this module: ranks of one host share memory",
        uses=("reduce_scatter_coalesced", "__avg_scatter_grads"),
    ),
    Touch(
        "collectives: the function that is replaced",
        "deepspeed.runtime.comm.coalesced_collectives",
        "another takes its place, with its arguments",
        uses=("reduce_scatter_coalesced", "tensors", "group"),
    ),
    Touch(
        "zero3_parameters: what is released",
        COORDINATOR,
        "one of its methods is replaced: parameters stay gathered between the micro-batches of a step",
        uses=("__release_param", "free_data"),
    ),
    Touch(
        "zero3_parameters: parameters divided before a step",
        ZERO_3,
        "`step` divides all gathered parameters first, so that none outlasts the values that it changes",
        uses=("_partition_all_parameters",),
    ),
)
