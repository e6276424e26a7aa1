"""`ds-harness plan` and `ds-harness estimate`: their JSON is a contract, and nonsense is one line."""

import json
import subprocess
import sys
from typing import Any

import pytest

from harness.checking import check
from harness.cli import main
from harness.config.text.document import load
from harness.planner import counted_shape
from harness.planner.hardware import FOLDER

ROW = {
    "layout": {"pipeline", "tensor", "data"},
    "zero_stage": None,
    "micro_batch": None,
    "gradient_accumulation_steps": None,
    "activation_checkpointing": None,
    "offload": None,
    "memory_gib": {"limit", "max", "stages"},
    "step_seconds": {"compute", "bubble", "tensor", "pipeline", "data", "optimizer", "total"},
    "bubble_fraction": None,
    "tokens_per_second": None,
    "tokens_per_second_per_gpu": None,
    "model_tflops_per_gpu": None,
    "mfu": None,
    "schedule": None,
    "expert_parallel_size": None,
    "chunks_per_stage": None,
    "sequence_parallel": None,
    "context_parallel_size": None,
    "activations_on_host": None,
    "tiling": {"loss", "feed_forward"},
}
STAGE = {"parameters", "gradients", "optimizer", "activations", "logits", "buffers", "total"}
PLAN = ["plan", "--model", "llama-1b", "--world_size", "8", "--hardware", "h100", "--block_size", "4096"]
ESTIMATE = ["estimate", "--deepspeed_config", "pipeline_3d", "--model", "llama-1b", "--hardware", "h100"]


def rows_of(capsys, *argv):
    assert main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def require_contract(rows):
    for row in rows:
        assert list(row) == list(ROW)
        assert all(set(row[key]) == keys for key, keys in ROW.items() if keys)
        assert all(set(stage) == STAGE for stage in row["memory_gib"]["stages"])
        assert len(row["memory_gib"]["stages"]) == row["layout"]["pipeline"]


def test_a_plan_is_a_list_of_layouts_best_first(capsys):
    rows = rows_of(capsys, *PLAN, "--global_batch_size", "64")
    require_contract(rows)
    speeds = [row["tokens_per_second"] for row in rows]
    assert speeds == sorted(speeds, reverse=True)
    assert {tuple(row["layout"].values()) for row in rows} >= {(1, 1, 8), (2, 2, 2), (8, 1, 1), (1, 8, 1)}
    assert {row["zero_stage"] for row in rows} == {1, 2, 3}
    for row in rows:
        assert row["memory_gib"]["max"] <= row["memory_gib"]["limit"]
        assert row["micro_batch"] * row["gradient_accumulation_steps"] * row["layout"]["data"] == 64


def test_an_estimate_is_what_the_config_runs(capsys):
    extra = ("--global_batch_size", "64", "--per_device_train_batch_size", "2", "--bf16", "--block_size", "2048")
    rows = rows_of(capsys, *ESTIMATE, "--world_size", "8", *extra)
    require_contract(rows)
    spelled_out = [word for given in extra for word in ([given, "true"] if given == "--bf16" else [given])]
    assert rows_of(capsys, *ESTIMATE, "--world_size", "8", *spelled_out) == rows
    assert rows[0]["layout"] == {"pipeline": 2, "tensor": 2, "data": 2}
    assert (rows[0]["zero_stage"], rows[0]["micro_batch"], rows[0]["gradient_accumulation_steps"]) == (1, 2, 16)
    assert rows[0]["activation_checkpointing"] is True


def test_float32_in_tf32_is_faster_in_both_verbs_and_nothing_else_is(capsys):
    estimate = [*ESTIMATE, "--world_size", "8", "--block_size", "1024"]
    for verb in (estimate, [*PLAN, "--precision", "fp32"]):
        exact, tf32 = (rows_of(capsys, *verb, *flag)[0]["tokens_per_second"] for flag in ((), ("--tf32",)))
        assert tf32 > 2 * exact
    halves = [rows_of(capsys, *PLAN, "--precision", "bf16", *flag) for flag in ((), ("--tf32",))]
    assert halves[0] == halves[1]


def test_a_plan_is_like_a_program_by_one_word(capsys, tmp_path):
    ours = rows_of(capsys, *PLAN, "--global_batch_size", "64")
    assert rows_of(capsys, *PLAN, "--global_batch_size", "64", "--like", "deepspeed") == ours
    theirs = rows_of(capsys, *PLAN, "--global_batch_size", "64", "--like", "megatron")
    assert {row["zero_stage"] for row in theirs} == {1} and theirs[0] not in ours
    narrow = rows_of(capsys, *PLAN, "--global_batch_size", "64", "--like", "megatron", "--precision", "fp8")
    assert narrow[0]["step_seconds"]["total"] < theirs[0]["step_seconds"]["total"]
    own = rows_of(capsys, *PLAN, "--global_batch_size", "64", "--precision", "fp8")
    assert own[0]["step_seconds"]["total"] < ours[0]["step_seconds"]["total"]
    with pytest.raises(SystemExit, match="2"):
        main([*PLAN, "--precision", "fp4"])
    assert "--precision fp4: this harness trains in fp32, bf16, fp16 and, with --fp8, fp8" in capsys.readouterr().err
    for name in ("--write", "--page"):
        with pytest.raises(SystemExit, match="2"):
            main([*PLAN, "--like", "torchtitan", name, str(tmp_path / "file")])
        assert capsys.readouterr().err.count("\n") == 1


def test_the_same_layout_has_the_same_numbers_in_both_verbs(capsys, tmp_path):
    file = tmp_path / "best.json"
    best = rows_of(capsys, *PLAN, "--global_batch_size", "64", "--write", str(file))[0]
    argv = ["estimate", "--deepspeed_config", str(file), *PLAN[1:]]
    assert rows_of(capsys, *argv)[0] == best


def test_a_plan_has_the_schedules_and_the_whole_experts_that_a_run_can_have(capsys, tmp_path):
    argv = ["plan", "--model", "tiny-mixtral", "--world_size", "4", "--hardware", "cpu", "--global_batch_size", "8"]
    rows = rows_of(capsys, *argv)
    assert {(row["expert_parallel_size"], row["layout"]["tensor"]) for row in rows} == {
        (1, 1),
        (1, 2),
        (1, 4),
        (2, 1),
        (4, 1),
        (2, 2),
        (4, 2),
        (4, 4),
    }
    assert {row["offload"] for row in rows} == {"none"}  # the device's memory is the host's
    assert {row["schedule"] for row in rows if row["layout"]["pipeline"] == 1} == {"1f1b"}
    orders = {(row["layout"]["pipeline"], row["schedule"], row["chunks_per_stage"]) for row in rows}
    # A schedule that is added may be tried as well.
    packaged = ("1f1b", "gpipe", "zero-bubble", "interleaved", "zero-bubble-v", "dualpipe-v")
    assert {each for each in orders if each[0] > 1 and each[1] in packaged} == {
        *((2, "1f1b", 1), (2, "zero-bubble", 1), (2, "interleaved", 2), (2, "zero-bubble-v", 2)),
        *((4, "1f1b", 1), (4, "zero-bubble", 1)),  # four layers make no eight chunks
    }
    both = [row["expert_parallel_size"] > 1 and row["schedule"] == "zero-bubble" for row in rows]
    file = tmp_path / "plan.json"
    assert main([*argv, "--row", str(both.index(True) + 1), "--write", str(file)]) == 0
    capsys.readouterr()
    assert [str(finding) for finding in check(load(str(file)), world_size=4, model="tiny-mixtral")] == []
    assert rows_of(capsys, "estimate", "--deepspeed_config", str(file), *argv[1:])[0] == rows[both.index(True)]


@pytest.mark.parametrize(
    ("schedule", "shares_sequence"), [("interleaved", False), ("zero-bubble-v", True), ("1f1b", True)]
)
def test_a_row_with_parts_or_a_shared_sequence_is_written_as_it_is_predicted(
    capsys, tmp_path, schedule, shares_sequence
):
    argv = ["plan", "--model", "tiny-llama", "--world_size", "8", "--hardware", "cpu", "--global_batch_size", "8"]
    rows = rows_of(capsys, *argv, "--block_size", "64")
    layout = {"pipeline": 2, "tensor": 2, "data": 2}
    wanted = {"schedule": schedule, "sequence_parallel": shares_sequence, "layout": layout}
    found = [all(row[key] == value for key, value in wanted.items()) for row in rows]
    file = tmp_path / "plan.json"
    number = found.index(True)
    assert main([*argv, "--block_size", "64", "--row", str(number + 1), "--write", str(file)]) == 0
    capsys.readouterr()
    again = rows_of(capsys, "estimate", "--deepspeed_config", str(file), *argv[1:], "--block_size", "64")
    assert again[0] == rows[number]


@pytest.mark.parametrize("row", [1, 40, 90])
def test_what_is_written_passes_check(capsys, tmp_path, row):
    file = tmp_path / "plan.json"
    argv = [*PLAN[:4], "4", *PLAN[5:], "--global_batch_size", "64"]
    assert main([*argv, "--row", str(row), "--write", str(file)]) == 0
    assert f"{row if row <= 10 else 10}" in capsys.readouterr().out
    assert [str(finding) for finding in check(load(str(file)), world_size=4, model="llama-1b")] == []


def test_the_table_says_why_layouts_fall_out_and_what_more_would_bring(capsys):
    assert main([*PLAN, "--top", "3"]) == 0
    out = capsys.readouterr().out
    assert "needs more memory than a device has" in out
    assert "more device" in out
    assert "tokens/s" in out


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([*PLAN[:-3], "h101"], "--hardware h101: unknown"),
        (["plan", "--model", "nothing-here", *PLAN[3:]], "no readable config.json"),
        ([*PLAN[:4], "97", *PLAN[5:], "--global_batch_size", "1"], "no layout of 97 ranks can run"),
        (
            [*PLAN[:6], "rtx-4090", "--model", "llama-1b", "--block_size", "10000000"],
            "GiB on each device, which has 22.0",
        ),
        ([*PLAN, "--row", "99999"], "--row 99999: there are"),
        ([*ESTIMATE, "--world_size", "6"], "6 ranks cannot be divided"),
    ],
)
def test_nonsense_is_one_line(capsys, argv, said):
    assert main(argv) == 1
    err = capsys.readouterr().err
    assert said in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("count", ["0", "-8", "many"])
def test_no_ranks_are_unusable_arguments(capsys, count):
    with pytest.raises(SystemExit) as stopped:
        main([*PLAN[:4], count, *PLAN[5:]])
    assert stopped.value.code == 2
    assert "--world_size" in capsys.readouterr().err


def test_a_device_of_ones_own_is_a_file(capsys, tmp_path):
    content = json.loads((FOLDER / "h100.json").read_text())
    content["memory_gib"]["value"] = 40
    file = tmp_path / "half.json"
    file.write_text(json.dumps(content))
    row = rows_of(capsys, *PLAN[:6], str(file), *PLAN[7:])[0]
    assert row["memory_gib"]["limit"] < 40
    del content["network"]
    file.write_text(json.dumps(content))
    assert main([*PLAN[:6], str(file), *PLAN[7:]]) == 1
    assert "network.gb_per_second is null" in capsys.readouterr().err


def test_planning_imports_no_torch():
    code = "import sys, harness.planner.cli.verbs; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.thorough
def test_a_model_that_the_planner_does_not_know_is_counted_or_said_to_be_a_guess(capsys, tmp_path, monkeypatch):
    """A doge names 16,384 experts that only some of its models have: read as they stand they are 3,000 GiB."""
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 512}
    file, doge = tmp_path / "config.json", {"model_type": "doge", "num_experts": 16384, **sizes}
    file.write_text(json.dumps(doge))  # its width is the default of its family
    argv = ["plan", "--model", str(tmp_path), "--world_size", "1", "--hardware", "h100", "--global_batch_size", "1"]
    assert main([*argv, "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)[0]["memory_gib"]["max"] < 4
    assert said.err == ""
    file.write_text(json.dumps({**doge, "hidden_size": 128}))
    monkeypatch.setattr(counted_shape, "LIMIT_S", 0.01)
    main(argv)
    assert "parameters are a guess: the planner does not know how this doge is made" in capsys.readouterr().err


def test_preferences_are_two_sequences_a_sample_and_perhaps_a_pass_before(capsys):
    config = [*ESTIMATE, "--world_size", "8", "--per_device_train_batch_size"]
    (pairs,), (twice,) = (rows_of(capsys, *config, *more) for more in (("2", "--preference", "dpo"), ("4",)))
    assert pairs["micro_batch"] == 2 and twice["micro_batch"] == 4
    same = ("memory_gib", "step_seconds", "tokens_per_second")
    assert [pairs[key] for key in same] == [twice[key] for key in same]
    assert 0 < pairs["reference_seconds_per_1000_samples"] < 1000 * pairs["step_seconds"]["total"] / 16
    assert "reference_seconds_per_1000_samples" not in twice
    assert main([*config, "2", "--preference", "kto"]) == 0
    assert "before training: --preference kto needs a pass without gradients, about" in capsys.readouterr().out
    assert main([*config, "2", "--preference", "orpo"]) == 0
    assert "before training" not in capsys.readouterr().out
    plans = [rows_of(capsys, *PLAN, "--global_batch_size", "64", *more) for more in ((), ("--preference", "dpo"))]
    assert plans[1][0]["step_seconds"]["total"] > 1.8 * plans[0][0]["step_seconds"]["total"]


def test_lora_is_planned_without_gradients_of_the_frozen_model(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "llama-1b", "--world_size", "2", "--hardware", "h100", "--block_size", "2048", "--json"]
    words += ["--deepspeed_config", "zero2", "--bf16", "--per_device_train_batch_size", "4"]

    def row(*more: str) -> dict[str, Any]:
        assert main(["estimate", *words, *more]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)[0]
        return found

    whole, lora = row(), row("--use_peft", "--lora_r", "8", "--lora_target_modules", "q_proj", "v_proj")
    in_4_bits = row("--use_peft", "--lora_target_modules", "all-linear", "--load_in_4bit")
    stages = [each["memory_gib"]["stages"][0] for each in (whole, lora, in_4_bits)]
    assert stages[1]["gradients"] + stages[1]["optimizer"] < 0.01 * stages[0]["optimizer"]
    assert stages[1]["total"] < stages[2]["total"] + stages[1]["parameters"] < stages[0]["total"]
    assert stages[2]["parameters"] < 0.5 * stages[1]["parameters"]
    assert lora["step_seconds"]["compute"] < 0.8 * whole["step_seconds"]["compute"]
    assert lora["step_seconds"]["data"] < 0.05 * whole["step_seconds"]["data"] and 0 < lora["mfu"] < 0.7


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--load_in_4bit"], "--load_in_4bit: weights in 4 bits cannot be trained"),
        (["--lora_r", "4"], "--lora_r and --lora_target_modules have no effect without --use_peft"),
        (
            ["--use_peft", "--lora_target_modules", "mystery"],
            "--lora_target_modules mystery: the planner does not know",
        ),
    ],
)
def test_flags_of_lora_that_cannot_be_planned_are_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["--model", "llama-1b", "--world_size", "2", "--hardware", "h100"]
    assert main(["plan", *common, *words]) == 1
    assert said in capsys.readouterr().err


def test_a_config_is_predicted_in_fp8(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*ESTIMATE, "--world_size", "8", "--block_size", "2048", "--bf16"]
    wide, narrow = (rows_of(capsys, *words, *more)[0] for more in ((), ("--fp8", "rowwise")))
    assert narrow["step_seconds"]["compute"] < 0.95 * wide["step_seconds"]["compute"]
    assert narrow["memory_gib"]["max"] != wide["memory_gib"]["max"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            [*ESTIMATE, "--fp8", "rowwise"],
            "DS410 --fp8 rowwise needs bf16, but this run computes in fp32; set bf16.enabled to true",
        ),
        (
            [*ESTIMATE, "--bf16", "--fp8", "emulate"],
            "--fp8 emulate is for trials, and its speed is not predicted: give",
        ),
        (
            [*PLAN, "--precision", "fp8", "--use_peft", "--load_in_4bit"],
            "--precision fp8 and --load_in_4bit exclude each other: remove one of them",
        ),
        (
            [*PLAN, "--precision", "fp8", "--hardware", "mi300x"],
            "--precision fp8 needs an NVIDIA GPU of compute capability 8.9 or more, which AMD Instinct MI300X 192GB",
        ),
        (
            [*ESTIMATE, "--bf16", "--fp8", "rowwise", "--hardware", "a100-80gb"],
            "--fp8 rowwise needs an NVIDIA GPU of compute capability 8.9 or more, which NVIDIA A100 SXM 80GB is not",
        ),
    ],
)
def test_fp8_is_predicted_only_where_a_run_has_it(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--world_size", "8"]) == 1
    assert said in capsys.readouterr().err
