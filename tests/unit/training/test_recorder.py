"""What a run leaves to be read: run.json, metrics, evaluations and samples, in one process."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from harness import Trainer, TrainingArguments, UserError
from harness.arguments.themes.lora import LoraArguments
from harness.arguments.themes.preferences import PreferenceArguments
from harness.arguments.themes.script import ScriptArguments
from harness.command_line import parse
from harness.data.tokenizer import ByteTokenizer
from harness.extras.progress import _figures
from harness.resilience.process import signals
from harness.training.evaluate import computed_metrics
from harness.training.recording.recorder import MetricsFile, Recorder, _shown
from tests.unit.training.full_disk import full_disk

POINTS = [(torch.tensor([i / 8, 1.0]), torch.tensor([i / 4])) for i in range(16)]
TOKENS = [{"input_ids": [(5 * i + k) % 250 for k in range(8)]} for i in range(8)]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Trainer]]:
    made: list[Trainer] = []

    def trainer(model: Any = None, **more: Any) -> Trainer:
        train = POINTS if model is None else TOKENS
        data = more.pop("eval_dataset", train[:2])
        config = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2, "steps_per_print": 10**9}
        settings = {"max_steps": 4, "eval_steps": 2, "logging_steps": 2, "save_steps": 0, **more}
        arguments = TrainingArguments(str(tmp_path / "run"), deepspeed_config=config, **settings)
        loss = nn.functional.mse_loss if model is None else None
        tokenizer = None if model is None else ByteTokenizer()
        made.append(
            Trainer(model or [nn.Linear(2, 1)], arguments, train, data, loss_fn=loss, processing_class=tokenizer)
        )
        return made[-1]

    yield trainer
    for each in made:
        each.close()


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_leaves_a_line_for_each_step_and_evaluation_and_says_what_it_was(
    make: Callable[..., Trainer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.txt").write_text("one\ntwo\n")
    ours = make("tiny-llama", sample_prompts=str(tmp_path / "prompts.txt"), sample_tokens=1, report_to="csv")
    ours.train()
    state = ours.state
    folder = tmp_path / "run"
    metrics, evaluations = rows(folder / "metrics.jsonl"), rows(folder / "evaluations.jsonl")
    assert [row["step"] for row in metrics] == [1, 2, 3, 4]
    assert [row["consumed_samples"] for row in metrics] == [4, 8, 12, 16]
    assert [(row["step"], row["eval_samples"]) for row in evaluations] == [(2, 2), (4, 2)]
    assert all({"eval_loss", "perplexity", "eval_seconds"} <= row.keys() for row in evaluations)
    # logs and evaluations stand in the history in the order in which they were
    assert [(row["step"], "eval_loss" in row) for row in state.log_history] == [
        *((2, False), (2, True), (4, False), (4, True), (4, False))  # the last: of the whole training
    ]
    assert state.log_history[0]["loss"] == pytest.approx((metrics[0]["loss"] + metrics[1]["loss"]) / 2)
    samples = rows(folder / "samples.jsonl")
    assert [(row["step"], row["prompt"]) for row in samples] == [(2, "one"), (2, "two"), (4, "one"), (4, "two")]
    assert capsys.readouterr().out.count("sample 1: 'one' -> ") == 2
    tables = {path.name for path in (folder / "csv").rglob("*.csv")}
    assert {"train_loss.csv", "eval_loss.csv"} <= tables and not {"eval_seconds.csv", "eval_runtime.csv"} & tables

    run = json.loads((folder / "run.json").read_text())
    assert (run["run_id"], run["output_dir"]) == (ours.run.run_id, str(folder))
    assert run["layout"] == {"pipeline": 1, "data": 1, "tensor": 1, "world_size": 1} | run["layout"]
    assert run["stage_boundaries"] == [0, len(ours.run.trainable.layers)] and run["adapters"] is None
    assert run["parameters"] == run["trained_parameters"] == ours.run.trainable.size() > 0
    assert run["model"]["model_type"] == "llama" and run["shared_memory"] == []
    assert run["tokenizer"]["class"] == "ByteTokenizer" and run["hosts"] and run["versions"]["torch"]
    assert run["wall_clock"]["first_step"] == metrics[0]["step_seconds"]
    # and it can be repeated
    kinds = (ScriptArguments, TrainingArguments, LoraArguments, PreferenceArguments)
    _, again, *_ = parse(kinds, ["--config", str(folder / "run.json")], prog="t", description="", epilog="")
    assert again == ours.args


def test_losses_of_sources_are_written_as_they_are_and_logged_as_means(
    make: Callable[..., Trainer], tmp_path: Path
) -> None:
    trainer = make(report_to="csv")
    plain = trainer.training_step()
    losses: list[dict[str, float]] = [{"chat": 2.0, "text": 3.0}, {"chat": 1.0}]
    with Recorder(trainer.run) as recorder:
        for number, each in enumerate(losses, start=1):
            record = replace(plain, step=number, source_losses=each)
            recorder.step(record)
        logs = recorder.log(record)
    assert [row.get("source_losses") for row in rows(tmp_path / "run" / "metrics.jsonl")] == losses
    assert (logs["chat_loss"], logs["text_loss"]) == (1.5, 3.0) and "source_losses" not in logs
    assert {"train_chat_loss.csv", "train_text_loss.csv"} <= {path.name for path in tmp_path.rglob("*.csv")}
    assert "(chat 1.0000)" in " ".join(_figures(record, "tokens")) and "source_losses" not in plain.as_dict()


def test_a_disk_that_is_full_at_the_start_is_one_line(make: Callable[..., Trainer], tmp_path: Path) -> None:
    ours = make()
    with full_disk(100), pytest.raises(UserError, match=r"run: cannot be written: File too large: make room, or give"):
        ours.train()
    ours.train()  # there is room now
    assert [row["step"] for row in rows(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3, 4]


def test_a_pipe_in_the_place_of_metrics_is_one_line(make: Callable[..., Trainer], tmp_path: Path) -> None:
    ours = make()
    os.mkfifo(tmp_path / "run" / "evaluations.jsonl")
    with pytest.raises(UserError, match=r"evaluations\.jsonl: it is not a file: move it elsewhere"):
        ours.train()


def test_a_disk_that_is_full_at_the_end_is_one_line(make: Callable[..., Trainer], tmp_path: Path) -> None:
    ours = make("tiny-llama")
    ours.train()
    with full_disk(100), pytest.raises(UserError, match="File too large"):
        ours.save_model()
    config = type(ours.run.trainable.causal.source.config)  # type: ignore[union-attr]
    with pytest.MonkeyPatch.context() as patched, pytest.raises(UserError, match="No space left on device"):
        patched.setattr(config, "save_pretrained", no_space)
        ours.save_model()
    ours.save_model()
    assert (tmp_path / "run" / "config.json").is_file()


def no_space(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_what_comes_after_a_step_is_dropped_when_a_run_goes_back(make: Callable[..., Trainer], tmp_path: Path) -> None:
    ours = make()
    with Recorder(ours.run) as recorder:
        for _ in range(4):
            record = ours.training_step()
            recorder.step(record)
            recorder.log(record)
            recorder.evaluation(ours.evaluate)
        recorder.rewind(2)
        ours.state.global_step = 2
        assert [row["step"] for row in ours.state.log_history] == [1, 1, 2, 2]
        recorder.step(ours.training_step())
    for name in ("metrics", "evaluations"):
        assert [row["step"] for row in rows(tmp_path / "run" / f"{name}.jsonl")][:2] == [1, 2]
    assert [row["step"] for row in rows(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3]


def test_an_evaluation_that_a_signal_interrupts_leaves_nothing(make: Callable[..., Trainer], tmp_path: Path) -> None:
    ours = make()

    def interrupted() -> dict[str, Any]:
        raise signals.Interrupted

    with Recorder(ours.run) as recorder:
        assert recorder.evaluation(interrupted) is None
    assert rows(tmp_path / "run" / "evaluations.jsonl") == ours.state.log_history == []


def test_figures_of_an_earlier_run_are_kept_under_another_name(
    make: Callable[..., Trainer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "evaluations.jsonl").write_text('{"step": 9}\n')
    (tmp_path / "run" / "metrics.jsonl").touch()  # nothing to keep
    ours = make(overwrite_output_dir=True)
    with Recorder(ours.run):
        pass
    said = capsys.readouterr().out
    assert (
        "evaluations.jsonl belongs to an earlier run: kept as evaluations.1.jsonl" in said and "metrics.1" not in said
    )
    assert rows(tmp_path / "run" / "evaluations.1.jsonl") == [{"step": 9}]


def test_other_ranks_write_nothing(make: Callable[..., Trainer], tmp_path: Path) -> None:
    ours = make()
    ours.state.is_world_process_zero = False
    before = sorted((tmp_path / "run").glob("*"))
    with Recorder(ours.run) as recorder:
        record = ours.training_step()
        recorder.step(record)
        assert recorder.log(record)["step"] == 1  # the history is on every rank
        recorder.rewind(0)
    assert ours.state.log_history == [] and sorted((tmp_path / "run").glob("*")) == before


@pytest.mark.parametrize(
    ("metrics", "shown"),
    [
        pytest.param({"eval_loss": 1.5, "perplexity": 4.5}, {"eval/loss": 1.5}, id="perplexity-is-the-loss-again"),
        pytest.param({"eval_a_loss": 1, "eval_b_loss": 2}, {"eval/a_loss": 1, "eval/b_loss": 2}, id="several-sets"),
        pytest.param({"eval_samples": 3, "eval_seconds": 0.1, "eval_n": 3}, {"eval/n": 3}, id="not-how-long"),
        pytest.param({"eval_words": "a", "eval_list": [1], "eval_none": None}, {}, id="numbers-alone"),
        pytest.param({}, {}, id="nothing"),
    ],
)
def test_monitors_show_the_numbers_of_an_evaluation(metrics: dict[str, Any], shown: dict[str, float]) -> None:
    assert _shown(metrics) == shown


def test_numbers_that_json_has_not_are_null_however_deep_they_lie(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "a.jsonl", first_step=1)
    bad = [float("nan"), float("inf"), 1.5, (float("-inf"),), {"a": float("nan"), "b": True}]
    file.write({"step": 1, "loss": float("nan"), "each": bad, "word": "nan"})
    file.close()
    text = (tmp_path / "a.jsonl").read_text()
    found = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert found == {"step": 1, "loss": None, "each": [None, None, 1.5, [None], {"a": None, "b": True}], "word": "nan"}


def test_metrics_by_numbers_are_named_by_them(make: Callable[..., Trainer]) -> None:
    make()  # opens the process group that the metrics are sent through
    metrics: Any = {0: np.float32(0.5), "eval_f1": 1}
    assert computed_metrics(lambda _: metrics, None, None, "eval") == {"eval_0": 0.5, "eval_f1": 1}


def test_a_run_that_cannot_make_samples_is_refused(make: Callable[..., Trainer], tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("a")
    with pytest.raises(UserError, match="--sample_prompts needs a HuggingFace model"):
        make(sample_prompts=str(tmp_path / "p.txt"))
    (tmp_path / "long.txt").write_text("a" * 600)
    with pytest.raises(UserError, match=r"long\.txt: prompt 1 has 600 tokens, and the model has 512 positions"):
        make("tiny-llama", sample_prompts=str(tmp_path / "long.txt"))


def test_no_file_of_a_run_holds_a_secret_of_its_config_or_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    secrets = ["comet-key-4711", "hf_abcdefghij", "hunter2-hunter2"]
    monkeypatch.setenv("HF_TOKEN", secrets[1])
    config = {
        "train_batch_size": 4,
        "comet": {"enabled": False, "api_key": secrets[0]},
        "of_another_program": {"password": secrets[2]},
        "dump_state": True,
        "log_level": "info",
    }
    args = TrainingArguments(
        str(tmp_path), deepspeed_config=config, max_steps=1, save_steps=1, run_name=f"with {secrets[1]}"
    )
    trainer = Trainer([nn.Linear(2, 1)], args, POINTS, loss_fn=nn.functional.mse_loss)
    trainer.train()
    trainer.close()
    said = "".join(capfd.readouterr())
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"run.json", "metrics.jsonl"} <= {path.name for path in files}
    found = [path for path in files for secret in secrets if secret.encode() in path.read_bytes()]
    assert not found and not [secret for secret in secrets if secret in said]
    assert trainer.args.deepspeed_config == config
