"""What is known of a model's tensor-parallel plan from its config.json alone, and how counts are worded."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from harness.arguments import TrainingArguments
from harness.arguments.themes.script import ScriptArguments
from harness.cli import main
from harness.config.model.plans import expert_plan_refusal, plan_refusal
from harness.errors import UserError
from harness.preflight import check_before_start
from harness.topology.env import LaunchEnv
from harness.wording import counted

CONFIG = {"train_micro_batch_size_per_gpu": 1, "pipeline": {"stages": 2}, "tensor_parallel": {"autotp_size": 2}}


@pytest.mark.parametrize(
    ("model", "refused"),
    [
        ({"model_type": "llama"}, None),
        ({"model_type": "gpt2"}, None),  # by a packaged file
        ({"model_type": "mamba2"}, None),
        ({"model_type": "of_tomorrow"}, None),  # may declare one
        ({"model_type": "cpmant"}, "model type 'cpmant' has no tensor-parallel plan"),
        ({"model_type": "cpmant", "base_model_tp_plan": {"layers.*.up": "colwise"}}, None),
        ({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}, None),
        ({"model_type": "stablelm", "qk_layernorm": False}, None),
        ({"model_type": "stablelm", "qk_layernorm": True}, "with qk_layernorm True has no .*: each head has a norm"),
    ],
)
def test_a_missing_plan_is_known_from_the_config(model: dict[str, Any], refused: str | None) -> None:
    found = plan_refusal(model)
    assert found is None if refused is None else re.search(refused, found or "")


@pytest.mark.parametrize(
    ("model", "refused"),
    [
        ({"model_type": "mixtral"}, False),
        ({"model_type": "dbrx"}, False),  # by a plan file
        ({"model_type": "inkling_mm_model", "text_config": {"model_type": "inkling_text"}}, False),
        ({"model_type": "of_tomorrow"}, False),
        ({"model_type": "longcat_flash"}, True),
        ({"model_type": "llama"}, True),
        ({"model_type": "llama", "base_model_ep_plan": {"layers.*.mlp.experts": "ep_dispatch_experts"}}, False),
    ],
)
def test_a_missing_plan_for_experts_is_known_from_the_config(model: dict[str, Any], refused: bool) -> None:
    assert (expert_plan_refusal(model) is not None) is refused


def test_check_reports_it_with_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    (tmp_path / "config.json").write_text('{"model_type": "blt", "num_hidden_layers": 1}', encoding="utf-8")
    assert main(["check", str(tmp_path / "ds.json"), "--model", str(tmp_path), "--format", "json"]) == 1
    found = {item["code"]: item for item in json.loads(capsys.readouterr().out)}
    assert found["DS905"]["pointer"] == "/tensor_parallel/autotp_size"
    assert found["DS901"]["message"] == "2 pipeline stages, but the model has only 1 decoder layer"
    assert found["DS901"]["hint"] == "use at most 1 stage"
    (tmp_path / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 0}', encoding="utf-8")
    assert main(["check", str(tmp_path / "ds.json"), "--model", str(tmp_path), "--format", "json"]) == 1
    found = {item["code"]: item for item in json.loads(capsys.readouterr().out)}
    assert found["DS901"]["message"] == "the model's config.json has 0 decoder layers"


def test_a_model_type_is_a_model(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    assert main(["check", str(tmp_path / "ds.json"), "--model", "blt"]) == 1
    assert main(["check", str(tmp_path / "ds.json"), "--model", "mamba2"]) == 0


def start(model: Path) -> None:
    """Do what a run does before it imports torch."""
    arguments = TrainingArguments(output_dir=str(model / "run"))
    check_before_start(ScriptArguments(model_name_or_path=str(model)), arguments, LaunchEnv())


@pytest.mark.parametrize(
    "family", ["zaya", "prophetnet", "hrm_text", "phi4_multimodal", "reformer", "cpmant", "xlm", "xlnet"]
)
def test_a_family_that_no_layout_can_train_is_refused_from_its_config_alone(family: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}), encoding="utf-8")
    words = f"model type {family!r} cannot be trained: .+; see docs/models.md"
    with pytest.raises(UserError, match=words):
        start(tmp_path)
    config = tmp_path / "ds.json"
    config.write_text('{"train_batch_size": 1}', encoding="utf-8")
    assert main(["check", str(config), "--model", str(tmp_path)]) == 1
    assert main(["check", str(config), "--model", str(tmp_path), "--target", "deepspeed"]) == 0
    assert not (tmp_path / "run").exists()


def test_an_encoder_without_is_decoder_is_refused_from_its_config_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}), encoding="utf-8")
    with pytest.raises(UserError, match=r"bert.* depend on later tokens.* set is_decoder to true in its config\.json"):
        start(tmp_path)
    for fields in ({"model_type": "bert", "is_decoder": True}, {"model_type": "gpt_neox"}):
        (tmp_path / "config.json").write_text(json.dumps(fields), encoding="utf-8")
        start(tmp_path)
    (tmp_path / "ds.json").write_text('{"train_batch_size": 1}', encoding="utf-8")
    assert main(["check", str(tmp_path / "ds.json"), "--model", "bert"]) == 0  # a type alone: its config is not known


def test_one_is_not_many() -> None:
    assert [counted(n, "stage") for n in (0, 1, 2, 1000)] == ["0 stages", "1 stage", "2 stages", "1,000 stages"]
    assert counted(2, "process", "processes") == "2 processes"
