"""Each planted fault still has its place in the product: without it, it would count as found for another reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
MUTANTS = json.loads((ROOT / "scripts" / "bench" / "mutants.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("mutant", MUTANTS, ids=[row[0] for row in MUTANTS])
def test_its_text_stands_once_and_what_takes_its_place_is_python(mutant: list[str]) -> None:
    _, file, old, new, _ = mutant
    text = (ROOT / "harness" / file).read_text(encoding="utf-8")
    assert text.count(old) == 1
    compile(text.replace(old, new), file, "exec")


def test_there_are_enough_with_names_of_their_own() -> None:
    assert len({row[0] for row in MUTANTS}) == len(MUTANTS) >= 30
