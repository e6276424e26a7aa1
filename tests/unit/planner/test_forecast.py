"""What a run is expected to need is said before its model is built; what cannot fit is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from harness import TrainingArguments, UserError
from harness.composition import installed_parts
from harness.console import plain_console
from harness.planner import forecast as forecasts
from harness.planner.estimate import Prediction
from harness.planner.forecast import Forecast, forecast, host_limit_bytes, require_states
from harness.report.run_files import RunFiles, expected_parts
from harness.topology.env import LaunchEnv
from harness.training.parts.data import UserData
from harness.training.prepare.plan import RunInputs, RunSpec, plan_run

CPU = torch.device("cpu")
GIB = 2**30
STAGES = {"pipeline": {"stages": 2}, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4}
OFFLOAD = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "zero_force_ds_cpu_optimizer": False,
}


def planned(
    tmp_path: Any, config: dict[str, Any] | None = None, ranks: int = 2, model: Any = "tiny-llama", **more: Any
) -> RunSpec:
    env = LaunchEnv(world_size=ranks, local_world_size=ranks)
    args = TrainingArguments(deepspeed_config=config or STAGES, output_dir=str(tmp_path / "run"), max_steps=1)
    data = [{"input_ids": list(range(32))}] * 16
    inputs = RunInputs(model=model, console=plain_console(0), env=env, **more)
    spec, _ = plan_run(args, inputs, UserData(train_dataset=data))
    return spec


def forecast_of(spec: RunSpec, ranks: int = 2) -> Forecast | None:
    assert spec.source is not None
    on = {"length": 32, "device": CPU, "ranks": range(ranks), "adapters": spec.adaptation is not None}
    return forecast(spec.source, spec.resolved, spec.layout, spec.args, **on)


def expected(spec: RunSpec, ranks: int = 2) -> Prediction:
    found = forecast_of(spec, ranks)
    assert found is not None
    return found.prediction


def test_each_stage_has_its_states_in_float32(tmp_path: Any) -> None:
    spec = planned(tmp_path)
    assert spec.source is not None
    found = expected(spec)
    with torch.device("meta"):
        elements = sum(
            parameter.numel() for parameter in AutoModelForCausalLM.from_config(spec.source.config).parameters()
        )
    # the parameters, their gradients and AdamW's two states
    assert sum(stage.states for stage in found.stages) == 16 * elements
    assert found.limit_bytes == host_limit_bytes() / 2
    words = r"expected memory: 0\.0\d to 0\.0\d GiB a rank beside the process itself, of \d+\.\d"
    assert re.fullmatch(words, str(found))
    kept = found.as_json()
    assert kept["estimate"] is None and len(kept["memory_gib"]["stages"]) == 2


@pytest.mark.parametrize("config", [STAGES, OFFLOAD])
def test_what_the_ranks_of_a_host_hold_together_must_fit(
    config: dict[str, Any], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = planned(tmp_path, config)
    found = expected(spec)
    stages = [spec.layout.coordinate(rank).stage for rank in range(2)]
    held = sum((found.stages * 2)[rank].states + (found.stages * 2)[rank].host for rank in range(2))
    monkeypatch.setattr(forecasts, "host_limit_bytes", lambda: held + 1)
    require_states(found, spec.resolved, stages, CPU)
    monkeypatch.setattr(forecasts, "host_limit_bytes", lambda: held - 1)
    with pytest.raises(UserError, match=r"states of the 2 ranks of this host need .* --skip_memory_check"):
        require_states(found, spec.resolved, stages, CPU)


def test_a_device_must_hold_the_states_of_its_rank(tmp_path: Any) -> None:
    spec = planned(tmp_path)
    found, device = expected(spec), torch.device("cuda")
    most = max(stage.states for stage in found.stages)
    require_states(replace(found, limit_bytes=most + 1), spec.resolved, [0, 1], device)
    with pytest.raises(UserError, match="optimizer states of a rank need"):
        require_states(replace(found, limit_bytes=most - 1), spec.resolved, [0, 1], device)


@pytest.mark.parametrize("boundaries", [[0, 3, 6], [0, 5, 6], [0, 2, 9]])
def test_the_report_shows_what_the_run_has_said_of_its_own_stages(boundaries: list[int], tmp_path: Path) -> None:
    said = expected(planned(tmp_path))
    found = said.for_boundaries(boundaries)
    run = RunFiles(name="run", folder=tmp_path, about={"expected": found.as_json()}, steps=[])
    shown = expected_parts(run)
    assert [stage["parameters"] for stage in shown] == [stage.parameters for stage in found.stages]
    assert (found.stages == said.stages) == (boundaries != [0, 5, 6])  # the first is the planner's, the last another's
    assert found.as_json()["sequence_length"] == 32


def test_what_the_planner_cannot_count_has_no_forecast(tmp_path: Any) -> None:
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
    adapters = planned(tmp_path, peft_config=config, parts=installed_parts())
    assert forecast_of(adapters) is None


@pytest.mark.parametrize(("name", "states"), [("AdamW", 2), ("Adagrad", 1), ("SGD", 0)])
def test_the_states_of_an_optimizer_are_its_own(name: str, states: int, tmp_path: Any) -> None:
    found = expected(planned(tmp_path, {**STAGES, "optimizer": {"type": name, "params": {"lr": 1e-3}}}))
    assert [stage.states for stage in found.stages] == [(2 + states) * stage.parameters for stage in found.stages]


# What their config.json says of experts is not what a run holds: no layer has them, or not all do.
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 256}
UNUSUAL = {
    "doge": {"num_key_value_heads": 2, "intermediate_size": 128},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4, "intermediate_size": 64},
    "falcon": {"new_decoder_architecture": False, "multi_query": True},
}


@pytest.mark.parametrize("family", sorted(UNUSUAL))
def test_a_model_is_counted_by_itself_and_not_by_what_its_config_may_mean(
    family: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = CONFIG_MAPPING[family](**SIZES, **UNUSUAL[family])
    spec = planned(tmp_path, {"train_micro_batch_size_per_gpu": 1}, ranks=1, model=config)
    assert spec.source is not None
    found, elements = expected(spec, 1), sum(p.numel() for p in spec.source.skeleton().parameters())
    assert sum(stage.states for stage in found.stages) == 16 * elements
    monkeypatch.setattr(forecasts, "host_limit_bytes", lambda: 16 * elements + 1)
    assert require_states(found, spec.resolved, [0], CPU) is None


def test_a_guess_warns_where_what_is_certain_refuses(tmp_path: Any) -> None:
    spec = planned(tmp_path)
    found, device = expected(spec), torch.device("cuda")
    shape = replace(found.workload.shape, guessed=True)
    guess = replace(found, workload=replace(found.workload, shape=shape), limit_bytes=1.0)
    assert "may need more memory than there is" in str(require_states(guess, spec.resolved, [0, 1], device))
