"""A config without the config check: the same values, and what cannot be read is refused by file and reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.arguments import TrainingArguments
from harness.arguments.configure import read_run_config
from harness.config.values.config_file import PRESETS, PlainConfig, read_plain
from harness.errors import UserError


@pytest.mark.parametrize("preset", [path.stem for path in sorted(PRESETS.glob("*.json"))])
def test_a_preset_is_read_by_its_name_or_by_its_path(preset: str) -> None:
    found = read_plain(preset)
    assert found == read_plain(str(PRESETS / f"{preset}.json")) and found.data
    args = TrainingArguments(deepspeed_config=preset)
    assert read_run_config(args, world_size=4, check=None).document == found


def test_values_of_a_program_are_copied() -> None:
    given = {"optimizer": {"params": {"betas": (0.9, 0.95)}}}
    found = read_plain(given)
    assert found == PlainConfig("<config>", {"optimizer": {"params": {"betas": [0.9, 0.95]}}})
    found.data["optimizer"].clear()
    assert given["optimizer"]


@pytest.mark.parametrize(
    ("text", "words"), [("{", "Expecting property name"), ("[]", "a config is an object"), (None, "No such file")]
)
def test_what_cannot_be_read_is_refused_in_one_line(text: str | None, words: str, tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UserError) as refused:
        read_plain(str(file))
    assert str(refused.value).startswith(f"{file}: ") and words in str(refused.value)
