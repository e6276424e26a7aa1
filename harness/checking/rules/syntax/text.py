"""Rules about the text of the file: syntax that is not plain JSON, and how DeepSpeed reads it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator

from harness.checking.rules.rule import Finding, rule
from harness.checking.rules.view import RunView
from harness.config.text.diagnostic import Edit, Severity
from harness.config.text.parser import NonJsonSyntax

_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_NAMES = {
    "comment": "comment",
    "trailing-comma": "trailing comma",
    "missing-comma": "missing comma",
    "quotes": "single-quoted string",
    "bare-key": "unquoted key",
    "bare-root": "missing outer brace",
}


@rule("DS001", "unreadable-config", Severity.ERROR, claim="refuses")
def unreadable_config(_view: RunView) -> Iterator[Finding]:
    """The file cannot be read as a config at all.

    It is missing, a directory, binary, far too large, or its text is broken in a way that neither a JSON
    reader nor DeepSpeed's own (which is more lenient) can follow. No other rule can check such a file.

    Wrong: {"train_batch_size": 8,, }
    Right: {"train_batch_size": 8}
    """
    yield from ()  # `load` raises it: only readable configs get a view


@rule("DS002", "not-plain-json", Severity.INFO, claim="runs")
def not_plain_json(view: RunView) -> Iterator[Finding]:
    """The file is not plain JSON, though DeepSpeed reads it.

    DeepSpeed reads Hjson: comments, missing and trailing commas, unquoted keys. Most other programs read
    JSON and stop: HuggingFace's Trainer and Accelerate among them, so with `--target hf` this is an error.
    `--fix` rewrites the text and strips the comments.

    Wrong: {"train_batch_size": 8, // samples
           }
    Right: {"train_batch_size": 8
           }
    """
    found = [odd for odd in view.document.oddities if odd.kind in _NAMES]
    if not found:
        return
    counts = Counter(_NAMES[odd.kind] for odd in found)
    parts = [f"{count} {name}{'s' if count > 1 else ''}" for name, count in counts.items()]
    strict = view.target == "hf"
    yield Finding(
        pointer="",
        span=(found[0].start, max(found[0].end, found[0].start + 1)),
        message="not plain JSON: " + ", ".join(parts),
        hint="run with --fix to rewrite it as JSON",
        severity=Severity.ERROR if strict else None,
        deepspeed="reads it as Hjson and goes on",
        edits=tuple(edit for odd in found for edit in _plain(view.document.text, odd)),
    )


def _plain(text: str, odd: NonJsonSyntax) -> Iterator[Edit]:
    """Return the edits that turn one oddity into JSON."""
    kind, start, end = odd.kind, odd.start, odd.end
    if kind == "comment":
        line_start = text.rfind("\n", 0, start) + 1
        if not text[line_start:start].strip() and text[end : end + 1] in ("\n", ""):
            yield Edit(start=line_start, end=min(end + 1, len(text)), new="")  # a comment with a line of its own
        else:
            while start > 0 and text[start - 1] in " \t":
                start -= 1
            yield Edit(start=start, end=end, new="")
    elif kind == "trailing-comma":
        yield Edit(start=start, end=end, new="")
    elif kind == "missing-comma" and not odd.detail:
        yield Edit(start=start, end=end, new=",")  # behind a bare word a comma would become a part of it
    elif kind == "bare-key":
        yield Edit(start=start, end=end, new=json.dumps(text[start:end]))


@rule("DS003", "word-read-as-string", Severity.WARNING, claim="runs")
def word_read_as_string(view: RunView) -> Iterator[Finding]:
    """An unquoted word is read as a string, up to the end of its line.

    In Hjson `True,` is not the value true but the string "True,", comma included; a template's `${stage},`
    is a string too. If the word is a literal of another language, such as Python's True, `--unsafe-fixes` writes it as
    JSON.

    Wrong: {"train_batch_size": 8,
            "wandb": {"project": mine
           }}
    Right: {"train_batch_size": 8,
            "wandb": {"project": "mine"
           }}
    """
    for odd in view.document.oddities:
        if odd.kind != "bare-word":
            continue
        word = odd.detail.rstrip(", \t")
        literal = _WORDS.get(word)
        comma = "," if odd.detail.rstrip().endswith(",") else ""
        yield Finding(
            pointer="",
            span=(odd.start, odd.end),
            message=f"the unquoted word {word} is read as the string {odd.detail!r}",
            hint=f"write {literal}" if literal else "put it in quotes, or expand the template first",
            deepspeed=f"takes {odd.detail!r}, the rest of the line included, as a string",
            edits=(Edit(start=odd.start, end=odd.end, new=literal + comma),) if literal else (),
            is_safe=False,
        )


@rule("DS004", "duplicate-key", Severity.ERROR, claim="refuses")
def duplicate_key(view: RunView) -> Iterator[Finding]:
    """A key appears twice in one section.

    Most JSON readers silently keep the last value; DeepSpeed refuses the file. Only you know which value is meant.

    Wrong: {"train_batch_size": 8, "train_batch_size": 16}
    Right: {"train_batch_size": 8}
    """
    for odd in view.document.oddities:
        if odd.kind == "duplicate-key":
            yield Finding(
                pointer="",
                span=(odd.start, odd.end),
                message=f"the key {odd.detail!r} appears twice in its section",
                hint="keep one of them",
                deepspeed="raises ValueError: duplicate keys",
            )
