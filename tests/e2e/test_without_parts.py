"""The core alone: a copy of the package without any part trains, saves and resumes to the same losses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.installed import PARTS
from tests.support.core import copy_core
from tests.support.ranks import script_on_ranks

pytestmark = pytest.mark.ranks

TRAIN = """
import json, sys
from harness import Trainer, TrainingArguments
rows = [{"input_ids": [(5 * row + place) % 250 for place in range(16)]} for row in range(16)]
losses = []
for steps in (2, 4):
    args = TrainingArguments(sys.argv[1], deepspeed_config="zero3", max_steps=steps, eval_steps=2, save_steps=2)
    args.resume_from_checkpoint = "auto" if steps == 4 else None
    args.fused_kernels = False  # fewer operations round differently
    trainer = Trainer("tiny-llama", args, rows, rows[:4])
    trainer.train()
    losses += [logs.get("loss", logs.get("eval_loss")) for logs in trainer.state.log_history]
    trainer.close()
print("LOSSES", json.dumps(losses))
"""


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package, but without its parts."""
    folder = tmp_path_factory.mktemp("core")
    copy_core(folder)
    return folder


def python(house: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(house), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *words], cwd=house, env=env, capture_output=True, text=True, timeout=200)


def losses(done: subprocess.CompletedProcess[str]) -> list[float | None]:
    assert done.returncode == 0, done.stderr
    found: list[float | None] = json.loads(done.stdout.partition("LOSSES ")[2])
    return found


def test_it_trains_saves_and_resumes_to_the_same_losses(core: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    alone = losses(python(core, str(tmp_path / "train.py"), str(tmp_path / "alone")))
    whole = losses(script_on_ranks(1, tmp_path / "train.py", tmp_path / "whole"))
    assert len(alone) > 4 and alone == whole
    assert (tmp_path / "alone" / "checkpoint-4").is_dir()


OTHERS = ("plan", "verify", "models", "report", "dry-run", "cluster", "generate")


@pytest.mark.parametrize("verb", ["check", *(pytest.param(verb, marks=pytest.mark.thorough) for verb in OTHERS)])
def test_a_verb_of_a_part_says_in_one_line_that_it_is_not_there(verb: str, core: Path) -> None:
    done = python(core, "-m", "harness", verb, "anything")
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and line.startswith(f"ds-harness {verb}: ") and "is not installed" in line


EACH = """
import sys
from importlib import import_module
from harness.cli import VERBS
from harness.installed import absent_part

import harness
absent = sys.argv[1]
said = {}
for verb, (module, _) in VERBS.items():
    try:
        import_module(module)
    except ModuleNotFoundError as error:
        said[verb] = absent_part(error.name)
assert set(said.values()) <= {absent}, said
assert "launch" not in said and ("train" not in said or absent == "harness.data"), said
for name in ("check", "ByteTokenizer", "Preferences", "EarlyStoppingCallback"):
    try:
        getattr(harness, name)
    except harness.UserError as error:
        assert str(error) == f"harness.{name} needs {absent}, which is not installed", error
harness.TrainingArguments("unused")
print("DONE", *said)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("part", PARTS)
def test_without_one_part_only_what_needs_it_is_refused(part: str, tmp_path: Path) -> None:
    copy_core(tmp_path, (part,))
    done = python(tmp_path, "-c", EACH, part)
    assert done.returncode == 0, done.stderr
    assert "DONE" in done.stdout
