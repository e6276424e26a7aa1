"""The training script as a user starts it, and what it leaves behind."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from harness.data.tokenizer import ByteTokenizer
from harness.topology.env import changed_environment
from harness.train import main
from tests.e2e.launching import ROOT, SCRIPT, environment, launch
from tests.support.ranks import script_on_ranks
from tests.support.training import logged

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "fox.txt"
    path.write_text("The quick brown fox jumps over the lazy dog; 0123456789. " * 60)
    return path


@pytest.fixture(scope="module")
def finished(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A run of two stages with evaluation, checkpoints and monitors."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    data = ("--train_file", text, "--validation_file", text, "--eval_steps", 2)
    command = ["ds-harness", "train", "--num_accelerators", 2, *FLAGS, *data, "--output_dir", folder]
    done = subprocess.run(list(map(str, command)), env=environment(), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done


FLAGS = (
    *("--deepspeed_config", "pipeline_checkpointing", "--block_size", 64, "--max_steps", 6, "--save_steps", 3),
    *("--per_device_train_batch_size", 2, "--global_batch_size", 16),
    *("--learning_rate", 1e-3, "--report_to", "csv,tensorboard"),
)


def test_the_user_sees_stages_loss_evaluation_and_where_the_results_lie(finished: Any) -> None:
    folder, done = finished
    for words in ("stage 0 on rank 0", "stage 1 on rank 1", "parameters a rank", "loss", "tokens/s", " left"):
        assert words in done.stdout, words
    assert "evaluation loss" in done.stdout
    assert f"the model is in {folder}" in done.stdout
    assert done.stdout.startswith("preparing tiny-llama and ")
    assert "SEED_LAYERS" not in done.stdout  # DeepSpeed's chatter is in the log
    assert "SEED_LAYERS" in (folder / "logs" / "rank_0.log").read_text()
    assert (folder / "logs" / "rank_1.log").is_file()
    assert done.stderr.strip() == ""


def test_metrics_have_one_object_a_step(finished: Any) -> None:
    rows = logged(finished[0])
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    wanted = {"step", "loss", "grad_norm", "learning_rate", "tokens_per_second", "step_seconds", "consumed_samples"}
    on_device = {"device_memory_gib"} & set(rows[0])  # none on a CPU
    assert all(set(row) == wanted | {"epoch", "host_memory_gib"} | on_device for row in rows)
    assert rows[-1]["host_memory_gib"] >= rows[0]["host_memory_gib"] > 0
    assert rows[0]["learning_rate"] == 1e-3  # linear from the first step on, no warm-up
    assert rows[-1]["learning_rate"] == pytest.approx(1e-3 / 6)
    assert rows[-1]["consumed_samples"] == 6 * 2 * 8
    assert rows[-1]["loss"] < rows[0]["loss"]


def test_run_json_says_what_was_run(finished: Any) -> None:
    run = json.loads((finished[0] / "run.json").read_text())
    assert run["layout"] == {"pipeline": 2, "data": 1, "context": 1, "tensor": 1, "expert": 1, "world_size": 2}
    assert run["stage_boundaries"][0] == 0 and len(run["stage_boundaries"]) == 3
    assert run["config"]["gradient_accumulation_steps"] == 8
    assert "train.py" in run["command"] and len(run["hosts"]) == 2
    assert run["data"]["train_file"]["bytes"] > 0 and run["tokenizer"]["size"] == 258
    assert run["versions"]["deepspeed"].startswith("0.")
    assert run["model"]["hidden_size"] == 128
    assert any(filled["pointer"] == "/gradient_accumulation_steps" for filled in run["filled"])


def test_evaluations_and_monitors_are_written(finished: Any) -> None:
    folder = finished[0]
    rows = [json.loads(line) for line in (folder / "evaluations.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [2, 4, 6]
    assert rows[-1]["eval_loss"] < rows[0]["eval_loss"]
    assert {path.stem for path in folder.glob("csv/**/*.csv")} >= {"train_loss", "eval_loss"}
    assert not list(folder.glob("csv/**/Train_*"))  # DeepSpeed's own names for the same values
    assert list(folder.glob("tensorboard/**/events.*"))


def test_the_run_can_be_drawn(finished: Any) -> None:
    folder = finished[0]
    command = [sys.executable, str(ROOT / "scripts/draw_run.py"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and f"the picture is {folder / 'run.svg'}" in done.stdout, done.stderr
    shapes = [element.tag.split("}")[1] for element in ElementTree.parse(folder / "run.svg").iter()]
    assert shapes.count("circle") == 3  # evaluations
    words = (folder / "run.svg").read_text()
    assert "6 steps" in words and "stage 1 on rank 1: layers 3 to 5" in words


def test_the_exported_model_gives_the_losses_that_the_run_saw(finished: Any, text: Path) -> None:
    folder = finished[0]
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(text.read_text())["input_ids"] + [tokenizer.eos_token_id]
    blocks = torch.tensor(ids[: len(ids) // 64 * 64]).view(-1, 64)
    with torch.no_grad():
        logits = model(blocks).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), blocks[:, 1:].reshape(-1))
    seen = json.loads((folder / "evaluations.jsonl").read_text().splitlines()[-1])["eval_loss"]
    assert loss.item() == pytest.approx(seen, rel=1e-5)
    assert (folder / "generation_config.json").is_file()


def test_a_resumed_run_goes_on_with_the_same_numbers(finished: Any, text: Path, tmp_path: Path) -> None:
    folder, wanted = tmp_path / "run", logged(finished[0])
    folder.mkdir()
    shutil.copytree(finished[0] / "checkpoint-3", folder / "checkpoint-3")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in wanted[:4]))
    again = script_on_ranks(2, SCRIPT, *FLAGS, "--train_file", text, "--output_dir", folder)
    assert again.returncode != 0
    assert "already holds a run" in again.stderr and "--resume_from_checkpoint auto" in again.stderr
    more = ("--train_file", text, "--output_dir", folder, "--resume_from_checkpoint", "auto")
    done = script_on_ranks(2, SCRIPT, *FLAGS, *more)
    assert done.returncode == 0, done.stderr
    got = logged(folder)
    assert [row["step"] for row in got] == [1, 2, 3, 4, 5, 6]
    for mine, theirs in zip(got, wanted, strict=True):
        for key in ("loss", "grad_norm", "learning_rate", "consumed_samples"):
            assert mine[key] == pytest.approx(theirs[key], rel=1e-6), (mine["step"], key)


@pytest.mark.thorough
def test_the_module_under_torchrun_and_in_a_process_alone_do_the_same(text: Path, tmp_path: Path) -> None:
    flags = ("--train_file", text, "--block_size", 32, "--max_steps", 2, "--per_device_train_batch_size", 2)
    flags += ("--deepspeed_config", "zero3")
    with changed_environment({}):  # a run says in it which rank it was
        assert main(list(map(str, (*flags, "--output_dir", tmp_path / "plain")))) == 0
    command = ["torchrun", "--standalone", "--nproc_per_node", 1, "--module", "harness.train", *flags]
    command += ["--output_dir", tmp_path / "module"]
    done = subprocess.run(
        list(map(str, command)), cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    plain, module = logged(tmp_path / "plain"), logged(tmp_path / "module")
    assert [row["loss"] for row in plain] == [row["loss"] for row in module]


BAD = {
    "missing config": (("--deepspeed_config", "no/such.json"), "no/such.json"),
    "malformed config": (("--deepspeed_config", "{tmp}/broken.json"), "broken.json:1:"),
    "unknown model": (("--model_name_or_path", "no-such-model"), "no-such-model"),
    "unreadable data": (("--train_file", "no/such.txt"), "no/such.txt"),
    "world that does not fit": (("--deepspeed_config", "pipeline_3d"), "4"),
    "output that cannot be written": (("--output_dir", "/proc/run"), "/proc/run"),
    "unknown flag": (("--no_such_flag", "1"), "no_such_flag"),
    "conflict": (("--deepspeed_config", "{tmp}/clip.json", "--max_grad_norm", "0.5"), "gradient_clipping"),
    "pipeline with ZeRO-3": (("--deepspeed_config", "{tmp}/pipe3.json"), "pipeline"),
    "more ranks than heads": (
        ("--deepspeed_config", "{tmp}/tp3.json", "--model_name_or_path", "{tmp}/two-heads"),
        "3 tensor-parallel ranks, but the model has only 2 attention heads",
    ),
    "weights without a tokenizer": (("--model_name_or_path", "{tmp}/weights"), "no tokenizer"),
    "data smaller than a batch": (
        ("--train_file", "{tmp}/short.txt", "--block_size", "8"),
        "fewer than one global batch",
    ),
}


LAUNCHED = "missing config"  # under the launcher, which starts the module; the others on ranks that need not import
ON_THREE = ("more ranks than heads", "world that does not fit")
FIRST = (LAUNCHED, "conflict", "output that cannot be written", "more ranks than heads", "data smaller than a batch")
OTHERS = [case for case in BAD if case not in FIRST]


@pytest.fixture(scope="module")
def bad_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bad")
    (folder / "broken.json").write_text('{"train_batch_size": 8 "zero_optimization": {}}')
    (folder / "clip.json").write_text('{"train_batch_size": 8, "gradient_clipping": 1.0}')
    pipe = {"train_batch_size": 8, "pipeline": {"stages": 2}, "zero_optimization": {"stage": 3}}
    (folder / "pipe3.json").write_text(json.dumps(pipe))
    two_heads = json.loads((ROOT / "models/presets/tiny-llama/config.json").read_text())
    (folder / "two-heads").mkdir()
    (folder / "two-heads/config.json").write_text(json.dumps({**two_heads, "num_attention_heads": 2}))
    shutil.copytree(ROOT / "models/presets/tiny-llama", folder / "weights")
    (folder / "weights/model.safetensors").touch()
    (folder / "tp3.json").write_text('{"train_batch_size": 8, "tensor_parallel": {"autotp_size": 3}}')
    (folder / "short.txt").write_text("just a few words")
    return folder


@pytest.mark.parametrize("case", [*FIRST, *(pytest.param(case, marks=pytest.mark.thorough) for case in OTHERS)])
def test_bad_input_is_one_line_and_no_rank_is_left(case: str, bad_folder: Path, tmp_path: Path) -> None:
    flags, words = BAD[case]
    filled = [str(flag).replace("{tmp}", str(bad_folder)) for flag in flags]
    defaults = {"--deepspeed_config": "zero2", "--output_dir": str(tmp_path / "run"), "--max_steps": "1"}
    for name, value in defaults.items():
        if name not in filled:
            filled += [name, value]
    if case == LAUNCHED:
        done = launch(2, *filled, program=("--module", "harness.train"), timeout_s=60)
    else:
        done = script_on_ranks(3 if case in ON_THREE else 2, SCRIPT, *filled)
    assert done.returncode != 0
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("error: ") and words in lines[0], lines[0]
    assert "Traceback" not in done.stdout + done.stderr
    listing = subprocess.run(["ps", "-wweo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(tmp_path) not in listing


def test_a_script_for_huggingfaces_trainer_runs_with_our_imports(tmp_path: Path) -> None:
    """With the arguments and calls of run_clm.py: one --block_size, which is the script's; --do_train and --do_eval."""
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(ROOT / "models/presets/tiny-llama"))
    for part in (model, ByteTokenizer()):
        part.save_pretrained(tmp_path / "model")
    (tmp_path / "lines.txt").write_text("the quick brown fox\n" * 40)
    files = ("--train_file", tmp_path / "lines.txt", "--validation_file", tmp_path / "lines.txt", "--block_size", 32)
    flags = ("--do_train", "--do_eval", "--max_steps", 3, "--per_device_train_batch_size", 2, "--save_steps", 0.4)
    flags += ("--model_name_or_path", tmp_path / "model", "--output_dir", tmp_path / "run")
    done = script_on_ranks(1, ROOT / "tests/e2e/script_for_huggingface.py", *files, *flags)
    assert done.returncode == 0, done.stderr
    assert "train_samples" in done.stdout and "eval_accuracy" in done.stdout
    assert sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-3"]
