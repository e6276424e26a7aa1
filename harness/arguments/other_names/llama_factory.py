"""What LLaMA-Factory calls the flags of this script."""

from __future__ import annotations

from harness.arguments.other_names.answers import ADAPTER, CHECKPOINTING, DATA

ONE_STAGE = "nothing: next-token training is all there is; dpo, ppo and the like need another program"
TEMPLATE = "the tokenizer's own template: set chat_template in tokenizer_config.json"
QUANTISED = "--use_peft; quantised weights are not supported"
KERNELS = "nothing: such kernels replace the layers that the harness cuts"
OPTIMIZER = "--optim, or optimizer.type in the DeepSpeed JSON"
TOKENS = "a tokenizer and a model that have the tokens already, as --model_name_or_path"

FROZEN = "a script with harness.Trainer and a model whose other parameters are frozen"
TEXT_ALONE = "nothing: of a model with images the text decoder alone is trained"

FACTORY = {
    "stage": ONE_STAGE,
    "pref_beta": ONE_STAGE,
    "pref_loss": ONE_STAGE,
    "finetuning_type": f"{ADAPTER}; without it all weights are trained",
    "template": TEMPLATE,
    "default_system": TEMPLATE,
    "enable_thinking": TEMPLATE,
    "tool_format": TEMPLATE,
    "dataset_dir": DATA,
    "eval_dataset": "--validation_file",
    "val_size": "--validation_split_percentage (below 1: a fraction)",
    "max_samples": "--max_steps, or a shorter --train_file",
    "mix_strategy": "weights behind the files: --train_file a.jsonl:0.7 b.jsonl:0.3",
    "interleave_probs": "weights behind the files: --train_file a.jsonl:0.7 b.jsonl:0.3",
    "neat_packing": "--packing",
    "buffer_size": "--shuffle_buffer_size",
    "tokenized_path": "nothing: tokens are cached by the content of the files",
    "train_on_prompt": "nothing: conversations are trained on the assistant's turns",
    "mask_history": "nothing: conversations are trained on the assistant's turns",
    "model_max_length": "--block_size",
    "adapter_name_or_path": "--model_name_or_path with the adapters' directory, to continue from them",
    "create_new_adapter": ADAPTER,
    "additional_target": "--lora_modules_to_save",
    "lora_target": "--lora_target_modules (all: all-linear)",
    "use_dora": "--use_peft; DoRA is not supported",
    "pissa_init": "--use_peft; PiSSA is not supported",
    "quantization_bit": QUANTISED,
    "quantization_method": QUANTISED,
    "double_quantization": QUANTISED,
    "flash_attn": "--attn_implementation flash_attention_2 (fa2) or sdpa",
    "shift_attn": "--attn_implementation sdpa",
    "enable_liger_kernel": "--use_liger_kernel",
    "use_unsloth": KERNELS,
    "use_unsloth_gc": CHECKPOINTING,
    "disable_gradient_checkpointing": f"{CHECKPOINTING} false",
    "use_reentrant_gc": "pipeline.use_reentrant in the DeepSpeed JSON",
    "pure_bf16": "--bf16",
    "compute_dtype": "--bf16 or --fp16",
    "train_from_scratch": "a directory with config.json and no weights as --model_name_or_path",
    "moe_aux_loss_coef": "--router_aux_loss_coef",
    "early_stopping_steps": "--early_stopping_patience",
    "compute_accuracy": "Trainer(compute_metrics=...) in a script",
    "plot_loss": "`ds-harness report output_dir` after the run",
    "disable_shuffling": "--streaming, which keeps the order of the files",
    "resize_vocab": TOKENS,
    "add_tokens": TOKENS,
    "add_special_tokens": TOKENS,
    "hf_hub_token": "nothing: log in with `hf auth login`, or set HF_TOKEN in the environment",
    "use_swanlab": "--report_to tensorboard, wandb, comet or csv",
    "use_galore": OPTIMIZER,
    "use_apollo": OPTIMIZER,
    "use_badam": OPTIMIZER,
    "use_adam_mini": OPTIMIZER,
    "use_muon": "optimizer.type Muon in the DeepSpeed JSON",
    "freeze_trainable_layers": FROZEN,
    "freeze_trainable_modules": FROZEN,
    "freeze_extra_modules": FROZEN,
    "media_dir": TEXT_ALONE,
    "train_mm_proj_only": TEXT_ALONE,
    "freeze_multi_modal_projector": TEXT_ALONE,
    "freeze_language_model": TEXT_ALONE,
    "new_special_tokens": TOKENS,
    "upcast_layernorm": KERNELS,
    "max_new_tokens": "--sample_tokens, with --sample_prompts",
    "export_dir": "nothing: output_dir is a HuggingFace directory when the run has ended",
}
"""LLaMA-Factory's keys that are not HuggingFace's."""

FACTORY_PREFIXES = {
    "ref_model": ONE_STAGE,
    "reward_model": ONE_STAGE,
    "ppo_": ONE_STAGE,
    "galore_": OPTIMIZER,
    "apollo_": OPTIMIZER,
    "badam_": OPTIMIZER,
    "image_": TEXT_ALONE,
    "video_": TEXT_ALONE,
    "audio_": TEXT_ALONE,
    "freeze_vision_": TEXT_ALONE,
    "swanlab_": "--report_to tensorboard, wandb, comet or csv",
    "vllm_": "nothing: `ds-harness generate` continues text by a trained model",
    "sglang_": "nothing: `ds-harness generate` continues text by a trained model",
    "infer_": "nothing: `ds-harness generate` continues text by a trained model",
    "export_": "nothing: output_dir is a HuggingFace directory when the run has ended",
}
"""The beginnings of LLaMA-Factory's other keys."""
