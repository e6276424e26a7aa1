"""The documentation of the rules: one page a rule, made from its docstring and its examples.

`python -m harness.config.pages` writes docs/rules anew; a test fails when the pages there are not these.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from harness.config.registry import RULES
from harness.config.rule import Rule
from harness.config.schema import supported

_CLAIMS = {
    "refuses": "DeepSpeed's config parser refuses the wrong example",
    "engine": "DeepSpeed's parser takes the wrong example, `deepspeed.initialize` refuses it",
    "runs": "DeepSpeed takes the wrong example and starts",
    "elsewhere": "it shows in a run of several ranks, or with a model",
}


def page(rule: Rule) -> str:
    """A rule's page in Markdown."""
    options = "".join(f" --{name} {value}" for name, value in rule.options.items() if name != "arguments")
    arguments = "".join(f" --{name} {value}" for name, value in rule.options.get("arguments", {}).items())
    verb = "resolve" if arguments else "check"
    return "\n".join(
        [
            f"# {rule.code} {rule.name} ({rule.severity.value})",
            "",
            rule.page,
            "",
            f"Raised by `ds-harness {verb}{options}{arguments}`; {_CLAIMS[rule.claim]}.",
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
    """An example with one key a line, unless it is not plain JSON or has duplicate keys: then as it is."""
    try:
        data = json.loads(text)
    except ValueError:
        return text
    return text if len(json.dumps(data)) != len(text) else json.dumps(data, indent=2)


def index() -> str:
    """The list of all rules in Markdown."""
    low, high = supported()
    rows = [f"| [{r.code}]({r.code}.md) | {r.name} | {r.severity.value} | {r.title} |" for r in RULES]
    return "\n".join(
        [
            "# Rules of `ds-harness check`",
            "",
            f"They speak of DeepSpeed {low} up to (not including) {high}. An **error** is what DeepSpeed, or the"
            " program named by `--target`, refuses; a **warning** runs, but not as it is written; an **info** is"
            " advice with a number behind it.",
            "",
            "| code | name | severity | what it finds |",
            "|---|---|---|---|",
            *rows,
            "",
        ]
    )


def pages() -> dict[str, str]:
    """Every file of docs/rules with its content."""
    return {"README.md": index()} | {f"{rule.code}.md": page(rule) for rule in RULES}


def main() -> None:
    """Writes the pages to docs/rules below the working directory, and removes those of rules that are gone."""
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
