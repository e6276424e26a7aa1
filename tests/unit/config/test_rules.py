"""Each rule finds its wrong example and leaves its right neighbour alone; codes, pages and files agree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from harness.checking import check, resolve
from harness.checking.cli.pages import pages
from harness.checking.registry import RULES, by_code
from harness.checking.rules.rule import Rule
from harness.config import AutoValues
from harness.config.text.diagnostic import ConfigError, Diagnostic, Severity
from harness.config.text.document import from_text

ROOT = Path(__file__).resolve().parents[3]


def findings(rule: Rule, text: str) -> list[Diagnostic]:
    """What a whole check, or the resolution with the rule's arguments, says about one of its examples."""
    options = dict(rule.options)
    arguments = options.pop("arguments", None)
    try:
        document = from_text(text)
        values = None if arguments is None else AutoValues(**arguments, given=frozenset(arguments))
        if values is not None:
            resolve(document, values)
        return check(document, arguments=values, **options)
    except ConfigError as error:
        return error.diagnostics


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_the_wrong_example_raises_the_rule_with_reason_and_remedy(rule):
    found = [d for d in findings(rule, rule.wrong) if d.code == rule.code]
    assert found
    for item in found:
        assert item.message and not item.message.endswith(".")
        assert item.hint or item.severity is Severity.INFO
        assert item.deepspeed or rule.code == "DS951"  # DeepSpeed never sees the arguments
        assert item.line >= 1 and item.column >= 1


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_its_nearest_right_neighbour_is_left_alone(rule):
    found = findings(rule, rule.right)
    assert rule.code not in {d.code for d in found}
    assert not [d for d in found if d.severity is Severity.ERROR]


def test_codes_and_names_are_unique_and_in_order():
    assert len({rule.code for rule in RULES}) == len({rule.name for rule in RULES}) == len(RULES)
    assert [rule.code for rule in RULES] == sorted(rule.code for rule in RULES)


def test_a_rule_is_found_by_code_or_name_in_any_case():
    assert by_code("ds101") is by_code("misspelt-key") is not None
    assert by_code("DS000") is None


def test_every_page_says_something():
    assert all(len(rule.page) > 30 and rule.title.endswith(".") for rule in RULES)


def test_the_documentation_is_the_one_that_the_rules_make():
    folder = ROOT / "docs" / "rules"
    written = {path.name: path.read_text("utf-8") for path in folder.glob("*.md")}
    assert written == pages(), "run `python -m harness.checking.cli.pages`"


def test_resolving_refuses_nothing_by_itself():
    for path in (ROOT / "harness" / "config" / "resolving").glob("*.py"):
        assert not re.findall(r"DS\d{3}|UserError", path.read_text("utf-8")), path
