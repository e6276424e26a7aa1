"""Which rank sends what, when tensors move between ranks."""

from __future__ import annotations

import pytest

from harness.extras.rebalancing.exchange import Transfer, transfers


def test_a_box_comes_from_all_ranks_that_own_a_part_of_it() -> None:
    have = [[("w", ((0, 2), (0, 4)))], [("w", ((2, 4), (0, 4))), ("b", ((0, 4),))]]
    want = [[("b", ((1, 3),))], [("w", ((1, 3), (1, 4)))]]
    assert transfers(have, want, [0, 0]) == [
        Transfer("b", ((1, 3),), source=1, target=0),
        Transfer("w", ((1, 2), (1, 4)), source=0, target=1),
        Transfer("w", ((2, 3), (1, 4)), source=1, target=1),
    ]


def test_a_number_is_a_box_without_dimensions() -> None:
    assert transfers([[("n", ())], []], [[], [("n", ())]], [0, 1]) == [Transfer("n", (), source=0, target=1)]


def test_what_several_stages_have_comes_from_the_nearest() -> None:
    tied = [("w", ((0, 2),))]
    found = transfers([tied, tied, []], [tied, tied, tied], [0, 1, 2])
    assert [(each.source, each.target) for each in found] == [(0, 0), (1, 1), (0, 2)]


@pytest.mark.parametrize("name", ["w", "other"])
def test_values_that_nobody_has_are_an_error(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        transfers([[("w", ((0, 2),))]], [[(name, ((0, 3),))]], [0])
