"""The dry run as a user meets it: one rank of many, and what a run would refuse in the run's words."""

from __future__ import annotations

import json
import math
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from torch.nn import functional

from harness.cli import main
from harness.config.values.batch import bubble
from harness.preferences.losses import PairLoss
from tests.support.preferences import PAIRS

ROOT = Path(__file__).resolve().parents[2]
PRESETS, HARDWARE = ROOT / "models/presets", ROOT / "harness/planner/hardware"


def dry_run(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["dry-run", *words])
    captured = capfd.readouterr()
    return code, captured.out, captured.err


def of_all_stages(capfd: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    code, out, _ = dry_run(capfd, "--rank", "all", "--json", "--block_size", "16", *words)
    assert code == 0
    return [json.loads(line) for line in out.splitlines()]


@pytest.fixture
def model(tmp_path: Path) -> str:
    return of_layers(2, "tiny-llama", tmp_path)


def of_layers(layers: int, preset: str, tmp_path: Path) -> str:
    """A preset with so many layers."""
    sizes = json.loads((PRESETS / preset / "config.json").read_text())
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps({**sizes, "num_hidden_layers": layers}))
    return str(tmp_path / "model")


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    sections = {"pipeline": {"stages": 2}, "tensor_parallel": {"autotp_size": 2}, "zero_optimization": {"stage": 1}}
    batch = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}
    path.write_text(json.dumps({**batch, **sections, "bf16": {"enabled": True}}))
    return str(path)


def test_every_stage_of_a_thousand_ranks_is_counted(capfd: pytest.CaptureFixture[str], config: str, model: str) -> None:
    words = ("--deepspeed_config", config, "--model_name_or_path", model)
    first, last = of_all_stages(capfd, "--world_size", "1024", *words)
    assert [report["rank"] for report in (first, last)] == [0, 512]
    assert first["layers"]["last"] + 1 == last["layers"]["first"]
    for report, in_flight in ((first, 2), (last, 1)):
        elements, memory = report["parameters"], report["memory_bytes"]
        assert memory["parameters"] == {"bfloat16": 2 * elements}
        # the copy in float32 and AdamW's two states, divided over 256 replicas, each part padded
        assert math.isclose(sum(memory["optimizer"].values()), 12 * elements / 256, rel_tol=0.1)
        assert memory["in_flight"] == in_flight
        assert memory["peak"] > memory["parameters"]["bfloat16"] + memory["activations"]
    sent = {(m["group"], m["operation"]): m for m in first["messages"]}
    received = {(m["group"], m["operation"]): m for m in last["messages"]}
    assert sent["pipeline", "send"]["bytes"] == received["pipeline", "recv"]["bytes"]
    assert sent["data", "all_reduce"]["ranks"] == 256


def test_a_timeline_shows_each_pass_and_its_compute_thread_adds_up_to_the_step(
    capfd: pytest.CaptureFixture[str], config: str, model: str, tmp_path: Path
) -> None:
    path = tmp_path / "timeline.json"
    words = ("--deepspeed_config", config, "--model", model, "--timeline", str(path), "--hardware", "a100-80gb")
    reports = of_all_stages(capfd, "--world_size", "8", *words)
    events = json.loads(path.read_text())["traceEvents"]
    threads = {(e["pid"], e["args"]["name"]): e["tid"] for e in events if e["name"] == "thread_name"}
    complete = [event for event in events if event["ph"] == "X"]
    for rank, report in zip((0, 4), reports, strict=True):
        own = [event for event in complete if event["pid"] == rank]
        assert {event["cat"] for event in own} == {"forward", "backward", "optimizer", "communication", "wait"}
        computed = [event for event in own if event["tid"] == threads[rank, "compute"]]
        end = max(event["ts"] + event["dur"] for event in own)
        assert math.isclose(sum(event["dur"] for event in computed), end, rel_tol=1e-3)
        causes = report["step_seconds"]
        assert math.isclose(1e6 * sum(causes.values()), end, rel_tol=1e-3)
        assert {"forward", "backward", "optimizer", "wait for recv (pipeline)"} <= set(causes)
        for before, after in pairwise(computed):
            assert math.isclose(before["ts"] + before["dur"], after["ts"], abs_tol=0.01)
        passes = Counter(event["name"] for event in own if event["tid"] == threads[rank, "passes"])
        for micro_batch in range(3):
            assert passes[f"forward {micro_batch}"] and passes[f"backward {micro_batch}"]
        messages = {event["name"] for event in own if event["tid"] == threads[rank, "pipeline"]}
        assert {"send", "recv"} <= messages
        assert (rank, "tensor") in threads and (rank, "data") in threads
    assert "wait for recv (pipeline)" in {event["name"] for event in complete}


INTERLEAVED = {"pipeline": {"stages": 2, "schedule": "interleaved"}}
LAYOUTS: dict[str, tuple[int, str, int, dict[str, Any], tuple[str, ...], set[str]]] = {
    "experts in interleaved chunks": (
        4,
        "tiny-mixtral",
        4,
        {**INTERLEAVED, "zero_optimization": {"stage": 1}},
        ("--expert_parallel_size", "2", "--rank", "0"),
        {"all_to_all (data)", "reduce_scatter (data)", "send (pipeline)", "recv (pipeline)"},
    ),
    "adapters on experts under ZeRO-3": (
        2,
        "tiny-mixtral",
        2,
        {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}},
        ("--use_peft", "--lora_r", "2", "--lora_target_modules", "q_proj"),
        {"all_gather (data)", "reduce_scatter (data)"},
    ),
    "fp8 on context ranks": (
        2,
        "tiny-llama",
        4,
        {"zero_optimization": {"stage": 2}},
        ("--context_parallel_size", "2", "--fp8", "emulate"),
        {"all_to_all (context)", "all_gather (data)"},
    ),
}
"""Layers, model, ranks, config, flags, and messages that a timeline must have."""


@pytest.mark.thorough
@pytest.mark.parametrize("name", LAYOUTS)
def test_in_each_layout_streams_do_one_thing_at_a_time_and_send_what_is_reported(
    name: str, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    layers, preset, ranks, sections, flags, expected = LAYOUTS[name]
    config, path = tmp_path / "config.json", tmp_path / "timeline.json"
    batch = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 3, "bf16": {"enabled": True}}
    config.write_text(json.dumps({**batch, **sections}))
    words = ("--model", of_layers(layers, preset, tmp_path), "--deepspeed_config", str(config), *flags)
    reports = of_all_stages(capfd, "--world_size", str(ranks), "--timeline", str(path), *words)
    events = json.loads(path.read_text())["traceEvents"]
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    for report in reports:
        sent: Counter[str] = Counter()
        by_thread: dict[str, list[tuple[int, int]]] = {}
        for event in events:
            if event["ph"] == "X" and event["pid"] == report["rank"]:
                thread = threads[event["pid"], event["tid"]]
                start = round(1e3 * event["ts"])  # nanoseconds
                by_thread.setdefault(thread, []).append((start, start + round(1e3 * event["dur"])))
                if thread not in ("compute", "passes"):
                    sent[f"{event['name']} ({'data' if thread == 'weights' else thread})"] += 1
        for thread, times in by_thread.items():
            assert all(0 <= start <= end for start, end in times), thread
            assert all(end <= after for (_, end), (after, _) in pairwise(sorted(times))), thread
        assert expected <= set(sent)
        assert sent == {f"{m['operation']} ({m['group']})": m["count"] for m in report["messages"]}
        assert sum(report["step_seconds"].values()) == pytest.approx(by_thread["compute"][-1][1] / 1e9, rel=1e-3)


@pytest.mark.thorough
def test_stages_with_several_chunks_wait_as_the_formula_says(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    device: dict[str, Any] = json.loads((HARDWARE / "h100.json").read_text())
    for link in (device["node"], device["network"]):
        link["gb_per_second"]["value"], link["hop_seconds"]["value"] = 1e9, 1e-12
    device["host"]["dispatch_seconds"]["value"] = 1e-12
    config, path = tmp_path / "config.json", tmp_path / "device.json"
    path.write_text(json.dumps(device))
    batch = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4}
    config.write_text(json.dumps({**batch, **INTERLEAVED}))
    words = ("--hardware", str(path), "--timeline", str(tmp_path / "timeline.json"), "--model", "tiny-llama")
    (first,) = of_all_stages(capfd, "--world_size", "2", "--deepspeed_config", str(config), "--rank", "0", *words)
    seconds = first["step_seconds"]
    computed = seconds["forward"] + seconds["backward"]
    waited = seconds["wait for recv (pipeline)"]  # the first stage computes last
    assert waited / (computed + waited) == pytest.approx(bubble(2, 4, "interleaved"), abs=0.01)


def test_a_timeline_that_cannot_be_written_or_has_no_device_is_one_line(
    capfd: pytest.CaptureFixture[str], config: str, model: str, tmp_path: Path
) -> None:
    words = ("--rank", "0", "--world_size", "4", "--deepspeed_config", config, "--model", model, "--block_size", "16")
    code, _, said = dry_run(capfd, *words, "--timeline", str(tmp_path / "missing" / "t.json"))
    assert code == 1 and said.count("\n") == 1 and "missing" in said
    code, _, said = dry_run(capfd, *words, "--timeline", "t.json", "--hardware", "h1000")
    assert code == 1 and said.count("\n") == 1 and "use one of" in said
    with pytest.raises(SystemExit, match="2"):
        main(["dry-run", *words, "--hardware", "h100"])
    assert "give both" in capfd.readouterr().err


@pytest.mark.thorough
def test_a_stage_with_several_chunks_is_counted_chunk_by_chunk(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path, pipeline = tmp_path / "config.json", {"stages": 2, "schedule": "zero-bubble-v"}
    batch = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}
    path.write_text(json.dumps({**batch, "pipeline": pipeline, "zero_optimization": {"stage": 1}}))
    words = ("--world_size", "2", "--deepspeed_config", str(path), "--model", "tiny-llama")
    first, last = of_all_stages(capfd, *words)
    assert [[chunk["chunk"] for chunk in each["layers"]["chunks"]] for each in (first, last)] == [[0, 3], [1, 2]]
    assert first["layers"]["kinds"] == {"Prologue": 1, "LlamaDecoderLayer": 2, "Epilogue": 1}
    for report in (first, last):
        sizes = {m["operation"]: (m["count"], m["bytes"]) for m in report["messages"] if m["group"] == "pipeline"}
        state = 2 * 16 * 128 * 4  # bytes of a hidden state
        # there and back for three micro-batches, and their gradients; the middle chunks are on one stage
        assert sizes["send"] == sizes["recv"] == (6, 6 * state)
        assert 1 < report["memory_bytes"]["in_flight"] <= 2
    code, out, _ = dry_run(capfd, "--rank", "0", "--block_size", "16", *words)
    assert code == 0 and "layers 0-1 and 4-5 (Prologue, 2 x LlamaDecoderLayer, Epilogue)" in out


@pytest.mark.thorough
def test_with_sequence_parallelism_a_layer_gathers_and_scatters_where_it_summed(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, model: str
) -> None:
    def messages(shared: bool) -> dict[str, dict[str, Any]]:
        path = tmp_path / "config.json"
        tensor = {"autotp_size": 2, "sequence_parallel": shared}
        path.write_text(json.dumps({"train_micro_batch_size_per_gpu": 2, "tensor_parallel": tensor}))
        words = ("--world_size", "2", "--deepspeed_config", str(path), "--model_name_or_path", model)
        (report,) = of_all_stages(capfd, *words)
        return {message["operation"]: message for message in report["messages"]}

    whole, shared = messages(False), messages(True)
    layers, width = 2, 128
    state = 2 * 16 * width * 4  # bytes of a hidden state of two samples in float32
    assert "all_gather" not in whole and "reduce_scatter" not in whole
    # two blocks a layer, forward and backward; behind the embedding and before the head the shares are joined as well
    assert (shared["all_gather"]["count"], shared["all_gather"]["bytes"]) == (layers * 4 + 2, (layers * 4 + 2) * state)
    assert shared["reduce_scatter"]["count"] == layers * 4
    assert shared["reduce_scatter"]["bytes"] == layers * 4 * state
    # the gradients of the norms between the blocks are summed besides, once a step
    assert whole["all_reduce"]["count"] - shared["all_reduce"]["count"] == layers * 4 - 1
    assert whole["all_reduce"]["bytes"] - shared["all_reduce"]["bytes"] == layers * 4 * state - layers * 2 * width * 4


def test_what_a_run_would_refuse_is_refused_in_its_words(capfd: pytest.CaptureFixture[str], config: str) -> None:
    code, out, error = dry_run(capfd, "--rank", "0", "--world_size", "6", "--deepspeed_config", config)
    assert (code, out) == (1, "")
    assert "DS311 6 ranks cannot be divided into copies of 2 pipeline stages x 2 tensor-parallel ranks" in error
    code, _, error = dry_run(capfd, "--rank", "0", "--world_size", "2", "--block_size", "999999")
    assert code == 1 and "--block_size 999999: the model has" in error
    code, _, error = dry_run(capfd, "--rank", "0", "--world_size", "2", "--train_file", "nowhere.txt")
    assert code == 1 and "nowhere.txt" in error


def test_the_loss_of_preferences_is_built(capfd: pytest.CaptureFixture[str], model: str, tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text("\n".join(map(json.dumps, PAIRS)))
    words = ("--model", model, "--train_file", str(file), "--per_device_train_batch_size", "2", "--preference", "dpo")
    with patch.object(PairLoss, "__call__", autospec=True, side_effect=PairLoss.__call__) as called:
        (report,) = of_all_stages(capfd, "--world_size", "1", *words)
    outputs, targets = called.call_args.args[1:]
    assert outputs.shape[:2] == (4, 16) and targets[4].shape == (2, 2, 16)
    assert report["memory_bytes"]["peak"] > 0


@pytest.mark.parametrize("words", [("--rank", "8", "--world_size", "8"), ("--rank", "0"), ("--world_size", "2")])
def test_a_rank_that_cannot_be_is_an_unusable_argument(words: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["dry-run", *words])
    assert ended.value.code == 2


@pytest.mark.thorough
def test_zero3_divides_every_tensor_and_leaves_torch_as_it_was(capfd: pytest.CaptureFixture[str], model: str) -> None:
    before, words = functional.linear, ("--world_size", "4", "--model_name_or_path", model, "--bf16")
    (report,) = of_all_stages(capfd, *words, "--deepspeed_config", "zero3")
    assert functional.linear is before
    (whole,) = of_all_stages(capfd, *words, "--deepspeed_config", "zero2")
    # each tensor is padded to four equal parts
    assert math.isclose(report["parameters"], whole["parameters"] / 4, rel_tol=1e-3)
    sums = [sum(each["memory_bytes"]["optimizer"].values()) for each in (report, whole)]
    assert math.isclose(*sums, rel_tol=0.01)
