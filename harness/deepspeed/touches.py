"""Every touch of something private of DeepSpeed, with its reason and the version of DeepSpeed that it was seen in.

A test looks each of them up in the installed DeepSpeed, and names the ones that another version has changed.
"""

from __future__ import annotations

from harness.deepspeed.optimizer_touches import OPTIMIZER_TOUCHES, STAGE3, ZERO_3
from harness.deepspeed.pipeline_touches import (
    BF16,
    ENGINE,
    PIPELINE_ENGINE,
    PIPELINE_MODULE,
    PIPELINE_TOUCHES,
    ZERO_1_2,
)
from harness.deepspeed.touch import Touch

INIT = "deepspeed.runtime.zero.partition_parameters:Init"
SCALER = "deepspeed.runtime.fp16.loss_scaler"
MUON = "deepspeed.runtime.zero.muon.original_muon"


TOUCHES = (
    *PIPELINE_TOUCHES,
    *OPTIMIZER_TOUCHES,
    # no_peers
    Touch(
        "no_peers: shapes from the stage before",
        f"{PIPELINE_ENGINE}._recv_tensor_meta",
        "replaced where there is no such stage; the message with the shapes is taken in all the same",
        parameters=("send_stage",),
        uses=("_allocate_or_extend_buffers", "TENSOR_META_SIZE", "p2p", "recv"),
    ),
    Touch(
        "no_peers: gradients from the next stage",
        f"{PIPELINE_ENGINE}._exec_backward_pass",
        "the numbers by which a partitioned gradient is put together are known, not received",
        uses=("grad_partition_grad_layer_meta_cache", "is_grad_partitioned"),
    ),
    Touch(
        "no_peers: numbers of rank 0",
        "deepspeed.runtime.zero.utils",
        "two of its functions are replaced where there is no rank 0",
        uses=("assert_lst_len_same_as_other_ranks", "get_lst_from_rank0"),
    ),
    Touch(
        "no_peers: micro-batches of a step",
        f"{PIPELINE_ENGINE}._train_schedule",
        "a step is made of fewer of them",
        uses=("micro_batches",),
    ),
    # prints
    Touch("prints: seeds", f"{PIPELINE_MODULE}.__init__", "its `print` is replaced by nothing", uses=("print",)),
    Touch(
        "prints: the topology",
        "deepspeed.runtime.pipe.topology:PipelineParallelGrid.__init__",
        "its `print` is replaced by nothing",
        uses=("print",),
    ),
    # kept_in_fp32
    Touch(
        "kept_in_fp32: the cast of a model",
        f"{ENGINE}._cast_module_mixed_precision",
        "replaced while an engine is built, so that parameters to keep in float32 are not cast",
        parameters=("param_dtype", "buffer_dtype", "is_zero_init_model", "keep_pattern"),
    ),
    Touch(
        "kept_in_fp32: ZeRO-3's flat tensor",
        f"{ZERO_3}._create_fp16_partitions_with_defragmentation",
        "`defragment` of its module is replaced: parameters of two dtypes need two flat tensors",
        uses=("defragment", "lp_param_buffer"),
    ),
    Touch("kept_in_fp32: defragment", f"{STAGE3}:defragment", "called for each dtype", parameters=("tensors",)),
    Touch(
        "kept_in_fp32: ZeRO-3's buckets",
        ZERO_3,
        "gradients in float32 get a bucket of their own",
        sets=("ipg_buckets", "fp16_groups", "contiguous_gradients", "reduce_bucket_size", "device"),
    ),
    Touch(
        "kept_in_fp32: the bucket of a dtype",
        f"{STAGE3}:IPGBucketZ3",
        "one is made, with its buffer, for gradients in float32",
        sets=("buffer",),
    ),
    Touch(
        "kept_in_fp32: the dtype of a gradient's reduction",
        f"{ZERO_3}.get_param_comm_dtype",
        "replaced: parameters kept in float32 are reduced in float32",
        parameters=("param",),
    ),
    # zero3_parameters
    Touch(
        "zero3_parameters: notes on a parameter",
        f"{INIT}._convert_to_deepspeed_param",
        "they say whether a parameter is partitioned, its whole shape, its ranks, and what this rank holds",
        sets=("ds_id", "ds_shape", "ds_numel", "ds_tensor", "ds_process_group", "partition_numel", "partition"),
    ),
    Touch(
        "zero3_parameters: partitioning of one parameter",
        f"{INIT}._zero_init_param",
        "overridden: each rank fills its own part, so rank 0 need not send whole parameters",
        parameters=("param",),
        uses=("_convert_to_deepspeed_param", "partition"),
    ),
    Touch(
        "zero3_parameters: partitioning of a module",
        f"{INIT}._convert_to_zero_parameters",
        "calls the overridden method for each parameter of a module that is already built",
        uses=("_zero_init_param",),
    ),
    Touch(
        "zero3_parameters: replaced linear",
        "deepspeed.runtime.zero.partition_parameters:InsertPostInitMethodToModuleSubClasses._enable_mem_efficient_linear",
        "undone: it stays in the process when the engine is gone",
        parameters=(),
        sets=("linear_bk",),
        uses=("zero3_linear_wrap",),
    ),
    Touch("zero3_parameters: number of ranks", INIT, "checks the size of each part", sets=("dp_world_size",)),
    # flat_tensors
    Touch(
        "flat_tensors: ZeRO-3",
        ZERO_3,
        "says which parameters lie in which tensor that is stepped on",
        sets=("fp16_groups", "sub_group_to_group_id", "fp32_partitioned_groups_flat"),
    ),
    Touch(
        "flat_tensors: ZeRO-1 and ZeRO-2",
        ZERO_1_2,
        "says where each parameter lies in which tensor that is stepped on",
        sets=(
            "round_robin_bit16_groups",
            "round_robin_bit16_offsets",
            "single_partition_of_fp32_groups",
            "real_dp_process_group",
        ),
    ),
    Touch(
        "flat_tensors: bf16",
        BF16,
        "says where each parameter lies in which tensor that is stepped on",
        sets=("bf16_groups", "fp32_groups_flat_partition", "real_dp_process_group"),
    ),
    # engine
    Touch(
        "engine: gradient norm",
        f"{ENGINE}.get_global_grad_norm",
        "an engine in float32 does not keep its norm; the harness sets it",
        uses=("_global_grad_norm",),
    ),
    Touch(
        "engine: clipping in float32",
        f"{ENGINE}._take_model_step",
        "`clip_fp32_gradients` does nothing any more: it counts tied weights twice; the optimizer's step clips instead",
        uses=("clip_fp32_gradients", "optimizer", "step", "overflow"),
    ),
    Touch(
        "engine: wrapped optimizer",
        f"{ENGINE}._configure_optimizer",
        "its step clips, or orthogonalises",
        sets=("basic_optimizer",),
    ),
    Touch(
        "engine: gradients that the bf16 optimizer counts",
        f"{BF16}.get_grads_for_norm",
        "replaced: their squares are summed in float64",
        parameters=("for_clipping",),
    ),
    Touch(
        "engine: tied parameters of later stages",
        f"{PIPELINE_MODULE}._index_tied_modules",
        "they are left out of the gradient norm",
        sets=("ds_pipe_replicated",),
    ),
    Touch(
        "engine: search for gradients that are not finite",
        ZERO_1_2,
        "switched on in bf16 too",
        sets=("check_grad_overflow",),
    ),
    Touch(
        "engine: shape of what stages exchange",
        f"{PIPELINE_ENGINE}.reset_activation_shape",
        "called before and after an evaluation, whose micro-batches may have another shape",
        parameters=(),
    ),
    Touch(
        "engine: evaluation",
        f"{PIPELINE_ENGINE}.eval_batch",
        "called with a number of micro-batches of its own, and with monitors switched off",
        uses=("num_micro_batches", "bcast_loss", "monitor"),
    ),
    Touch(
        "engine: outputs of the last stage",
        f"{PIPELINE_ENGINE}._exec_forward_pass",
        "its buffer is emptied by the loss, which nothing reads after that",
        uses=("pipe_buffers", "outputs", "loss_fn"),
    ),
    Touch(
        "engine: instructions of the pipeline",
        f"{PIPELINE_ENGINE}._exec_schedule",
        "each is announced before it is executed, so that a rank that hangs can be named with its instruction",
        parameters=("pipe_schedule",),
        uses=("_INSTRUCTION_MAP", "_exec_instr", "kwargs"),
    ),
    Touch(
        "engine: dynamic loss scale",
        f"{SCALER}:DynamicLossScaler",
        "a resumed run goes on with the scale it had reached, and with this run's options",
        sets=("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis", "dynamic"),
    ),
    Touch("engine: loss scaler of ZeRO-1 and ZeRO-2", ZERO_1_2, "read and set", sets=("loss_scaler",)),
    Touch("engine: loss scaler of ZeRO-3", ZERO_3, "read and set", sets=("loss_scaler",)),
    # process_groups
    Touch(
        "process_groups: operations that can be compiled",
        "deepspeed.comm.torch:build_shm_op",
        "one that is marked as missing is not compiled",
        uses=("__compatible_ops__",),
    ),
    Touch("process_groups: table of operations", "deepspeed.ops:__compatible_ops__", "an entry is set to False"),
    Touch(
        "process_groups: name of the shared-memory operation",
        "deepspeed.ops.op_builder.cpu.comm:ShareMemCommBuilder",
        "it names the entry",
        uses=("deepspeed_shm_comm",),
    ),
    Touch(
        "process_groups: hpZ's group",
        "deepspeed.utils.groups:_get_zero_param_intra_parallel_group",
        "returns the group that the harness sets in the module",
        uses=("_ZERO_PARAM_INTRA_PARALLEL_GROUP",),
    ),
    Touch(
        "process_groups: the mpu of activation checkpointing",
        "deepspeed.runtime.activation_checkpointing.checkpointing",
        "asks an object of the harness for the tensor-parallel group",
        uses=(
            "get_tensor_model_parallel_rank",
            "get_tensor_model_parallel_world_size",
            "get_tensor_model_parallel_group",
        ),
    ),
    # orthogonal
    Touch(
        "orthogonal: Muon's decorator",
        "deepspeed.runtime.compiler:compile",
        "replaced while Muon is imported: torch's compiler is imported where Muon is used, not in each start",
        parameters=(),
    ),
    Touch(
        "orthogonal: iterations in the Gram matrix",
        f"{MUON}:zeropower_via_gram_newtonschulz",
        "called by the harness's own Muon",
        parameters=("G", "steps"),
    ),
    Touch(
        "orthogonal: iterations in the matrix",
        f"{MUON}:zeropower_via_newtonschulz5",
        "called by the harness's own Muon",
        parameters=("G", "steps"),
    ),
    Touch(
        "collectives: the backend of a process",
        "deepspeed.comm.comm",
        "three of its functions are replaced, on this object: ranks of one host share memory",
        uses=("cdb", "all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "output_tensor", "input_tensor"),
    ),
    # names by which DeepSpeed knows what it is given
    Touch(
        "a device of one's own",
        f"{ENGINE}._set_distributed_vars",
        "a rank that sees one device alone passes its number as `args.device_rank`",
        uses=("device_rank",),
    ),
    Touch(
        "split parameters",
        "deepspeed.runtime.utils:is_model_parallel_parameter",
        "the mark by which each tensor-parallel rank's part is counted in the gradient norm",
        uses=("tensor_model_parallel",),
    ),
    Touch("schedules of DeepSpeed", "deepspeed.runtime.lr_schedules", "set to a step", sets=("last_batch_iteration",)),
    Touch(
        "counters of an engine",
        ENGINE,
        "set once a checkpoint is loaded",
        sets=("global_steps", "global_samples", "skipped_steps", "micro_steps"),
    ),
    Touch(
        "report of the flops profiler",
        f"{ENGINE}.step",
        "the harness prints it after a pipeline's step, which never reaches this code",
        uses=("print_model_profile", "end_profile", "profile_step", "module_depth", "top_modules", "output_file"),
    ),
    Touch(
        "process of a host",
        "deepspeed.launcher.launch:main",
        "known by the name of its module among the processes above a rank",
    ),
    Touch("process of a user", "deepspeed.launcher.runner:main", "known by the name of its module, likewise"),
)
