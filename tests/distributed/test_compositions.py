"""Compositions of everything that a run can be made of, each held to plain torch and transformers in one process.

The fixed lines are in `compositions.txt`; `scripts/bench/mutants.py` says which faults they find. The fresh ones are
drawn anew each day. A line that fails can be tried and reduced alone: `scripts/bench/parity.py --shrink 'LINE'`.
"""

from __future__ import annotations

from collections import Counter
from datetime import date
from pathlib import Path
from random import Random

import pytest

from harness.parity.composition import Composition
from harness.parity.search import Families, draw
from harness.parity.trial import REFUSED, RIGHT, UNTRIED, try_all

pytestmark = pytest.mark.ranks

FIXED = Path(__file__).parent / "compositions.txt"
FRESH = 20


def test_the_fixed_compositions_come_to_the_numbers_of_one_process() -> None:
    lines = [line for line in FIXED.read_text().splitlines() if line and not line.startswith("#")]
    verdicts = try_all([Composition.parse(line) for line in lines])
    assert not [str(verdict) for verdict in verdicts if verdict.kind != RIGHT]


def test_fresh_compositions_of_the_day_are_right_or_refused(capsys: pytest.CaptureFixture[str]) -> None:
    seed, families = date.today().isoformat(), Families.read()
    verdicts = try_all([draw(Random(f"{seed} {number}"), families) for number in range(FRESH)])
    counts = Counter(verdict.kind for verdict in verdicts)
    with capsys.disabled():
        print(f"\nfresh compositions of {seed}: {dict(counts)}; scripts/bench/parity.py --count {FRESH} --seed {seed}")
    assert not [str(verdict) for verdict in verdicts if verdict.is_bad]
    assert counts[RIGHT] > counts[REFUSED] + counts[UNTRIED]
