"""The planted faults, and the compositions that find them: enough of both, of a product that changes."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[4]
LINES = (ROOT / "tests" / "distributed" / "compositions.txt").read_text(encoding="utf-8").splitlines()
MUTANTS = json.loads((ROOT / "scripts" / "bench" / "mutants.json").read_text(encoding="utf-8"))


def test_all_have_their_place_and_are_python() -> None:
    placed = []
    for name, file, old, new, _ in MUTANTS:
        path = ROOT / "harness" / file
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        if text.count(old) == 1:
            compile(text.replace(old, new), file, "exec")
            placed.append(name)
    assert sorted(placed) == sorted({row[0] for row in MUTANTS}) and len(placed) >= 30


def test_each_names_a_line_that_there_is() -> None:
    assert [row[0] for row in MUTANTS if not any(row[4] in line for line in LINES)] == []
