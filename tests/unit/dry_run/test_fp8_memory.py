"""What the planner predicts of activations in fp8 is what a dry run counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.arguments import TrainingArguments
from harness.arguments.themes.lora import LoraArguments
from harness.arguments.themes.script import ScriptArguments
from harness.dry_run.command import dry_run_plan
from harness.dry_run.rank import dry_run_rank
from harness.planner.estimate import predict
from harness.planner.memory import layer_activations
from harness.planner.model_config import decoder_of
from harness.preflight import check_inputs
from harness.topology.env import LaunchEnv

LAYERS, HIDDEN, WIDE, TOKENS = 4, 256, 704, 2 * 512
MODEL = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 320,
    "tie_word_embeddings": False,
}


@pytest.mark.thorough
def test_activations_are_those_of_a_dry_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**MODEL, "architectures": ["LlamaForCausalLM"]}))
    sizes = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "bf16": {"enabled": True}}
    script = ScriptArguments(model_name_or_path=str(tmp_path), tokenizer_name="bytes")
    args = TrainingArguments(
        deepspeed_config=sizes, output_dir=str(tmp_path / "run"), max_steps=2, fp8="rowwise", block_size=TOKENS // 2
    )
    plan = dry_run_plan(script, args, check_inputs(script, args, LaunchEnv(), None), LoraArguments())
    counted = dry_run_rank(plan, LaunchEnv()).memory
    assert counted is not None
    # a dry run's layers compute by the operations of transformers
    found = predict(plan.resolved, decoder_of(MODEL, "llama"), TOKENS // 2, fp8=True, fused_kernels=False)
    layers = LAYERS * layer_activations(found.workload, found.strategy, found.workload.shape.layers[0])
    latest = 3 * TOKENS * WIDE  # the input of the last layer, in bf16, and its codes by row: until the backward begins
    assert layers + latest == pytest.approx(counted.activations, rel=0.08)
