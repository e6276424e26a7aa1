"""`--nonfinite rollback` on ranks: all go back alike, and go on as if the batch had never been, to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ranks import run_ranks
from tests.support.rollback import STEPS, in_layouts, with_tensor_parallelism
from tests.support.training import tiny_model

pytestmark = pytest.mark.ranks

FIRST = [(2, 0), (1, 3)]
"""Layouts: pipeline stages and ZeRO stage."""


@pytest.mark.thorough
@pytest.mark.parametrize("layouts", [FIRST, [(1, 2)]], ids=["first", "others"])
def test_all_ranks_go_back_alike(layouts: list[tuple[int, int]], tmp_path: Path) -> None:
    ranks = run_ranks(2, in_layouts, layouts, str(tmp_path))
    assert ranks[0] == ranks[1]
    for layout, (message, back, never) in zip(layouts, ranks[0], strict=True):
        assert (message, len(back)) == ("", STEPS), layout
        assert back == never, layout


@pytest.mark.thorough
def test_a_loss_that_fails_for_one_sample_under_tensor_parallelism(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "m", "llama", False)
    for back, never in run_ranks(2, with_tensor_parallelism, model, str(tmp_path)):
        assert back == never and len(back) == STEPS
