"""The core: all modules that are read with the Trainer, and the tests that run where nothing else is installed.

Both are found from imports in the sources, those in functions and for types too.
"""

from __future__ import annotations

import ast
import shutil
import sys
from collections.abc import Mapping, Set
from functools import cache
from pathlib import Path
from types import MappingProxyType

from harness.installed import PARTS

ROOT = Path(__file__).resolve().parents[2]
CORE = "harness.training.trainer"
AROUND = ("harness.command_line", "harness.composition", "harness.installed")
"""What lies above the core and stays without parts."""
DEVICE = "tests.support.simulated_device.device"
FINDS_PARTS = frozenset({"harness", "harness.composition", "harness.installed", DEVICE})
"""Modules that import a part only if it is installed, or asked for."""

# An editable install finds modules of the checkout that the copy lacks.
ONLY_THE_COPY = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in getattr(finder, "__module__", "")]
"""


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def modules() -> Mapping[str, Path]:
    """The sources of the package and of its tests, by module."""
    return MappingProxyType(
        {module_name(path): path for top in ("harness", "tests") for path in (ROOT / top).rglob("*.py")}
    )


@cache
def imported(name: str) -> Set[str]:
    """The modules that a module imports, in functions and for types too, and the packages that they lie in."""
    path = modules()[name]
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
    return (found | folders) & modules().keys()


def closure(name: str, ends: Set[str] = frozenset()) -> set[str]:
    """All modules that are read with one; what modules in `ends` import is not followed."""
    found: set[str] = set()
    waiting = {name}
    while waiting:
        found |= waiting
        waiting = {target for module in waiting - ends for target in imported(module)} - found
    return found


def lies_in(name: str, folders: tuple[str, ...]) -> bool:
    return f"{name}.".startswith(tuple(f"{folder}." for folder in folders))


def files_of_tests(folder: str) -> list[Path]:
    """The test files under a folder that import the core and nothing else of the package."""
    ours = closure(CORE) | FINDS_PARTS
    found = []
    for name, path in sorted(modules().items()):
        if path.name.startswith("test_") and lies_in(name, (folder,)):
            read = {each for each in closure(name, FINDS_PARTS) if lies_in(each, ("harness",))}
            if read - {"harness"} and read <= ours:
                found.append(path)
    return found


RANKS = ("tests/distributed/test_schedules.py",)
"""Tests of the core that start ranks: of many, those that need most of it."""


def copy_core(folder: Path, absent: tuple[str, ...] = PARTS) -> None:
    """Copy the package without some of its parts, and its data."""
    for name in ("harness", "models", "ds_configs"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for part in absent:
        shutil.rmtree(folder.joinpath(*part.split(".")))
    (folder / "sitecustomize.py").write_text(ONLY_THE_COPY)


def main(folder: Path) -> None:
    """Copy the core with its tests, and write down which these are."""
    copy_core(folder)
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "scripts"):
        (folder / name).symlink_to(ROOT / name)
    files = [*(path.relative_to(ROOT) for path in files_of_tests("tests.unit")), *RANKS]
    (folder / "tests-of-the-core").write_text("\n".join(map(str, files)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
