"""What of a user's config is tried, and what a certificate holds for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.arguments import TrainingArguments
from harness.errors import UserError
from harness.hf.skeleton import read_source
from harness.installed import read_run_config
from harness.report import certificate
from harness.verify.trials.certify import Reduced, certify, compositions, conclude, data_ranks, reduce, run_config
from harness.verify.trials.composition import Composition, Training
from harness.verify.trials.subject import deepspeed_config, make_subject
from harness.verify.trials.trial import TrialResult
from harness.verify.trials.verify_command import table, verify


def reduced(config: dict[str, Any], ranks: int) -> Reduced:
    return reduce(read_run_config(TrainingArguments(deepspeed_config=config), world_size=ranks))


def test_a_config_keeps_what_it_says_of_the_computation_and_names_what_it_loses() -> None:
    found = reduced(
        {
            "train_batch_size": 256,
            "gradient_accumulation_steps": 16,
            "fp16": {"enabled": True},
            "gradient_clipping": 0.3,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-5}},
            "pipeline": {"stages": 8, "schedule": "gpipe", "grad_partitioned": False},
            "tensor_parallel": {"autotp_size": 2},
            "zero_optimization": {"stage": 1, "reduce_bucket_size": 1000},
            "communication_data_type": "fp32",
            "wall_clock_breakdown": True,
        },
        32,
    )
    execution = found.execution
    assert found.executions == [execution]
    assert (execution.pp, execution.tp, execution.dp, execution.zero, execution.schedule) == (4, 2, 1, 1, "gpipe")
    assert execution.rest == {
        "communication_data_type": "fp32",
        "pipeline": {"grad_partitioned": False},
        "zero_optimization": {"reduce_bucket_size": 1000},
    }
    assert (found.training.precision, found.training.optimizer, found.training.clip) == ("fp32", "Adam", 0.3)
    said = " ".join(found.left_out)
    for word in ("8 pipeline stages: 4 are tried", "fp16", "optimizer.params", "wall_clock_breakdown"):
        assert word in said
    config = deepspeed_config(found.training, execution)
    assert config["pipeline"]["stages"] == 4 and config["zero_optimization"]["reduce_bucket_size"] == 1000


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [
        ((1, 1, 4, 1), [(1, 1, 4, 1, 4)]),
        ((1, 1, 1, 4), [(1, 1, 1, 4, 4)]),
        ((1, 2, 1, 4), [(1, 2, 1, 4, 2)]),
        ((1, 1, 4, 2), [(1, 1, 4, 2, 4)]),
        ((1, 1, 3, 2), [(1, 1, 3, 2, 6)]),
        ((2, 2, 4, 1), [(2, 1, 4, 1, 4), (2, 2, 2, 1, 2)]),
        ((1, 1, 16, 1), [(1, 1, 8, 1, 8)]),
        ((1, 4, 1, 16), [(1, 4, 1, 8, 2)]),
        ((2, 2, 1, 8), [(1, 2, 1, 8, 4), (2, 2, 1, 4, 2)]),
    ],
)
def test_every_size_is_tried_as_it_is_if_eight_ranks_can(
    sizes: tuple[int, int, int, int], wanted: list[tuple[int, int, int, int, int]]
) -> None:
    """Pipeline, tensor, context and expert sizes, and the data-parallel ranks that they need."""
    pp, tp, cp, ep = sizes
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 4,
        "pipeline": {"stages": pp},
        "tensor_parallel": {"autotp_size": tp},
        "context_parallel": {"size": cp},
        "expert_parallel": {"enabled": True, "autoep_size": ep},
    }
    found = reduced(config, pp * tp * data_ranks(tp, cp, ep))
    assert sorted((each.pp, each.tp, each.cp, each.ep, each.dp) for each in found.executions) == sorted(wanted)
    for each in found.executions:
        read_run_config(
            TrainingArguments(deepspeed_config=deepspeed_config(found.training, each)), world_size=each.ranks
        )
    assert any("all sizes together" in text for text in found.left_out) == (len(wanted) > 1)


@pytest.mark.parametrize(
    ("config", "world"),
    [
        ({"expert_parallel": {"enabled": True, "autoep_size": 4}}, 4),
        ({"expert_parallel": {"enabled": True, "autoep_size": 4}, "tensor_parallel": {"autotp_size": 2}}, 4),
        ({"context_parallel": {"size": 4}}, 4),
        ({"context_parallel": {"size": 4}, "train_batch_size": 8, "gradient_accumulation_steps": 2}, 16),
        ({"sequence_parallel_size": 3, "pipeline": {"stages": 2}}, 6),
        ({}, 2),
    ],
)
def test_guessed_ranks_fit_the_layout(config: dict[str, Any], world: int) -> None:
    arguments = TrainingArguments(deepspeed_config={"train_micro_batch_size_per_gpu": 1, **config})
    assert run_config("tiny-mixtral", arguments, None).values.world_size == world


def test_label_smoothing_and_a_length_that_ranks_share_unequally_are_tried() -> None:
    found = reduced({"train_micro_batch_size_per_gpu": 1, "context_parallel": {"size": 4}}, 4)
    tried = compositions("MODEL", found, read_source("tiny-llama"))
    assert [each.training.smoothing for each in tried] == [0.0, 0.1]
    assert [each.training.length % 4 for each in tried] == [0, 3]


@pytest.mark.parametrize("router", [0.0, 0.05])
def test_a_model_whose_config_asks_for_a_router_loss_has_one_only_where_it_is_tried(
    router: float, tmp_path: Path
) -> None:
    """Its own coefficient would be added to the loss of the ranks, and not to that of one process."""
    line = Composition(model="mixtral", training=Training(config={"output_router_logits": True}, router=router))
    assert read_source(str(make_subject(line, tmp_path).base)).config.output_router_logits == bool(router)


def test_offload_and_16_bits_are_kept() -> None:
    offload = {
        "offload_optimizer": {"device": "nvme", "nvme_path": "/x", "pin_memory": True},
        "offload_param": {"device": "cpu"},
        "zero_quantized_weights": True,
    }
    config = {"train_batch_size": 8, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3, **offload}}
    found = reduced(config, 2)
    assert (found.execution.offload, found.execution.zero, found.training.precision) == ("all", 3, "bf16")
    assert found.execution.rest == {
        "zero_optimization": {"offload_optimizer": {"pin_memory": True}, "offload_param": {}}
    }
    said = " ".join(found.left_out)
    assert "nvme" in said and "zero_quantized_weights" in said


def test_a_composition_that_runs_refuse_is_said_in_the_certificate(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 8, "pipeline": {"stages": 2}, "zero_optimization": {"stage": 3}}')
    found = certify("tiny-llama", TrainingArguments(deepspeed_config=str(path)), lambda _: None)
    assert found["verdict"] == certificate.REFUSED and "DS601" in found["reason"]
    assert found["subject"].keys() == {"config", "layout", "model", "code"}
    assert table(found).endswith("verdict: refused")


def test_where_the_certificate_goes_is_tried_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    command = ["--model_name_or_path", "no such model", "--deepspeed_config", "no such file"]
    with pytest.raises(UserError, match=r"--output .*/file/c.json: cannot be written: (Not a directory|File exists)"):
        verify([*command, "--output", str(tmp_path / "file" / "c.json")])


def test_a_certificate_is_found_by_all_that_it_holds_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    subject = certificate.subject({"a": 1, "b": 2}, {"pp_size": 2}, {"hidden_size": 8})
    assert certificate.store({"subject": subject, "versions": {"torch": "1"}, "verdict": "equal"}) is not None
    same = certificate.subject({"b": 2, "a": 1}, {"pp_size": 2}, {"hidden_size": 8})
    found = certificate.find(same, {"torch": "1"})
    assert found is not None and found["verdict"] == "equal"
    assert certificate.find(same, {"torch": "2"}) is None
    for other in (({"a": 2}, {"pp_size": 2}), ({"a": 1, "b": 2}, {"pp_size": 4})):
        assert certificate.find(certificate.subject(*other, {"hidden_size": 8}), {"torch": "1"}) is None


def test_the_executions_of_one_composition_have_one_number_of_ranks() -> None:
    assert Composition.parse("llama : pp=2 | tp=2").ranks == 2
    assert Composition.parse("llama : pp=2 tp=2 | dp=4 zero=3").ranks == 4


def test_a_verdict_on_all_is_that_of_the_worst() -> None:
    line = Composition.parse("MODEL precision=bf16 : pp=2 | tp=2")

    def verdict(kind: str, reason: str = "") -> TrialResult:
        return TrialResult(composition=line, kind=kind, reason=reason)

    assert conclude([verdict("right")]) == {"verdict": certificate.EQUAL}
    refused = conclude([verdict("right"), verdict("refused", "DS1")])
    assert refused == {"verdict": certificate.REFUSED, "reason": "DS1"}
    wrong = conclude([verdict("refused", "DS1"), verdict("wrong", "loss 1e-2")])
    assert wrong == {"verdict": certificate.DIFFERS, "reason": "bf16, saved and resumed: loss 1e-2"}
    assert conclude([verdict("untried", "no model")])["verdict"] == certificate.UNVERIFIED
