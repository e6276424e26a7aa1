"""The version ranges of pyproject.toml: what the dependencies ask of each other and the tests ran with, no wider."""

import tomllib
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
OURS = {need.name: need for need in map(Requirement, PROJECT["project"]["dependencies"])}


def lowest(bounds: SpecifierSet) -> Version:
    """The lower bound of a range."""
    (found,) = (Version(bound.version) for bound in bounds if bound.operator == ">=")
    return found


def pinned() -> dict[str, Version]:
    """The versions of constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = (line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    return {name.lower(): Version(version.split(";")[0].strip()) for name, version in pairs}


@pytest.mark.parametrize("name", OURS)
def test_every_dependency_takes_the_lowest_python(name: str) -> None:
    wanted = distribution(name).metadata["Requires-Python"]
    assert SpecifierSet(wanted or "").contains(str(lowest(SpecifierSet(PROJECT["project"]["requires-python"]))))


@pytest.mark.parametrize("name", OURS)
def test_a_lower_bound_is_one_that_the_other_dependencies_take(name: str) -> None:
    for other in OURS:
        for need in map(Requirement, distribution(other).requires or []):
            if need.name == name and (need.marker is None or need.marker.evaluate({"extra": ""})):
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
