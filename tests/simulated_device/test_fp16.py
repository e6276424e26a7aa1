"""Compositions in fp16, which DeepSpeed has on no CPU: as far off one process in fp16 as their layout may be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.verify.trials.composition import Composition
from harness.verify.trials.execute import run_lines
from harness.verify.trials.launch import LINES
from harness.verify.trials.subject import make_subject
from harness.verify.trials.trial import RIGHT, Judge
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks

FIRST, OTHERS = ("pp=2", "dp=2 zero=3"), ("tp=2", "dp=2 zero=1")


@pytest.mark.thorough
@pytest.mark.parametrize("layouts", [FIRST, OTHERS], ids=["first", "others"])
def test_fp16_comes_to_the_numbers_of_one_process_in_fp16(layouts: tuple[str, ...], tmp_path: Path) -> None:
    compositions = [Composition.parse(f"llama precision=fp16 : {layout}") for layout in layouts]
    (tmp_path / LINES).write_text("".join(f"{each}\n" for each in compositions))
    subjects = [make_subject(each, tmp_path / "models") for each in compositions]  # once, which the ranks then read
    run_ranks(2, run_lines, tmp_path)
    judge = Judge(strict=True)
    for number, (composition, subject) in enumerate(zip(compositions, subjects, strict=True)):
        outcome = json.loads((tmp_path / f"{number}.json").read_text())
        verdict = judge.verdict(composition, subject, outcome, tmp_path / str(number))
        assert verdict.kind == RIGHT, str(verdict)
