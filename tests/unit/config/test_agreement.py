"""The verdict on every key, with values of every kind, is that of DeepSpeed's own parser."""

from __future__ import annotations

import json
import logging

import pytest

from harness.config import ConfigError, Severity, check
from harness.config.cli.pages import LENIENT, STRICTER
from harness.config.rules.registry import by_code
from harness.config.schema import every_key
from harness.config.text.document import from_text

VALUES = [None, True, 0, 2, -1, 0.5, 5e8, 1e12, "auto", "", "x", "8", "cpu", [], [1], {}, {"x": 1}]


def config(pointer: str, value: object) -> str:
    """The text of a config that is right but for one value."""
    *sections, name = pointer.split("/")[1:]
    data: dict = {"train_batch_size": 8}
    here = data
    for section in sections:
        here = here.setdefault(section, {})
    here[name] = value
    return json.dumps(data)


def refused(text: str) -> bool:
    """Whether the check says that DeepSpeed's parser would refuse it."""
    try:
        found = check(from_text(text), target="deepspeed")
    except ConfigError:
        return True
    errors = [item.code for item in found if item.severity is Severity.ERROR]
    return any(code.startswith("DS1") or by_code(code).claim == "refuses" for code in errors if code != "DS303")


@pytest.fixture(scope="module")
def deepspeed_refuses():
    """DeepSpeed's parser as a function from a text to whether it raises."""
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.utils import logger

    logger.setLevel(logging.CRITICAL)

    def refuses(text: str) -> bool:
        try:
            DeepSpeedConfig(json.loads(text))  # thousands of files would take more time than all the rest
        except Exception:
            return True
        return False

    yield refuses
    logger.setLevel(logging.INFO)


def test_every_key_with_every_kind_of_value(deepspeed_refuses):
    excused = STRICTER | LENIENT
    wrong = []
    for pointer, _ in every_key():
        for value in VALUES:
            text = config(pointer, value)
            batch_by_auto = value == "auto" and pointer.count("/") == 1  # a rule of its own: nobody resolves it
            if refused(text) != deepspeed_refuses(text) and pointer not in excused and not batch_by_auto:
                wrong.append(text)
    assert not wrong


@pytest.mark.parametrize("pointer", sorted(STRICTER | LENIENT))
def test_what_is_excused_does_differ(pointer, deepspeed_refuses):
    values = [*VALUES, 1e-10, False]
    assert any(refused(config(pointer, value)) != deepspeed_refuses(config(pointer, value)) for value in values)
