"""The scripts of examples/, on as many ranks as their docstrings start; the launchers have tests of their own."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.e2e.launching import ROOT
from tests.support.ranks import script_on_ranks
from tests.support.training import logged

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))

# DeepSpeed compiles an operator for ranks on a CPU, half a minute that one rank does not need.
WITHOUT_COMPILING = """import deepspeed, runpy
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
runpy.run_path("examples/hf_trainer.py", run_name="__main__")
"""

pytestmark = pytest.mark.ranks


RANKS = {
    "python": 1,
    "deepspeed --num_accelerators 2": 2,
    "torchrun --nproc_per_node 1": 1,
    "torchrun --nproc_per_node 2": 2,
}


def start(name: str, *flags: object, script: Path | None = None) -> str:
    """Run an example, or `script` for it, on as many ranks as its docstring starts; return what it printed."""
    (command,) = re.findall(rf"^ *(.*) examples/{name}\.py", (ROOT / "examples" / f"{name}.py").read_text(), re.M)
    done = script_on_ranks(RANKS[command], script or f"examples/{name}.py", *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in logged(folder)]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_tested_and_says_how_to_start_it(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 60
    assert f"examples/{path.name}" in (ast.get_docstring(ast.parse(text)) or "")
    assert f'start("{path.stem}"' in Path(__file__).read_text(encoding="utf-8")


def test_lora_on_conversations(tmp_path: Path) -> None:
    said = start("lora_chat", "--output_dir", tmp_path, "--max_steps", 6)
    assert "pp2" in said and "adapters" in said
    seen = losses(tmp_path)
    assert len(seen) == 6 and seen[-1] < seen[0]
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert any("lora_A" in name for name, _ in model.named_parameters())


@pytest.mark.thorough
def test_a_list_of_layers_learns(tmp_path: Path) -> None:
    said = start("own_layers", "--output_dir", tmp_path)
    assert "stage 1 on rank 1" in said
    (last,) = logged(tmp_path, "evaluations")
    assert last["eval_loss"] < 0.05 < losses(tmp_path)[0]


def test_a_callback_saves_and_stops(tmp_path: Path) -> None:
    said = start("callback", "--output_dir", tmp_path, "--enough", 5.0)
    steps = len(losses(tmp_path))
    assert 1 < steps < 60
    assert (tmp_path / f"checkpoint-{steps}").is_dir() and f"after step {steps}: saved" in said


@pytest.mark.on_host("HuggingFace's Trainer does not know the simulated device")
def test_the_hf_trainer_takes_the_same_json(tmp_path: Path) -> None:
    script = tmp_path / "hf_trainer.py"
    script.write_text(WITHOUT_COMPILING)
    said = start("hf_trainer", "--output_dir", tmp_path, "--max_steps", 3, script=script)
    seen = [float(loss) for loss in re.findall(r"'loss': '?([\d.]+)", said)]
    assert len(seen) == 3 and seen[-1] < seen[0]


@pytest.mark.thorough
def test_tensor_parallel_layers_alone() -> None:
    said = start("tensor_parallel_layers")
    assert "rank 0 holds 50 of 99" in said and "rank 1 holds 49 of 99" in said
