"""Fixtures for tests that train in this process."""

import inspect

import pytest
from transformers.modeling_utils import AttentionInterface


@pytest.fixture
def never_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unwrap transformers' attention, which stays wrapped in a process after the first run that splits a sequence."""
    monkeypatch.setattr(AttentionInterface, "get_interface", inspect.unwrap(AttentionInterface.get_interface))
