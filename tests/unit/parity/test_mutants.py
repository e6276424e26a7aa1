"""The faults that `scripts/bench/mutants.py` plants can be planted: the text that each changes is in the harness."""

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_each_fault_has_its_place() -> None:
    mutants = json.loads((ROOT / "scripts/bench/mutants.json").read_text())
    lost = [name for name, file, old, *_ in mutants if (ROOT / "harness" / file).read_text().count(old) != 1]
    assert mutants and not lost
