"""Apply the remedies of findings to a config's text.

A safe remedy does not change the training. It removes a key that DeepSpeed ignores, writes a value in the form to which
DeepSpeed converts it, or corrects an error that can mean only one thing. An unsafe remedy guesses what was meant, or
makes an ignored key take effect.

`fix` applies one remedy, checks the text again, and goes on. So remedies cannot overlap, and each one has an effect.
It leaves a remedy to the user if that causes a new error or does not remove its finding.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace

from harness.checking.check import check
from harness.checking.registry import by_code
from harness.checking.rules.edits import apply
from harness.checking.rules.view import Target
from harness.config.text.diagnostic import ConfigError, Diagnostic, Severity
from harness.config.text.document import Document, from_text

_ROUNDS = 500  # far more than a config has keys; bounds the loop for any text


@dataclass(frozen=True, kw_only=True)
class Fixed:
    """The text after all remedies, and the findings that they have fixed."""

    text: str
    applied: tuple[Diagnostic, ...]


def fix(
    document: Document, *, world_size: int | None = None, target: Target = "harness", unsafe: bool = False
) -> Fixed:
    """Apply every safe remedy, with `unsafe` the others too, unless DeepSpeed's parser would refuse the result."""
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


def with_usable_remedies(
    document: Document, findings: list[Diagnostic], *, world_size: int | None = None, target: Target = "harness"
) -> list[Diagnostic]:
    """Return findings without the remedies that `fix` would leave to the user."""
    return [
        item
        if not item.edits or _try(document, item, findings, world_size, target) is not None
        else replace(item, edits=())
        for item in findings
    ]


def _applies(finding: Diagnostic, unsafe: bool) -> bool:
    return bool(finding.edits) and (finding.is_safe or unsafe)


def _key(finding: Diagnostic) -> tuple[str, str, str]:
    return finding.code, finding.pointer, finding.message


def _try(
    document: Document, chosen: Diagnostic, before: list[Diagnostic], world_size: int | None, target: Target
) -> Document | None:
    """Apply one remedy and return the new document; None if the finding stays, or a new error appears."""
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
        return None  # the finding is still there
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
