"""Charts of what a run was trained on, from its `run.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.report.plotly_figures import figure
from harness.report.run_charts import data_charts
from harness.report.run_files import RunFiles

SOURCE = {"name": "a.jsonl", "share": None, "samples": 2, "tokens": 3_000_000, "learnt": 1_000_000}
LENGTHS = {"edges": [1, 2, 5], "counts": [3, 4]}


def run(data: Any) -> RunFiles:
    return RunFiles(name="run", folder=Path("run"), about={"data": data}, steps=[])


def test_lengths_are_columns_and_sources_rows() -> None:
    lengths, sources = data_charts(run({"lengths": LENGTHS, "sources": [SOURCE, {**SOURCE, "name": ""}]}))
    assert lengths.is_upright and lengths.rows == ["1", "2 to 4"] and lengths.bars[0].lengths == [3, 4]
    assert figure(lengths)["layout"]["xaxis"]["title"]["text"] == "tokens of a conversation"
    assert sources.rows == ["a.jsonl", "training data"]
    assert [(bars.name, bars.starts[0], bars.lengths[0]) for bars in sources.bars] == [
        ("in the loss", 0.0, 1.0),
        ("not in the loss", 1.0, 2.0),
    ]
    assert sources.bars[0].hovers[0] == "2 samples, 1,000,000 of 3,000,000 tokens are in the loss"


@pytest.mark.parametrize(
    "data",
    [
        None,
        {},
        {"lengths": 3, "sources": 3},
        {"lengths": {"edges": [1], "counts": [2, 3]}, "sources": [{"samples": "many"}, None]},
        {"lengths": {"edges": ["a", "b"], "counts": [1]}, "sources": []},
        {"lengths": {"edges": [10**400, 10**401], "counts": [1]}},
    ],
)
def test_what_is_not_as_it_should_be_is_not_drawn(data: Any) -> None:
    assert data_charts(run(data)) == []
