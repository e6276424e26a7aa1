"""The stored matrix of families stays true: each day a few other rows are run anew, and must come out the same."""

from __future__ import annotations

from datetime import date

import pytest

from harness.compat.commands import spell
from harness.compat.launch import run_families
from harness.hf.matrix import CELLS, YES, installed_transformers, read_matrix

pytestmark = pytest.mark.ranks

STORED = read_matrix()
A_DAY = 2


def of_the_day(day: date) -> list[str]:
    """Families that hold in every layout, so that their every cell is run; all of them in turn, day by day."""
    families = sorted(name for name, row in STORED.families.items() if row["pipeline"] == row["tensor"] == YES)
    return [families[(day.toordinal() * A_DAY + place) % len(families)] for place in range(A_DAY)] if families else []


@pytest.mark.skipif(STORED.transformers != installed_transformers(), reason="the matrix is another version's")
@pytest.mark.parametrize("families", [of_the_day(date.today())], ids=",".join)
def test_the_rows_of_the_day_are_as_stored(families, tmp_path):
    rows = run_families(families, tmp_path / "rows.jsonl", limit_s=60, tell=lambda family, row: None)
    for family in families:
        stored = {cell: STORED.families[family][cell] == YES for cell in CELLS}
        assert {cell: rows[family][cell] == YES for cell in CELLS} == stored, f"{family}: {spell(rows[family])}"


def test_every_family_has_its_day():
    from datetime import timedelta

    count = sum(row["pipeline"] == row["tensor"] == YES for row in STORED.families.values())
    days = [date(2024, 1, 1) + timedelta(days=n) for n in range(count)]
    assert len({family for day in days for family in of_the_day(day)}) == count
