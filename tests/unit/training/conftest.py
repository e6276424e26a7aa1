"""What tests of whole runs in this process need of it."""

import inspect

import pytest
from transformers.modeling_utils import AttentionInterface


@pytest.fixture
def never_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this process as if no run in it had split a sequence: attention stays wrapped after the first that does."""
    monkeypatch.setattr(AttentionInterface, "get_interface", inspect.unwrap(AttentionInterface.get_interface))
