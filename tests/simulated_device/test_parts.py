"""What the program copies and exchanges without waiting at once is there when it is used."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.simulated_device.parts import copies, dry_run, exchanges
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks


def test_copies_are_there_when_they_are_used(tmp_path: Path) -> None:
    (found,) = run_ranks(1, copies, str(tmp_path), process_group=False)
    assert [what for what, right in found.items() if not right] == []


def test_exchanges_are_done_when_they_are_used() -> None:
    for found in run_ranks(2, exchanges):
        assert [what for what, right in found.items() if not right] == []


def test_a_dry_run_needs_no_device_for_each_rank(tmp_path: Path) -> None:
    assert run_ranks(1, dry_run, str(tmp_path), process_group=False) == [0]
