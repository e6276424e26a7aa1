"""The stored matrix of families stays true: some of its rows are run anew, and must come out the same."""

from __future__ import annotations

import pytest

from harness.verify.matrix import CELLS, NO_EXPERTS, YES, installed_transformers, read_matrix
from harness.verify.trials.families import run_families
from harness.verify.trials.models_command import spell

pytestmark = pytest.mark.ranks

STORED = read_matrix()
FAMILIES = ("olmoe",)  # every cell of it is run; the compositions have gpt2, which is cut by a file


@pytest.mark.thorough
@pytest.mark.skipif(STORED.transformers != installed_transformers(), reason="the matrix is another version's")
def test_rows_are_as_stored(tmp_path):
    families = ("qwen3_5", *FAMILIES)  # rank 0 cannot make a model of the first, and tells the other
    rows = run_families(families, tmp_path / "rows.jsonl", limit_s=60, report=lambda family, row: None)
    assert rows["qwen3_5"]["pipeline"].startswith("not tried: qwen3_5 is multimodal")
    for family in FAMILIES:
        known = STORED.families[family]
        stored = {cell: known[cell] in (YES, NO_EXPERTS) for cell in CELLS if cell in known}
        assert all(stored.values()), f"{family}: {spell(known)}"
        found = {cell: rows[family][cell] in (YES, NO_EXPERTS) for cell in stored}
        assert found == stored, f"{family}: {spell(rows[family])}"
