"""The private parts of DeepSpeed's pipeline that the harness depends on: layers, stages, schedules."""

from __future__ import annotations

from harness.deepspeed.touch import Touch

PIPELINE_ENGINE = "deepspeed.runtime.pipe.engine:PipelineEngine"
PIPELINE_MODULE = "deepspeed.runtime.pipe.module:PipelineModule"
ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
ZERO_1_2 = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"
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
        sets=("stage_id", "num_stages", "activation_checkpoint_func", "tied_comms"),
        uses=("_partition_layers", "_build", "_index_tied_modules", "_synchronize_tied_weights"),
    ),
    Touch(
        "pipeline: stages that share a tied weight",
        f"{PIPELINE_MODULE}._index_tied_modules",
        "it asks `stage_owner`, which is overridden: a stage may have several parts of the model",
        uses=("stage_owner", "tied_modules", "tied_weight_attrs"),
    ),
    Touch(
        "pipeline: first values of tied weights",
        f"{PIPELINE_MODULE}._synchronize_tied_weights",
        "called without autograd, which would warn of the broadcast in each backward",
        parameters=(),
        uses=("broadcast",),
    ),
    # gradient_reduction
    Touch(
        "gradient_reduction: tied weights",
        f"{PIPELINE_MODULE}.get_tied_weights_and_groups",
        "called for the weights whose gradients stages sum; it names those in `tied_comms`, from which frozen ones are "
        "taken out",
        parameters=(),
        uses=("tied_comms", "weight_attr", "group"),
    ),
    Touch(
        "gradient_reduction: sums of tied weights",
        f"{PIPELINE_ENGINE}._exec_reduce_tied_grads",
        "replaced: it sums `grad` where ZeRO-1 reads another attribute, and passes over weights without a gradient",
        parameters=(),
        uses=("get_tied_weights_and_groups", "all_reduce", "_hp_grad", "grad"),
    ),
    Touch(
        "gradient_reduction: gradients in another precision than their parameters",
        f"{ZERO_1_2}.get_gradient_for_reduction",
        "where they are summed over stages and tensor-parallel ranks before it reads them",
        parameters=("param",),
        uses=("use_grad_accum_attribute", "grad_accum", "grad"),
    ),
    Touch(
        "gradient_reduction: gradients that the bf16 optimizer counts",
        f"{BF16}.get_grads_for_norm",
        "those that only another rank has computed are marked too",
        parameters=("for_clipping",),
        uses=("fp32_groups_has_gradients", "fp32_groups_gradients", "bf16_groups"),
    ),
    Touch(
        "gradient_reduction: reduction of a step",
        f"{PIPELINE_ENGINE}._exec_reduce_grads",
        "replaced where gradients are compressed; at ZeRO-1 called afterwards, to take the means apart",
        parameters=(),
        uses=("_force_grad_boundary", "allreduce_gradients", "_bf16_reduce_grads"),
    ),
    Touch(
        "gradient_reduction: sums of ZeRO-1",
        f"{ZERO_1_2}.gradient_reduction_w_predivide",
        "returns what it is given: the means are taken already",
        parameters=("tensor", "communication_data_type"),
    ),
    Touch(
        "gradient_reduction: a bucket of ZeRO-1",
        f"{ZERO_1_2}.average_tensor",
        "with `reduce_scatter` off it calls nothing else that sends",
        parameters=("tensor", "communication_data_type"),
        uses=("reduce_scatter", "gradient_reduction_w_predivide", "_add_full_reduction_to_compact_grad_partition"),
    ),
    Touch(
        "gradient_reduction: a bucket where it lies",
        f"{ZERO_1_2}.allreduce_bucket",
        "called with one tensor in the place of neighbours in one memory, which flattening does not copy",
        parameters=("bucket", "communication_data_type", "rank", "log", "divide", "process_group"),
        uses=("flatten",),
    ),
    Touch(
        "gradient_reduction: gradients of the bf16 optimizer",
        BF16,
        "it steps by them, in the order of the parameters",
        sets=("fp32_groups_gradients", "bf16_groups"),
    ),
    Touch(
        "gradient_reduction: scale of the loss",
        f"{ENGINE}._get_optimizer_loss_scale",
        "what rounding has taken away is scaled with the gradients",
        parameters=(),
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
        "schedule: what is kept for a stage",
        f"{PIPELINE_ENGINE}.__init__",
        "put away and taken out again, for each part of the model that a stage has",
        sets=(
            *("pipe_buffers", "num_pipe_buffers", "pipe_recv_buf", "grad_layer", "_grad_layer_buf", "meta_buffer"),
            *("first_output_send", "first_gradient_send", "pipe_partition_input_meta_cache", "prev_stage"),
            *("pipe_partition_output_meta_cache", "pipe_partition_grad_meta_cache", "next_stage"),
            "grad_partition_grad_layer_meta_cache",
        ),
    ),
    Touch(
        "schedule: buffers",
        f"{PIPELINE_ENGINE}._reserve_pipe_buffers",
        "called for each part of a stage",
        parameters=("num_buffers",),
        sets=("num_pipe_buffers",),
        uses=("pipe_buffers",),
    ),
    Touch(
        "schedule: loading",
        f"{PIPELINE_ENGINE}._exec_load_micro_batch",
        "a stage with the first and the last part reads each batch once",
        uses=("_next_batch", "is_first_stage", "is_last_stage"),
    ),
    Touch(
        "schedule: stage of the loss",
        f"{PIPELINE_ENGINE}._aggregate_total_loss",
        "it is the stage that has the last part, which need not be the last one",
        uses=("is_last_stage", "_loss_stage_global_rank", "total_loss"),
    ),
    Touch(
        "schedule: evaluation",
        f"{PIPELINE_ENGINE}.eval_batch",
        "its schedule is replaced where a stage has several parts",
        uses=("_inference_schedule", "_exec_schedule", "is_last_stage"),
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
