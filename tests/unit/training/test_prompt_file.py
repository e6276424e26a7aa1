"""The file of sample prompts is read at once, and what is none is one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness import UserError
from harness.data.inputs.early_checks import read_prompts


def test_prompts_are_lines_or_rows(tmp_path: Path) -> None:
    lines, rows = tmp_path / "p.txt", tmp_path / "p.jsonl"
    lines.write_text("one\n\n  two\n")
    messages = [{"role": "user", "content": "hi"}]
    rows.write_text('{"prompt": "one\\ntwo"}\n{"messages": [{"role": "user", "content": "hi"}]}\n')
    assert read_prompts(lines) == ["one", "  two"]
    assert read_prompts(rows) == ["one\ntwo", messages]


def test_only_the_end_of_a_line_ends_a_prompt(tmp_path: Path) -> None:
    prompts = ["one\u2028two\x85three\x0bfour\x0c", " 日本 🙂 "]
    (tmp_path / "p.txt").write_bytes("\ufeff{}\r\n\r\n{}".format(*prompts).encode())
    (tmp_path / "p.jsonl").write_text(
        "\ufeff" + "".join(json.dumps({"prompt": prompt}, ensure_ascii=False) + "\n" for prompt in prompts)
    )
    assert read_prompts(tmp_path / "p.txt") == read_prompts(tmp_path / "p.jsonl") == prompts


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("p.txt", "\n", "is empty"),
        ("p.txt", None, "cannot be read: No such file"),
        ("p.jsonl", '{"text": "x"}', r"p\.jsonl:1: write"),
        ("p.jsonl", '{"prompt": 3}', r"p\.jsonl:1: write"),
        ("p.jsonl", '\n{"prompt": "a"}\n{"prompt": ""}', r"p\.jsonl:3: write"),
        ("p.jsonl", '{"messages": []}', r"p\.jsonl:1: write"),
        ("p.jsonl", '{"messages": ["hi"]}', r"p\.jsonl:1: write"),
        ("p.jsonl", '{"messages": [{"role": "user"}]}', r"p\.jsonl:1: write"),
        ("p.jsonl", '{"messages": [{"role": 1, "content": "a"}]}', r"p\.jsonl:1: write"),
        ("p.jsonl", '["a"]', r"p\.jsonl:1: write"),
        ("p.jsonl", "[" * 100_000, r"p\.jsonl:1: write"),
    ],
)
def test_what_holds_no_prompt_is_refused(tmp_path: Path, name: str, content: str | None, words: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=words):
        read_prompts(tmp_path / name)
