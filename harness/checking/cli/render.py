"""Print findings as text, as JSON, as GitHub annotations, or as SARIF."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO
from urllib.parse import quote

from harness.checking.registry import RULES
from harness.config.text.diagnostic import Diagnostic, Severity
from harness.config.values.json_object import JsonObject
from harness.config.values.secrets import masked_by_name
from harness.errors import printable

FORMATS = ("text", "json", "github", "sarif")
_COLOURS = {Severity.ERROR: "31", Severity.WARNING: "33", Severity.INFO: "36"}
_WIDTH = 160  # longer source lines are cut around the finding


def shows_colour(stream: TextIO) -> bool:
    """Return whether to print colours: on a terminal, unless NO_COLOR is set to anything (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR")


def render(findings: Sequence[Diagnostic], style: str, texts: dict[str, str], *, colour: bool, files: int) -> str:
    """Return all findings in one of FORMATS; `texts` maps each file's path to its content."""
    if style == "json":
        return json.dumps([as_json(finding) for finding in findings], indent=2)
    if style == "sarif":
        return json.dumps(sarif(findings), indent=2)
    if style == "github":
        return "\n".join(_annotation(finding) for finding in findings)
    blocks = [text_block(finding, texts.get(finding.file, ""), colour=colour) for finding in findings]
    return "\n\n".join([*blocks, "\n".join([summary(findings, files), *_remedies(findings)])])


def as_json(finding: Diagnostic) -> JsonObject:
    """Return a finding as the documented JSON object."""
    return {
        "file": finding.file,
        "code": finding.code,
        "severity": finding.severity.value,
        "pointer": finding.pointer,
        "line": finding.line,
        "column": finding.column,
        "message": finding.message,
        "hint": finding.hint,
        "deepspeed": finding.deepspeed,
    }


def text_block(finding: Diagnostic, text: str, *, colour: bool) -> str:
    """Format a finding: message, source line with the key underlined, DeepSpeed's behaviour, and the remedy."""
    paint = _COLOURS[finding.severity] if colour else ""

    def painted(words: str, style: str = "") -> str:
        code = ";".join(filter(None, (style, paint)))
        return f"\x1b[{code}m{words}\x1b[0m" if colour else words

    head = painted(f"{finding.severity.value}[{finding.code}]", "1") + f": {printable(finding.message)}"
    gutter = " " * len(str(finding.line))
    lines = [head]
    if finding.file:
        lines.append(f"{gutter}--> {printable(finding.file)}:{finding.line}:{finding.column}")
    source = masked_by_name(text.split("\n")[finding.line - 1]) if text and finding.file else ""
    if source.strip():
        start = max(0, finding.column - 1 - _WIDTH // 2) if len(source) > _WIDTH else 0
        shown = source[start : start + _WIDTH].replace("\t", " ").rstrip("\r")
        mark = " " * (finding.column - 1 - start) + "^" * max(1, min(finding.length, _WIDTH))
        lines += [f"{gutter} |", f"{finding.line} | {printable(shown)}", f"{gutter} | {painted(mark[:_WIDTH])}"]
    for name, words in (("deepspeed", finding.deepspeed), ("help", finding.hint)):
        if words:
            lines.append(f"{gutter} = {name}: {printable(words)}")
    return "\n".join(lines)


def summary(findings: Sequence[Diagnostic], files: int) -> str:
    """Return a count, such as `2 errors, 1 warning in 3 files`."""
    counts = Counter(finding.severity for finding in findings)
    plurals = {Severity.ERROR: "errors", Severity.WARNING: "warnings", Severity.INFO: "hints"}
    singular = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "hint"}
    parts = [f"{counts[s]} {singular[s] if counts[s] == 1 else plurals[s]}" for s in Severity if counts[s]]
    where = f"{files} file" + ("" if files == 1 else "s")
    return f"{', '.join(parts)} in {where}" if parts else f"{where} checked, no problems found"


def _remedies(findings: Sequence[Diagnostic]) -> list[str]:
    """Return a line that counts the findings that --fix and --unsafe-fixes can fix; no line if there are none."""
    safe = sum(bool(finding.edits) and finding.is_safe for finding in findings)
    unsafe = sum(bool(finding.edits) and not finding.is_safe for finding in findings)
    parts = [f"{safe} with --fix"] * bool(safe) + [f"{unsafe} with --fix --unsafe-fixes"] * bool(unsafe)
    return [f"fixes available: {', '.join(parts)}"] if parts else []


def _annotation(finding: Diagnostic) -> str:
    """Return a workflow command that GitHub shows beside the line."""
    level = {"info": "notice"}.get(finding.severity.value, finding.severity.value)
    place = f"file={_escape(finding.file, ':,')},line={finding.line},col={finding.column},title={finding.code}"
    words = printable(finding.message + (f"; {finding.hint}" if finding.hint else ""))
    return f"::{level} {place}::{_escape(words)}"


def _escape(words: str, more: str = "") -> str:
    for char in "%\r\n" + more:
        words = words.replace(char, f"%{ord(char):02X}")
    return words


def sarif(findings: Sequence[Diagnostic]) -> JsonObject:
    """Return the findings as a SARIF 2.1.0 log, the format of code-scanning services."""
    rules = [
        {
            "id": rule.code,
            "name": rule.name,
            "shortDescription": {"text": rule.title},
            "fullDescription": {"text": rule.page},
            "defaultConfiguration": {"level": _level(rule.severity)},
        }
        for rule in RULES
    ]
    driver = {"name": "ds-harness", "rules": rules}
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "results": [_result(finding) for finding in findings]}],
    }


def _level(severity: Severity) -> str:
    return "note" if severity is Severity.INFO else severity.value


def _result(finding: Diagnostic) -> JsonObject:
    region = {"startLine": finding.line, "startColumn": finding.column, "endColumn": finding.column + finding.length}
    location = {"artifactLocation": {"uri": quote(Path(finding.file).as_posix())}, "region": region}
    words = finding.message + (f"; {finding.hint}" if finding.hint else "")
    return {
        "ruleId": finding.code,
        "level": _level(finding.severity),
        "message": {"text": words},
        "locations": [{"physicalLocation": location}],
    }
