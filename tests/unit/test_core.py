"""The core: all that is read with the Trainer, found from the sources. It holds no part, and it only gets smaller."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from harness import TrainingArguments, UserError
from harness.training.trainer import Trainer

ROOT = Path(__file__).resolve().parents[2]
CORE = "harness.training.trainer"
PARTS = (
    "harness.cluster",
    "harness.compat",
    "harness.composition",
    "harness.dry_run",
    "harness.parity",
    "harness.huggingface",
    "harness.installed",
    "harness.planner",
    "harness.resilience.watch",
    "harness.report",
)
MOST_LINES = 47_100


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(path): path for path in (ROOT / "harness").rglob("*.py")}


def imported(name: str) -> set[str]:
    """The modules that a module imports, in functions and for types too, and the packages that they lie in."""
    path = MODULES[name]
    package = (name if path.name == "__init__.py" else name.rpartition(".")[0]).split(".")
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    folders = {module[:end] for module in found for end, letter in enumerate(module) if letter == "."}
    return (found | folders) & MODULES.keys()


def closure(name: str) -> set[str]:
    found: set[str] = set()
    waiting = {name}
    while waiting:
        found |= waiting
        waiting = {target for module in waiting for target in imported(module)} - found
    return found


def test_the_core_imports_no_part_and_grows_no_more() -> None:
    core = closure(CORE)
    assert [name for name in sorted(core) if f"{name}.".startswith(tuple(f"{part}." for part in PARTS))] == []
    lines = sum(len(MODULES[name].read_text(encoding="utf-8").splitlines()) for name in core)
    assert MOST_LINES - 300 < lines <= MOST_LINES, "lower MOST_LINES when the core has become smaller"


def test_a_flag_that_needs_an_absent_part_is_refused_in_one_line() -> None:
    with pytest.raises(UserError, match=r"^--profile needs harness\.report, which is not installed"):
        Trainer(model="tiny-llama", args=TrainingArguments(profile=2))


def test_an_argument_that_the_core_does_not_take_is_refused_in_one_line() -> None:
    with pytest.raises(UserError, match=r"^Trainer takes no tokenizer: leave it out$"):
        Trainer(model="tiny-llama", args=TrainingArguments(), tokenizer=None)
