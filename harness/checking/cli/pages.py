"""Write the documentation of the rules: one page for each, made from its docstring and its examples.

`python -m harness.checking.cli.pages` writes docs/rules; a test fails if the pages there are out of date.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from harness.checking.registry import RULES
from harness.checking.rules.rule import Rule
from harness.checking.schema import supported

_TABLE: dict[str, dict[str, str]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
STRICTER = _TABLE["stricter"]
"""Pointer -> why some of its values are errors here although DeepSpeed's parser accepts them."""
LENIENT = _TABLE["lenient"]
"""Pointer -> why some of its values pass here although DeepSpeed's parser refuses them on some machines."""


def page(rule: Rule) -> str:
    """Return a rule's page in Markdown."""
    options = "".join(f" --{name} {value}" for name, value in rule.options.items() if name != "arguments")
    arguments = "".join(f" --{name} {value}" for name, value in rule.options.get("arguments", {}).items())
    verb = "resolve" if {*rule.options.get("arguments", {})} - {"fp8"} else "check"  # which has that flag alone
    return "\n".join(
        [
            f"# {rule.code} {rule.name} ({rule.severity.value})",
            "",
            rule.page,
            "",
            f"Raised by `ds-harness {verb}{options}{arguments}`; {_TABLE['claims'][rule.claim]}.",
            "",
            "```json",
            pretty(rule.wrong),
            "```",
            "",
            "Use instead:",
            "",
            "```json",
            pretty(rule.right),
            "```",
            "",
        ]
    )


def pretty(text: str) -> str:
    """Return an example with one key per line; unchanged if it is not plain JSON or has duplicate keys."""
    try:
        data = json.loads(text)
    except ValueError:
        return text
    return text if len(json.dumps(data)) != len(text) else json.dumps(data, indent=2)


def index() -> str:
    """Return the list of all rules in Markdown."""
    low, high = supported()
    rows = [f"| [{r.code}]({r.code}.md) | {r.name} | {r.severity.value} | {r.title} |" for r in RULES]
    stricter, lenient = (
        "\n".join(f"- `{pointer.strip('/').replace('/', '.')}`: {reason}" for pointer, reason in reasons.items())
        for reasons in (STRICTER, LENIENT)
    )
    text = Path(__file__).with_suffix(".md").read_text(encoding="utf-8")
    return text.format(low=low, high=high, rows="\n".join(rows), stricter=stricter, lenient=lenient)


def pages() -> dict[str, str]:
    """Return name -> content of every file of docs/rules."""
    return {"README.md": index()} | {f"{rule.code}.md": page(rule) for rule in RULES}


def main() -> None:
    """Write the pages to docs/rules in the working directory, and remove those of rules that no longer exist."""
    folder = Path("docs/rules")
    folder.mkdir(parents=True, exist_ok=True)
    wanted = pages()
    for stale in {path.name for path in folder.glob("*.md")} - wanted.keys():
        (folder / stale).unlink()
    for name, text in wanted.items():
        (folder / name).write_text(text, "utf-8")
    print(f"{len(wanted)} pages in {folder}", file=sys.stderr)


if __name__ == "__main__":
    main()
