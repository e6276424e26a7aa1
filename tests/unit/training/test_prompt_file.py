"""The file of sample prompts is read at once, and what is none is one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness import UserError
from harness.training.prepare.inputs.prompt_file import read_prompts


def test_prompts_are_lines_or_rows(tmp_path: Path) -> None:
    lines, rows = tmp_path / "p.txt", tmp_path / "p.jsonl"
    lines.write_text("one\n\n  two\n")
    messages = [{"role": "user", "content": "hi"}]
    rows.write_text('{"prompt": "one\\ntwo"}\n{"messages": [{"role": "user", "content": "hi"}]}\n')
    assert read_prompts(lines) == ["one", "  two"]
    assert read_prompts(rows) == ["one\ntwo", messages]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("p.txt", "\n", "is empty"),
        ("p.txt", None, "cannot be read: No such file"),
        ("p.jsonl", '{"text": "x"}', r"p\.jsonl:1: write"),
        ("p.jsonl", '{"prompt": 3}', r"p\.jsonl:1: write"),
    ],
)
def test_what_holds_no_prompt_is_refused(tmp_path: Path, name: str, content: str | None, words: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=words):
        read_prompts(tmp_path / name)
