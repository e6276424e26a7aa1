"""What the planner predicts of LoRA and QLoRA is what a dry run counts, within a tenth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from harness.arguments import TrainingArguments
from harness.arguments.themes.lora import LoraArguments
from harness.arguments.themes.script import ScriptArguments
from harness.command_line import parse
from harness.dry_run.command import dry_run_plan
from harness.dry_run.rank import dry_run_rank
from harness.planner.estimate import predict
from harness.planner.lora import FOUR_BITS, Lora, targets_of
from harness.planner.model_config import decoder_of
from harness.preflight import check_inputs
from harness.topology.env import LaunchEnv

MODEL = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 2048,
    "tie_word_embeddings": False,
}
TOKENS = 256


@pytest.mark.parametrize(
    ("targets", "sections", "ranks", "bits"),
    [
        pytest.param(["q_proj", "v_proj"], {}, 1, None, id="two layers"),
        pytest.param(["all-linear"], {}, 1, False, id="4 bits", marks=pytest.mark.thorough),
        pytest.param(
            *(["all-linear"], {"pipeline": {"activation_checkpoint_interval": 1}}, 1, True),
            id="recomputed",
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            ["all-linear"], {"tensor_parallel": {"autotp_size": 2}}, 2, None, id="tensor", marks=pytest.mark.thorough
        ),
        pytest.param(
            ["all-linear"], {"zero_optimization": {"stage": 3}}, 2, None, id="ZeRO-3", marks=pytest.mark.thorough
        ),
    ],
)
def test_memory_is_that_of_a_dry_run(
    tmp_path: Path, targets: list[str], sections: dict[str, Any], ranks: int, bits: bool | None
) -> None:
    config = AutoConfig.for_model(**MODEL)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "model")  # 4 bits need it
    whole = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "bf16": {"enabled": True}}
    (tmp_path / "ds.json").write_text(json.dumps({**whole, "zero_optimization": {"stage": 1}, **sections}))
    words = ["--deepspeed_config", f"{tmp_path}/ds.json", "--model_name_or_path", f"{tmp_path}/model"]
    words += ["--block_size", str(TOKENS), "--output_dir", f"{tmp_path}/out", "--max_steps", "10"]
    words += ["--tokenizer_name", "bytes"]
    words += ["--use_peft", "--lora_r", "8", "--lora_target_modules", *targets]
    if bits is not None:
        words += ["--load_in_4bit", "true", "--bnb_4bit_use_double_quant", str(bits).lower()]
    kinds = [ScriptArguments, TrainingArguments, LoraArguments]
    script, args, lora = parse(kinds, words, prog="lora", description="", epilog="")
    env = LaunchEnv(world_size=ranks)
    plan = dry_run_plan(script, args, check_inputs(script, args, env, lora), lora)
    counted = dry_run_rank(plan, env).memory
    assert counted is not None
    adapters = Lora(rank=8, targets=targets_of(targets), weight_bytes=None if bits is None else FOUR_BITS[bits])
    (found,) = predict(plan.resolved, decoder_of(MODEL, "lora"), TOKENS, lora=adapters).stages
    assert found.parameters == pytest.approx(sum(counted.parameters.values()), rel=0.01)
    assert found.optimizer == pytest.approx(sum(counted.optimizer.values()), rel=0.01)
    assert found.total == pytest.approx(counted.peak, rel=0.1)
