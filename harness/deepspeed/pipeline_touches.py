"""The private parts of DeepSpeed's pipeline that the harness depends on: layers, stages, schedules."""

from __future__ import annotations

from harness.deepspeed.touch import Touch

PIPELINE_ENGINE = "deepspeed.runtime.pipe.engine:PipelineEngine"
PIPELINE_MODULE = "deepspeed.runtime.pipe.module:PipelineModule"
BF16 = "deepspeed.runtime.bf16_optimizer:BF16_Optimizer"

PIPELINE_TOUCHES = (
    # pipeline
    Touch(
        "pipeline: choice of the boundaries",
        f"{PIPELINE_MODULE}._partition_layers",
        "overridden: the harness has chosen them",
        parameters=("method",),
        sets=("parts",),
        uses=("_set_bounds",),
    ),
    Touch(
        "pipeline: bounds of a stage",
        f"{PIPELINE_MODULE}._set_bounds",
        "called with the chosen boundaries",
        parameters=("start", "stop"),
        sets=("_local_start", "_local_stop"),
    ),
    Touch(
        "pipeline: building of the layers",
        f"{PIPELINE_MODULE}._build",
        "overridden: layers of two types can share weights, and parameters keep the names of their layers",
        parameters=(),
        uses=("_layer_specs", "_local_start", "_local_stop", "forward_funcs", "tied_modules", "tied_weight_attrs"),
    ),
    Touch(
        "pipeline: layers that are run again",
        f"{PIPELINE_MODULE}._is_checkpointable",
        "overridden: a layer may say it of itself",
        parameters=("funcs",),
    ),
    Touch(
        "pipeline: state of a stage",
        f"{PIPELINE_MODULE}.__init__",
        "read by the overridden methods, and in the order in which they are called",
        sets=("stage_id", "num_stages", "activation_checkpoint_func", "is_checkpointable_results", "tied_comms"),
        uses=("_partition_layers", "_build", "_index_tied_modules", "_synchronize_tied_weights"),
    ),
    Touch(
        "pipeline: tied weights",
        f"{PIPELINE_MODULE}.get_tied_weights_and_groups",
        "extended: every tied weight has a gradient, and frozen ones are left out",
        parameters=(),
        uses=("tied_comms", "weight_attr", "group"),
    ),
    Touch(
        "pipeline: gradients of tied weights",
        f"{PIPELINE_ENGINE}._exec_reduce_tied_grads",
        "sums the gradients of the weights that the module names, of one dtype at a time",
        uses=("get_tied_weights_and_groups", "_hp_grad", "grad"),
    ),
    Touch(
        "pipeline: accumulated gradients",
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.get_gradient_for_reduction",
        "read before they are reduced, to sum those that are partial on tensor-parallel ranks",
        parameters=("param",),
        uses=("grad_accum", "grad"),
    ),
    # schedule
    Touch(
        "schedule: what a step executes",
        f"{PIPELINE_ENGINE}.train_batch",
        "its schedule is replaced by one of the harness",
        uses=("_train_schedule", "_exec_schedule"),
    ),
    Touch(
        "schedule: backward pass",
        f"{PIPELINE_ENGINE}._exec_backward_pass",
        "called while weight gradients are put off, with a copy of the gradient that was received; what it does around "
        "autograd is done around the weight gradients too",
        parameters=("buffer_id",),
        sets=("_running_engine_backward",),
        uses=("grad_layer", "using_bf16_optimizer", "clear_lp_grads", "update_hp_grads", "loss"),
    ),
    Touch(
        "schedule: bf16 gradients",
        f"{BF16}.clear_lp_grads",
        "called before and after weight gradients, which are added up in float32",
        parameters=("set_to_none",),
    ),
    Touch(
        "schedule: sent activations",
        f"{PIPELINE_ENGINE}._exec_send_activations",
        "its sends are replaced by ones that do not wait",
        uses=("p2p", "send", "next_stage"),
    ),
    Touch(
        "schedule: sent gradients",
        f"{PIPELINE_ENGINE}._exec_send_grads",
        "likewise, in a group of their own",
        uses=("p2p", "send", "prev_stage"),
    ),
    Touch(
        "schedule: received gradients",
        f"{PIPELINE_ENGINE}._exec_recv_grads",
        "received in that group, always into the same tensor",
        sets=("grad_layer",),
        uses=("p2p", "recv", "next_stage"),
    ),
)
