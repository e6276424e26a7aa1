"""Fixtures for tests that train in this process."""

import inspect
from functools import partial
from pathlib import Path

import pytest
from transformers.modeling_utils import AttentionInterface

from tests.support.points import Make, make_in


@pytest.fixture
def never_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unwrap transformers' attention, which stays wrapped in a process after the first run that splits a sequence."""
    monkeypatch.setattr(AttentionInterface, "get_interface", inspect.unwrap(AttentionInterface.get_interface))


@pytest.fixture
def make(tmp_path: Path) -> Make:
    return partial(make_in, tmp_path)
