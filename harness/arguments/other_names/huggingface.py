"""The flags of HuggingFace's TrainingArguments and run_clm.py that are no flags here: why not, and what to do.

A value of `same` asks for what is done in any case, so the flag may stand with it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class NotTaken:
    """A flag that is not taken. None, HuggingFace's "not set", may always stand.

    Attributes:
        advice: what to do instead, or why it cannot be done.
        same: values with which the flag has no effect.
    """

    advice: str
    same: tuple[object, ...] = ()


OFF = (False, "", 0)
ANY = (True, False)
REDUCES = NotTaken("DeepSpeed reduces gradients, not DDP: set zero_optimization in the DeepSpeed JSON", OFF)
SHARDS = NotTaken("use --deepspeed_config zero3, which shares out weights as FSDP does", (*OFF, "[]"))
UPLOAD = NotTaken("upload output_dir when the run is done: `hf upload NAME output_dir`", (*OFF, "every_save"))
COMPILE = NotTaken('set "compile": {"enabled": true} in the DeepSpeed JSON', OFF)
LIGER = NotTaken("use --use_liger_kernel: all of Liger's kernels but those of the loss, which is in chunks here", OFF)
ON_CPU = NotTaken("set DS_ACCELERATOR=cpu in the environment", OFF)
TRACKIO = NotTaken("trackio is not supported: use --report_to tensorboard, wandb or csv", ("huggingface", *OFF))
EVALUATION = NotTaken("use Trainer(compute_metrics=...) or a TrainerCallback with on_evaluate", (*OFF, "[]"))
CONSTRUCTOR = NotTaken("write the config.json by hand, and give its directory as --model_name_or_path")
HUB_DATA = NotTaken(
    "save the data set as a file: `datasets.load_dataset(...)['train'].to_json('train.jsonl')`, then use --train_file"
)
MEMORY = NotTaken("logits go to host memory after every 16 micro-batches, where metrics need them", (True, *OFF))
OBSOLETE = NotTaken("it is obsolete: leave it out", (True, "auto", -1, 0, *OFF))
WORKERS = NotTaken("the harness reads samples itself: leave it out", (True, *OFF))
LOGIN = NotTaken("use `hf auth login`, or HF_TOKEN in the environment", OFF)

NOT_TAKEN = {
    # optimizer and schedule
    "lr_scheduler_kwargs": NotTaken("the schedules take no further values: choose --lr_scheduler_type", ("{}",)),
    "optim_args": NotTaken("set optimizer.params in the DeepSpeed JSON"),
    "optim_target_modules": NotTaken("GaLore and APOLLO are not supported; optimizer.type Muon in the JSON is"),
    "adafactor": NotTaken("Adafactor is not supported: see --optim", OFF),
    "average_tokens_across_devices": NotTaken("the loss is always the mean over the global batch", (True,)),
    "label_smoothing_factor": NotTaken("give Trainer(loss_fn=...), which is called with (logits, labels)", OFF),
    # model and precision
    "bf16_full_eval": NotTaken("evaluation computes in the precision of training: use --bf16", OFF),
    "fp16_full_eval": NotTaken("evaluation computes in the precision of training: use --fp16", OFF),
    "half_precision_backend": OBSOLETE,
    "fp16_backend": OBSOLETE,
    "fp16_opt_level": NotTaken("there is no apex: use --fp16", ("O1",)),
    "tf32": NotTaken("set torch.backends.cuda.matmul.allow_tf32 in a script of your own", OFF),
    "torch_dtype": NotTaken("use --bf16 or --fp16; without them the run is in float32", ("auto", "float32")),
    "dtype": NotTaken("use --bf16 or --fp16; without them the run is in float32", ("auto", "float32")),
    "low_cpu_mem_usage": NotTaken("each rank always loads only its own part", ANY),
    "use_cache": NotTaken("training uses no key-value cache", (False,)),
    "gradient_checkpointing_kwargs": NotTaken(
        "set pipeline.use_reentrant in the DeepSpeed JSON", ("{}", '{"use_reentrant": false}')
    ),
    "activation_checkpointing_kwargs": NotTaken(
        "set pipeline.use_reentrant in the DeepSpeed JSON", ("{}", '{"use_reentrant": false}')
    ),
    "torch_compile": COMPILE,
    "torch_compile_backend": NotTaken("set compile.backend in the DeepSpeed JSON", OFF),
    "torch_compile_mode": NotTaken("only torch's default mode: see compile.backend", ("default", *OFF)),
    "torchdynamo": NotTaken("set compile.backend in the DeepSpeed JSON", OFF),
    "jit_mode_eval": COMPILE,
    "liger_kernel_config": LIGER,
    "use_ipex": NotTaken("IPEX is not supported", OFF),
    "trust_remote_code": NotTaken("only families that transformers itself has can be cut", OFF),
    "config_name": CONSTRUCTOR,
    "config_overrides": CONSTRUCTOR,
    "model_type": CONSTRUCTOR,
    "cache_dir": NotTaken("set HF_HOME in the environment"),
    "use_fast_tokenizer": NotTaken("the tokenizer is loaded as its files say", (True,)),
    "token": LOGIN,
    "use_auth_token": LOGIN,
    # samples and steps
    "auto_find_batch_size": NotTaken("it would change the numbers: set --per_device_train_batch_size", OFF),
    "per_gpu_train_batch_size": NotTaken("use --per_device_train_batch_size"),
    "per_gpu_eval_batch_size": NotTaken("use --per_device_eval_batch_size"),
    "dataloader_drop_last": NotTaken("no sample is dropped: a batch may end one epoch and begin the next", OFF),
    "dataloader_pin_memory": WORKERS,
    "dataloader_persistent_workers": WORKERS,
    "dataloader_in_order": WORKERS,
    "dataloader_prefetch_factor": WORKERS,
    "dataloader_multiprocessing_context": WORKERS,
    "dispatch_batches": WORKERS,
    "split_batches": WORKERS,
    "accelerator_config": NotTaken("there is no accelerate here: the DeepSpeed JSON says it all", ("{}",)),
    "parallelism_config": NotTaken("use --pipeline_parallel_size and --tensor_parallel_size"),
    "remove_unused_columns": NotTaken("samples reach the data_collator as they are", ANY),
    "label_names": NotTaken("samples have their labels under `labels`", ("labels", "['labels']", ["labels"])),
    "group_by_length": NotTaken("the order of samples follows from --seed alone; --packing saves more padding", OFF),
    "train_sampling_strategy": NotTaken(
        "the order of samples follows from --seed alone; --packing saves more padding", ("random",)
    ),
    "length_column_name": NotTaken("samples are not grouped by length", ("length",)),
    "data_seed": NotTaken("the order of samples follows from --seed"),
    "full_determinism": NotTaken("order, dropout and initial weights follow from --seed in every layout", OFF),
    "ignore_data_skip": NotTaken("a resumed run always goes on with the next sample, which costs no time", OFF),
    "dataset_name": HUB_DATA,
    "dataset_config_name": HUB_DATA,
    "max_train_samples": NotTaken("give a shorter --train_file, or set --max_steps"),
    "max_eval_samples": NotTaken("give a shorter --validation_file"),
    "overwrite_cache": NotTaken("the cache of tokens follows the content of the files", OFF),
    "preprocessing_num_workers": NotTaken("all cores of the ranks tokenise"),
    "keep_linebreaks": NotTaken("text is kept as it is", (True,)),
    # logs
    "logging_dir": NotTaken("set tensorboard.output_path in the DeepSpeed JSON, a path in output_dir"),
    "logging_first_step": NotTaken("use --logging_steps 1; metrics.jsonl has every step", OFF),
    "logging_nan_inf_filter": NotTaken("use --nonfinite to say what happens", OFF),
    "log_on_each_node": NotTaken("rank 0 logs", ANY),
    "log_level": NotTaken("rank 0 speaks in the terminal, every rank in output_dir/logs", ("passive",)),
    "log_level_replica": NotTaken("other ranks write to output_dir/logs", ("warning", "passive")),
    "disable_tqdm": NotTaken("the bar is drawn on a terminal only: redirect the output", OFF),
    "include_num_input_tokens_seen": NotTaken("metrics.jsonl has consumed_samples", ("no", *OFF)),
    "include_tokens_per_second": NotTaken("metrics.jsonl always has tokens_per_second", ANY),
    "project": TRACKIO,
    "trackio_space_id": TRACKIO,
    "trackio_bucket_id": TRACKIO,
    "trackio_static_space_id": TRACKIO,
    "skip_memory_metrics": NotTaken("metrics.jsonl always has the peak memory", ANY),
    # evaluation
    "evaluate_during_training": NotTaken("set --eval_strategy steps"),
    "eval_delay": NotTaken("evaluation starts with the first --eval_steps", OFF),
    "eval_on_start": NotTaken("call Trainer.evaluate() before train()", OFF),
    "prediction_loss_only": NotTaken("use Trainer(compute_metrics=...) for more than the loss", ANY),
    "eval_accumulation_steps": MEMORY,
    "eval_do_concat_batches": MEMORY,
    "eval_use_gather_object": MEMORY,
    "include_for_metrics": EVALUATION,
    "include_inputs_for_metrics": EVALUATION,
    "batch_eval_metrics": EVALUATION,
    # checkpoints
    "save_safetensors": NotTaken("checkpoints are always safetensors", (True,)),
    "save_on_each_node": NotTaken("hosts share one output_dir", OFF),
    "enable_jit_checkpoint": NotTaken("a run always saves on SIGTERM", ANY),
    "restore_callback_states_from_checkpoint": NotTaken("callbacks keep no state in checkpoints", OFF),
    "push_to_hub": UPLOAD,
    "hub_token": UPLOAD,
    "hub_private_repo": UPLOAD,
    "hub_model_id": UPLOAD,
    "hub_strategy": UPLOAD,
    "hub_always_push": UPLOAD,
    "hub_revision": UPLOAD,
    "push_to_hub_model_id": UPLOAD,
    "push_to_hub_organization": UPLOAD,
    "push_to_hub_token": UPLOAD,
    # processes and devices
    "use_cpu": ON_CPU,
    "no_cuda": ON_CPU,
    "use_mps_device": ON_CPU,
    "torch_empty_cache_steps": NotTaken("memory is not given back between steps", OFF),
    "xpu_backend": NotTaken("DeepSpeed chooses the backend by its accelerator"),
    "ddp_backend": NotTaken("DeepSpeed chooses the backend by its accelerator"),
    "ddp_timeout": NotTaken("use --hang_seconds", (1800,)),
    "ddp_find_unused_parameters": REDUCES,
    "ddp_bucket_cap_mb": REDUCES,
    "ddp_broadcast_buffers": REDUCES,
    "ddp_static_graph": REDUCES,
    "fsdp": SHARDS,
    "fsdp_config": SHARDS,
    "fsdp_min_num_params": SHARDS,
    "fsdp_transformer_layer_cls_to_wrap": SHARDS,
    "sharded_ddp": SHARDS,
    "local_rank": NotTaken("the launcher says it", (-1, 0)),
    "debug": NotTaken("see output_dir/logs; --verify_plan on compares the cut model with the whole one", (*OFF, "[]")),
    "tpu_num_cores": OBSOLETE,
    "tpu_metrics_debug": OBSOLETE,
    "past_index": OBSOLETE,
    "mp_parameters": OBSOLETE,
    "ray_scope": NotTaken("there is no search for hyperparameters", ("last",)),
    "do_train": NotTaken("scripts/train.py has it; here call train()", ANY),
    "do_eval": NotTaken("scripts/train.py has it; here call evaluate()", ANY),
    "do_predict": NotTaken("use `ds-harness generate` on the trained model", OFF),
    "compute_loss_func": NotTaken("give it to the Trainer: Trainer(compute_loss_func=...)"),
}
