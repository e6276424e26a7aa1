"""What a run can choose from is said in one place: few files name one schedule, one optimizer, or one loss."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from harness.optimizers import OPTIMIZERS
from harness.preference_losses import PREFERENCE_LOSSES
from harness.schedules import SCHEDULES

HARNESS = Path(__file__).resolve().parents[2] / "harness"
SOURCES = {
    path: path.read_text(encoding="utf-8") for kind in ("*.py", "*.json") for path in sorted(HARNESS.rglob(kind))
}


def files_with(name: str) -> list[str]:
    """The files of the package that contain a name as a word; a longer name with dashes is another one."""
    word = re.compile(rf"(?<![\w-]){re.escape(name)}(?![\w-])")
    return [str(path.relative_to(HARNESS)) for path, text in SOURCES.items() if word.search(text)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_is_named_by_its_own_file_and_the_config_check(name: str) -> None:
    assert 0 < len(files_with(name)) <= 4, files_with(name)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_is_named_by_its_own_file_its_code_and_the_config_check(name: str) -> None:
    assert 0 < len(files_with(name)) <= 6, files_with(name)


@pytest.mark.parametrize("name", sorted(PREFERENCE_LOSSES.keys() - {"dpo"}))  # which messages give as the example
def test_a_preference_loss_is_named_by_its_own_file_and_the_help_of_flags(name: str) -> None:
    assert 0 < len(files_with(name)) <= 3, files_with(name)
