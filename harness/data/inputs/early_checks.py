"""Read the file of `--sample_prompts`, before torch is imported."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from harness.config.values.json_file import parse_json
from harness.errors import UserError

Message = dict[str, str]


def read_prompts(path: Path) -> list[str | list[Message]]:
    """Return the prompts of a file: column `prompt` or `messages` of a .jsonl file, else each line that is not blank.

    Raises UserError if it cannot be read or has no prompt.
    """
    if path.exists() and not path.is_file():
        raise UserError(f"--sample_prompts {path}: is not a regular file: write the prompts into one")
    try:
        with path.open(encoding="utf-8-sig") as stream:
            lines = [line.removesuffix("\n") for line in stream]  # str.splitlines would cut at U+2028 too
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise UserError(f"--sample_prompts {path}: cannot be read: {reason}") from error
    found = [_prompt(path, n, line) for n, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise UserError(f"--sample_prompts {path}: is empty: write a prompt a line")
    return found


def _prompt(path: Path, number: int, line: str) -> str | list[Message]:
    if path.suffix != ".jsonl":
        return line
    prompt: str | list[Message] = []
    with suppress(ValueError):
        row = parse_json(line)
        if isinstance(row, dict):
            prompt = row["prompt"] if "prompt" in row else row.get("messages", [])
    is_chat = isinstance(prompt, list) and all(
        isinstance(each, dict) and isinstance(each.get("role"), str) and "content" in each for each in prompt
    )
    if not prompt or not (isinstance(prompt, str) or is_chat):
        raise UserError(f'--sample_prompts {path}:{number}: write {{"prompt": "..."}} or {{"messages": [...]}}')
    return prompt
