"""What axolotl calls the flags of this script, as its documentation lists the keys of a YAML file."""

from __future__ import annotations

from harness.training.arguments.other_names.answers import ADAPTER, DATA, LAYOUT, ZERO

QUANTISED = "--use_peft; quantised weights are not supported"
KERNELS = "nothing: such kernels replace the layers that the harness cuts"
ONE_RATE = "--learning_rate: all parameters have one rate"
TOKENS = "a tokenizer and a model that have the tokens already, as --model_name_or_path"

AXOLOTL = {
    "base_model": "--model_name_or_path",
    "base_model_config": "--model_name_or_path",
    "tokenizer_config": "--tokenizer_name",
    "revision_of_model": "--model_revision",
    "datasets": DATA,
    "test_datasets": "--validation_file",
    "val_set_size": "--validation_split_percentage (below 1: a fraction)",
    "dataset_prepared_path": "nothing: tokens are cached by the content of the files",
    "dataset_processes": "nothing: all cores of the ranks tokenise",
    "sequence_len": "--block_size",
    "sample_packing": "--packing",
    "pad_to_sequence_len": "--packing",
    "micro_batch_size": "--per_device_train_batch_size",
    "eval_batch_size": "--per_device_eval_batch_size",
    "num_epochs": "--num_train_epochs",
    "lr_scheduler": "--lr_scheduler_type",
    "optimizer": "--optim",
    "adapter": f"{ADAPTER}; quantised weights are not supported",
    "load_in_8bit": QUANTISED,
    "load_in_4bit": QUANTISED,
    "lora_target_linear": "--lora_target_modules all-linear",
    "peft_use_rslora": "--use_rslora",
    "flash_attention": "--attn_implementation flash_attention_2",
    "sdp_attention": "--attn_implementation sdpa",
    "eager_attention": "--attn_implementation eager",
    "tensor_parallel_degree": "--tensor_parallel_size",
    "evals_per_epoch": "--eval_steps (in steps)",
    "saves_per_epoch": "--save_steps (in steps)",
    "train_on_inputs": "nothing: conversations are trained on the assistant's turns",
    "chat_template": "the tokenizer's own template: set it in tokenizer_config.json",
    "auto_resume_from_checkpoints": "--resume_from_checkpoint auto",
    "lora_model_dir": "--model_name_or_path with the adapters' directory, to continue from them",
    "lora_on_cpu": "nothing: each rank loads its own part of the adapters",
    "peft_use_dora": "--use_peft; DoRA is not supported",
    "lora_mlp_kernel": KERNELS,
    "lora_qkv_kernel": KERNELS,
    "lora_o_kernel": KERNELS,
    "loraplus_lr_ratio": ONE_RATE,
    "embedding_lr": ONE_RATE,
    "lr_groups": ONE_RATE,
    "cosine_min_lr_ratio": "--lr_scheduler_type (all end at 0)",
    "unfrozen_parameters": "a script with harness.Trainer and a model whose other parameters are frozen",
    "noisy_embedding_alpha": "--neftune_noise_alpha",
    "plugins": "nothing: there are no plugins",
    "strict": "nothing: unknown keys are always refused",
    "pretraining_dataset": "--train_file and --streaming",
    "skip_prepare_dataset": "a script with harness.Trainer and a data set of input_ids",
    "shuffle_merged_datasets": "nothing: all files are shuffled together",
    "shuffle_before_merging_datasets": "nothing: all files are shuffled together",
    "streaming_multipack_buffer_size": "--shuffle_buffer_size",
    "eval_sample_packing": "--packing, which holds for evaluation too",
    "excess_length_strategy": "--block_size: longer conversations lose their end, and the run says how many",
    "dataset_exact_deduplication": "nothing: remove repeated rows from the files beforehand",
    "roles_to_train": "nothing: the answers of the assistant are trained",
    "default_system_message": "a system message in the chat template or in the rows",
    "special_tokens": TOKENS,
    "tokens": TOKENS,
    "added_tokens_overrides": TOKENS,
    "resize_token_embeddings_to_32x": TOKENS,
    "use_tensorboard": "--report_to tensorboard",
    "use_wandb": "--report_to wandb",
    "wandb_name": "--run_name",
    "wandb_run_id": "--run_name",
    "eval_table_size": "--sample_prompts",
    "eval_max_new_tokens": "--sample_tokens, with --sample_prompts",
    "eval_causal_lm_metrics": "Trainer(compute_metrics=...) in a script; the loss and the perplexity are always there",
    "loss_watchdog_threshold": "--nonfinite, or a TrainerCallback that looks at the loss",
    "loss_watchdog_patience": "--nonfinite, or a TrainerCallback that looks at the loss",
    "save_first_step": "--save_steps",
    "rl": "another program: only next-token training is supported",
    "reward_model": "another program: only next-token training is supported",
    "dp_shard_size": f"{ZERO}; {LAYOUT}",
    "dp_replicate_size": LAYOUT,
    "sequence_parallel_degree": "a smaller --block_size: there is no context parallelism",
    "xformers_attention": "--attn_implementation sdpa",
    "flex_attention": "--attn_implementation sdpa",
    "s2_attention": "--attn_implementation sdpa",
    "gpu_memory_limit": "nothing: ranks take what they need",
    "overrides_of_model_config": "a directory with the model's config.json as --model_name_or_path",
    "fix_untrained_tokens": TOKENS,
}
"""Where the value is false nothing is asked for, but by `shuffle_merged_datasets`."""

AXOLOTL_PREFIXES = {
    "liger_": KERNELS,
    "flash_attn_": KERNELS,
    "wandb_": "--report_to wandb, and wandb.project, wandb.team and wandb.group in the DeepSpeed JSON",
    "mlflow_": "--report_to tensorboard, wandb, comet or csv",
    "comet_": "--report_to comet",
    "gptq": QUANTISED,
    "bnb_": QUANTISED,
    "relora": ADAPTER,
    "dpo_": "another program: only next-token training is supported",
    "fsdp": ZERO,
}
"""The beginnings of axolotl's other keys."""


def asks_for_nothing(name: str, value: object) -> bool:
    """Whether a key of axolotl's switches something off that is off."""
    return str(value).lower() == "false" and name in AXOLOTL and not name.startswith("shuffle_")
