"""What GitHub, pre-commit and the package index read: it parses, it names what exists, and its versions agree."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
YAML_FILES = sorted({*(ROOT / ".github").rglob("*.yml"), *ROOT.glob("*.yml"), *ROOT.glob(".pre-commit*.yaml")})


def read(path: str | Path) -> Any:
    return yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


def jobs() -> dict[str, dict[str, Any]]:
    """Every job of every workflow."""
    return {f"{path.stem}.{name}": job for path in WORKFLOWS for name, job in read(path)["jobs"].items()}


def commands() -> list[str]:
    """Every command that a workflow runs."""
    return [step["run"] for job in jobs().values() for step in job["steps"] if "run" in step]


@pytest.mark.parametrize("path", [*YAML_FILES, ROOT / "CITATION.cff"], ids=lambda p: p.name)
def test_it_is_yaml_without_duplicate_keys(path: Path) -> None:
    node = yaml.compose(path.read_text(encoding="utf-8"))
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if isinstance(node, yaml.MappingNode):
            keys = [key.value for key, _ in node.value]
            assert len(keys) == len(set(keys)), keys
            waiting += [value for _, value in node.value]
        elif isinstance(node, yaml.SequenceNode):
            waiting += node.value


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda p: p.stem)
def test_a_workflow_has_the_parts_that_github_asks_for(path: Path) -> None:
    workflow = read(path)
    assert True in workflow or "on" in workflow  # YAML 1.1 reads a bare `on` as true
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert job["runs-on"] and job["timeout-minutes"] and job["steps"]
        assert all(("uses" in step) != ("run" in step) for step in job["steps"])
        assert set(job.get("needs", "").split()) <= set(workflow["jobs"])


def test_actions_are_used_at_one_version_each() -> None:
    used = {step["uses"] for job in jobs().values() for step in job["steps"] if "uses" in step}
    assert all(re.fullmatch(r"[\w.-]+/[\w./-]+@[\w./-]+", name) for name in used), used
    assert len({name.split("@")[0] for name in used}) == len(used), sorted(used)


def test_the_scripts_that_workflows_start_can_be_run() -> None:
    named = {name for line in commands() for name in re.findall(r"\./(scripts/\w+)", line)}
    assert {"scripts/check", "scripts/test", "scripts/shard"} <= named
    assert all(os.access(ROOT / name, os.X_OK) for name in named)
    modules = {name for line in commands() for name in re.findall(r"python3? (scripts/\w+\.py)", line)}
    assert modules and all((ROOT / name).is_file() for name in modules)


def test_the_tested_pythons_are_the_promised_ones() -> None:
    tested = jobs()["ci.unit"]["strategy"]["matrix"]["python"]
    promised = [name.rsplit(" ", 1)[1] for name in PROJECT["classifiers"] if re.search(r"Python :: 3\.\d+$", name)]
    assert tested == promised
    assert PROJECT["requires-python"] == f">={tested[0]}"


def test_the_shards_are_all_files_with_ranks_and_none_twice() -> None:
    run = next(step["run"] for step in jobs()["ci.ranks"]["steps"] if "scripts/shard" in step.get("run", ""))
    shards = jobs()["ci.ranks"]["strategy"]["matrix"]["shard"]
    (parts,) = re.findall(r"shard \$\{\{ matrix.shard \}\} (\d+)", run)
    assert shards == list(range(1, int(parts) + 1))
    files: list[str] = []
    for shard in shards:
        done = subprocess.run([ROOT / "scripts/shard", str(shard), parts], capture_output=True, text=True, check=True)
        files += done.stdout.split()
    expected = {
        str(path.relative_to(ROOT))
        for folder in ("distributed", "e2e", "simulated_device")
        for path in ROOT.glob(f"tests/{folder}/test_*")
    }
    assert len(files) == len(set(files)) and set(files) == expected
    assert subprocess.run([ROOT / "scripts/shard", "5", "4"], capture_output=True).returncode == 2


def test_commit_hooks_use_the_versions_of_the_checks() -> None:
    hooks = [hook for repo in read(".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]]
    needed = {need for hook in hooks for need in hook.get("additional_dependencies", [])}
    assert needed and needed <= set(PROJECT["optional-dependencies"]["dev"])
    assert all(".venv" not in hook["entry"] for hook in hooks)


def test_the_citation_is_of_this_version() -> None:
    citation = read("CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])


@pytest.mark.parametrize("path", sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("[!c]*.yml")), ids=lambda p: p.stem)
def test_an_issue_form_has_what_github_asks_for(path: Path) -> None:
    form = read(path)
    assert form["name"] and form["description"]
    ids = [item["id"] for item in form["body"]]
    assert len(ids) == len(set(ids))
    for item in form["body"]:
        assert item["type"] in {"textarea", "input", "dropdown"} and item["attributes"]["label"]


def release(tmp_path: Path, tag: str, repository: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Run the release script on a copy of pyproject.toml; returns what it said and what the copy then holds."""
    copy = tmp_path / "pyproject.toml"
    copy.write_bytes((ROOT / "pyproject.toml").read_bytes())
    command = [sys.executable, str(ROOT / "scripts/release_metadata.py"), "--file", str(copy)]
    done = subprocess.run([*command, "--tag", tag, "--repository", repository], capture_output=True, text=True)
    return done, tomllib.loads(copy.read_text(encoding="utf-8"))["project"]


def test_a_release_carries_the_addresses_of_its_repository(tmp_path: Path) -> None:
    done, project = release(tmp_path, f"v{PROJECT['version']}", "https://git.example/owner/name")
    assert done.returncode == 0, done.stderr
    assert project["urls"]["Issues"] == "https://git.example/owner/name/issues"
    assert {**project, "urls": None} == {**PROJECT, "urls": None}


@pytest.mark.parametrize(("tag", "repository"), [("v9.9.9", "https://git.example/o/n"), (None, "git@host:o/n")])
def test_a_release_under_a_wrong_name_is_refused(tmp_path: Path, tag: str | None, repository: str) -> None:
    done, project = release(tmp_path, tag or f"v{PROJECT['version']}", repository)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert "urls" not in project


def test_an_image_gets_what_is_installed_and_the_script_and_nothing_else() -> None:
    lines = [line for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines() if line[:1] != "#"]
    links = {path.resolve().name for path in (ROOT / "harness").iterdir() if path.is_symlink()}
    read = {"pyproject.toml", PROJECT["readme"], *PROJECT["license-files"], "harness", *links}
    assert lines[0] == "*"
    assert {line.removeprefix("!") for line in lines if line.startswith("!")} == {
        *read,
        "constraints.txt",
        "scripts/train.py",
    }


def test_an_editable_install_is_a_folder_that_type_checkers_find_and_no_other_folder_hides(tmp_path: Path) -> None:
    checkout, site = tmp_path / "checkout", tmp_path / "site"
    shutil.copytree(ROOT / "harness", checkout / "harness", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", PROJECT["readme"], *PROJECT["license-files"]):
        shutil.copy(ROOT / name, checkout)
    site.mkdir()
    build = f"from setuptools import build_meta; build_meta.build_editable({str(site)!r})"
    subprocess.run([sys.executable, "-W", "ignore", "-c", build], cwd=checkout, check=True, capture_output=True)
    with zipfile.ZipFile(next(site.glob("*.whl"))) as wheel:
        wheel.extractall(site)
    assert [path.read_text("utf-8").strip() for path in site.glob("*.pth")] == [str(checkout)]
    (tmp_path / "elsewhere/harness").mkdir(parents=True)
    find = f"import site; site.addsitedir({str(site)!r}); import harness; print(harness.__file__)"
    found = subprocess.run(
        [sys.executable, "-S", "-c", find], cwd=tmp_path / "elsewhere", capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == str(checkout / "harness/__init__.py")
