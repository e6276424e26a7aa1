"""The dependencies: all that is imported, in ranges that they ask of each other and the tests ran with, no wider."""

import ast
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import distribution, packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
OURS = {canonicalize_name(need.name): need for need in map(Requirement, PROJECT["project"]["dependencies"])}
EXTRAS = PROJECT["project"]["optional-dependencies"]
OF_DEVELOPERS = {"test", "docs", "dev"}

# Imported only where a user asks for it, which ends with a line if the package is missing.
AT_CHOICE = {
    "triton": "kernels for a GPU; comes with torch's builds for CUDA and ROCm",
    "liger_kernel": "kernels for a GPU; --use_liger_kernel",
    "wandb": "a monitor; --report_to",
}


def lowest(bounds: SpecifierSet) -> Version:
    """The lower bound of a range."""
    (found,) = (Version(bound.version) for bound in bounds if bound.operator == ">=")
    return found


def pinned() -> dict[str, Version]:
    """The versions of constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = (line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    return {canonicalize_name(name): Version(version.split(";")[0].strip()) for name, version in pairs}


def imports(tree: ast.AST) -> Iterator[str]:
    """The top-level packages that a module imports while it runs, at its top or in a function."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names += [word.value for word in node.args if isinstance(word, ast.Constant)]
        yield from (name.partition(".")[0] for name in names)
        yield from imports(node)


def test_every_imported_package_is_declared() -> None:
    extras = [need for extra, needs in EXTRAS.items() if extra not in OF_DEVELOPERS for need in needs]
    declared = {*OURS, *(canonicalize_name(Requirement(need).name) for need in extras)}
    homes = packages_distributions()
    missing = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in (ROOT / "harness").rglob("*.py")
        for name in set(imports(ast.parse(path.read_text(encoding="utf-8"))))
        if name not in {"harness", *sys.stdlib_module_names, *AT_CHOICE}
        and not declared & {canonicalize_name(home) for home in homes.get(name, [name])}
    }
    assert missing == set()


@pytest.mark.parametrize("name", OURS)
def test_every_dependency_takes_the_lowest_python(name: str) -> None:
    wanted = distribution(name).metadata["Requires-Python"]
    assert SpecifierSet(wanted or "").contains(str(lowest(SpecifierSet(PROJECT["project"]["requires-python"]))))


@pytest.mark.parametrize("name", OURS)
def test_a_lower_bound_is_one_that_the_other_dependencies_take(name: str) -> None:
    for other in OURS:
        for need in map(Requirement, distribution(other).requires or []):
            if canonicalize_name(need.name) == name and (need.marker is None or need.marker.evaluate({"extra": ""})):
                assert need.specifier.contains(str(lowest(OURS[name].specifier))), f"{other} needs {need}"


@pytest.mark.parametrize("name", OURS)
def test_the_tested_version_lies_in_its_range(name: str) -> None:
    assert OURS[name].specifier.contains(pinned()[name])


@pytest.mark.parametrize("name", ["transformers", "deepspeed"])
def test_no_release_before_the_tested_one_is_promised(name: str) -> None:
    assert lowest(OURS[name].specifier).release[:2] == pinned()[name].release[:2]


def test_the_oldest_torch_that_is_promised_is_tried_each_week() -> None:
    workflow = (ROOT / ".github/workflows/newest.yml").read_text(encoding="utf-8")
    major, minor = lowest(OURS["torch"].specifier).release[:2]
    assert f'pip install "torch=={major}.{minor}.*"' in workflow


def test_tools_read_the_lowest_python() -> None:
    release = lowest(SpecifierSet(PROJECT["project"]["requires-python"])).release
    assert PROJECT["tool"]["ruff"]["target-version"] == "py{}{}".format(*release)
    assert PROJECT["tool"]["mypy"]["python_version"] == "{}.{}".format(*release)
