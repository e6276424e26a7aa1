"""Apply the remedies of findings to a config's text.

A safe remedy does not change the training: it removes what DeepSpeed ignores, writes a value as DeepSpeed converts it,
and corrects what DeepSpeed refuses if it can mean only one thing. An unsafe remedy makes a key take effect that did
not, or guesses what was meant.

One finding is fixed at a time and the text is checked again, so remedies cannot overlap, and one that has become
unnecessary is never applied. A remedy that would cause a new error, or would not settle, is left to the user.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from harness.config.checking.check import check
from harness.config.checking.registry import by_code
from harness.config.rules.view import Target
from harness.config.text.diagnostic import ConfigError, Diagnostic, Severity
from harness.config.text.document import Document, from_text
from harness.config.text.edits import apply

_ROUNDS = 500  # far more than a config has keys; bounds the loop for any text


@dataclass(frozen=True, kw_only=True)
class Fixed:
    """The text after all remedies, and the findings that they have fixed."""

    text: str
    applied: tuple[Diagnostic, ...]


def fix(
    document: Document, *, world_size: int | None = None, target: Target = "harness", unsafe: bool = False
) -> Fixed:
    """Apply every safe remedy whose result DeepSpeed's parser accepts; with `unsafe` the others too."""
    applied: list[Diagnostic] = []
    refused: set[tuple[str, str, str]] = set()
    for _ in range(_ROUNDS):
        findings = check(document, world_size=world_size, target=target)
        chosen = next((item for item in findings if _applies(item, unsafe) and _key(item) not in refused), None)
        if chosen is None:
            break
        better = _try(document, chosen, findings, world_size, target)
        if better is None:
            refused.add(_key(chosen))
        else:
            applied.append(chosen)
            document = better
            refused.clear()  # what did not help before may help now
    return Fixed(text=document.text, applied=tuple(applied))


def _applies(finding: Diagnostic, unsafe: bool) -> bool:
    return bool(finding.edits) and (finding.is_safe or unsafe)


def _key(finding: Diagnostic) -> tuple[str, str, str]:
    return finding.code, finding.pointer, finding.message


def _try(
    document: Document, chosen: Diagnostic, before: list[Diagnostic], world_size: int | None, target: Target
) -> Document | None:
    """Return the document after one remedy; None if it cannot be read, or has a new error."""
    text = apply(document.text, chosen.edits)
    if text == document.text:
        return None
    try:
        after = from_text(text, document.path)
    except ConfigError:
        return None
    if chosen.code == "DS002" and after.data != document.data:
        return None  # a safe remedy must not change the config's values
    findings = check(after, world_size=world_size, target=target)
    if _key(chosen) in {_key(item) for item in findings}:
        return None  # it did not help
    known = {(item.code, item.pointer) for item in before}
    new = [item for item in findings if item.severity is Severity.ERROR and (item.code, item.pointer) not in known]
    return None if any(_is_refusal(item) for item in new) else after


def _is_refusal(finding: Diagnostic) -> bool:
    rule = by_code(finding.code)
    return rule is None or rule.claim in ("refuses", "engine") or finding.code.startswith("DS1")


def diff(path: str, before: str, after: str, *, colour: bool = False) -> str:
    """Return a unified diff of two texts."""
    lines = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), path, path + " (fixed)"
    )
    styled = []
    for line in lines:
        end = "" if line.endswith("\n") else "\n"
        shade = {"+": "32", "-": "31"}.get(line[0]) if colour else None
        styled.append(f"\x1b[{shade}m{line.rstrip()}\x1b[0m\n" if shade else line + end)
    return "".join(styled).rstrip("\n")
