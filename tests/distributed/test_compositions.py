"""Compositions of everything that a run can be made of, each held to plain torch and transformers in one process.

The fixed lines are in `compositions.txt`; `scripts/bench/mutants.py` says which faults they find. The fresh ones are
drawn anew each day; a nightly job draws 200. A line that fails can be tried and reduced alone:
`scripts/bench/parity.py --shrink 'LINE'`.
"""

from __future__ import annotations

import json
from collections import Counter
from datetime import date
from pathlib import Path
from random import Random

import pytest
import torch.distributed as dist

from harness import Trainer, TrainingArguments
from harness.topology.env import changed_environment
from harness.verify.trials.composition import Composition
from harness.verify.trials.launch import run_on_ranks
from harness.verify.trials.trial import REFUSED, RIGHT, UNTRIED, Judge, try_all
from harness.verify.trials.verify_command import verify
from tests.support.random_compositions import Families, draw
from tests.support.ranks import run_ranks
from tests.support.training import rows

pytestmark = pytest.mark.ranks

FIXED = Path(__file__).parent / "compositions.txt"
FRESH = 8
LINES = [line for line in FIXED.read_text().splitlines() if line and not line.startswith("#")]
FIRST = "llama data=masked decay=0.1 : pp=2 zero=1 schedule=zero-bubble"  # tried by default
MODEL = "tiny-llama"
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2},
}


@pytest.mark.parametrize(
    "line", [pytest.param(line, marks=() if line == FIRST else pytest.mark.thorough) for line in LINES]
)
def test_a_fixed_composition_comes_to_the_numbers_of_one_process(line: str) -> None:
    (verdict,) = try_all([Composition.parse(line)], judge=Judge(strict=True), verify_plan=False)
    assert verdict.kind == RIGHT, str(verdict)


@pytest.mark.thorough
def test_fresh_compositions_of_the_day_are_right_or_refused(capsys: pytest.CaptureFixture[str]) -> None:
    seed, families = date.today().isoformat(), Families.read()
    verdicts = try_all([draw(Random(f"{seed} {number}"), families) for number in range(FRESH)])
    counts = Counter(verdict.kind for verdict in verdicts)
    with capsys.disabled():
        print(f"\nfresh compositions of {seed}: {dict(counts)}; scripts/bench/parity.py --count {FRESH} --seed {seed}")
    assert not [str(verdict) for verdict in verdicts if verdict.is_bad]
    assert counts[RIGHT] > counts[REFUSED] + counts[UNTRIED]


def test_a_failure_is_told_in_the_words_of_the_rank_that_failed_first(tmp_path: Path) -> None:
    said: dict[int, object] = {}
    run_on_ranks(["one"], 2, tmp_path, worker=fail_on_the_second_rank, limit_s=30, report=said.__setitem__)
    assert said == {0: {"error": "rank 1: ValueError: rows of 90"}}


def fail_on_the_second_rank(_folder: Path, _first: int) -> None:
    if dist.get_rank() == 1:
        raise ValueError("rows of 90")
    dist.barrier()  # gloo says here that the other rank has gone


@pytest.mark.thorough
def test_a_config_is_certified_and_a_run_of_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = tmp_path / "ds.json"
    config.write_text(json.dumps(CONFIG))
    words = ["--model_name_or_path", MODEL, "--deepspeed_config", str(config), "--output", f"{tmp_path}/c.json"]
    with changed_environment({}):  # as it was afterwards: for another environment, `run_ranks` starts another server
        assert verify(words) == 0
    certificate = json.loads((tmp_path / "c.json").read_text())
    assert certificate["verdict"] == "equal" and certificate["left_out"]
    whats = [row["what"] for row in certificate["compared"]]
    assert whats == ["float32, saved and resumed", "float32, with label smoothing", "bf16"]
    assert all(row["largest"]["loss"] <= row["allowed"]["loss"] for row in certificate["compared"])
    for changes, found in (({}, certificate), ({"gradient_clipping": 0.5}, None)):
        config.write_text(json.dumps({**CONFIG, **changes}))
        environment = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
        run_ranks(2, train_a_step, str(config), str(tmp_path / f"run{len(changes)}"), env=environment)
        assert json.loads((tmp_path / f"run{len(changes)}" / "run.json").read_text())["certificate"] == found


def train_a_step(config: str, output_dir: str) -> None:
    arguments = TrainingArguments(deepspeed_config=config, output_dir=output_dir, max_steps=1, save_steps=0)
    trainer = Trainer(MODEL, arguments, train_dataset=rows())
    trainer.train()
    trainer.close()
