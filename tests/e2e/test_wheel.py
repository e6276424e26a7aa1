"""The wheel, built once and installed into an empty folder: all of `harness` travels, nothing else is added.

It is built from a copy, so that the checkout stays clean, and used from outside the checkout. The
dependencies are those of the environment that runs the tests; the wheel's folder comes first on the path.
"""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("harness", "models", "ds_configs", "pyproject.toml", "README.md", "LICENSE")


def pip(*arguments: object) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def is_behind_a_link(path: Path) -> bool:
    return path.parent.resolve() != path.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for part in PARTS:
        if (ROOT / part).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / part, copy / part, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / part, copy / part)
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", out, copy)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def run(wheel, tmp_path_factory):
    """Run the environment's Python in an empty folder, with the installed wheel first on its path."""
    site, outside = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("outside")
    pip("install", "--no-deps", "--no-index", "--no-compile", "--target", site, wheel)

    def call(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "PYTHONPATH": str(site), **environment}
        command = [sys.executable, *arguments]
        return subprocess.run(command, cwd=outside, env=env, capture_output=True, text=True, timeout=120)

    done = call("-c", "import harness; print(harness.__file__)")
    assert done.stdout.startswith(str(site)), done.stdout + done.stderr
    return call


def test_it_adds_one_package_and_nothing_else(wheel):
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"harness"}


def test_every_module_and_every_file_that_it_reads_travels(wheel):
    expected = {
        str(path.relative_to(ROOT) if top == "harness" else Path("harness", path.relative_to(ROOT)))
        for top in ("harness", "models", "ds_configs")
        for path in (ROOT / top).rglob("*")
        if path.suffix in {".py", ".pyi", ".json", ".typed", ".css", ".js", ".html", ".md"}
        and not is_behind_a_link(path)
    }
    assert {"harness/ds_configs/zero3.json", "harness/models/presets/tiny-llama/config.json"} < expected
    carried = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("harness/")}
    assert carried == expected


@pytest.mark.thorough
def test_a_preset_is_found_by_its_name(run):
    done = run("-c", "from harness import load; print(load('zero3').data['zero_optimization']['stage'])")
    assert done.stdout.strip() == "3", done.stderr


@pytest.mark.thorough
def test_the_planner_page_is_written_from_the_installed_sources(run):
    asked = ("--model", "tiny-llama", "--world_size", "2", "--hardware", "h100", "--page", "page.html")
    code = "import sys; from harness.cli import main; sys.exit(main())"
    done = run("-c", code, "plan", *asked, PATH="")
    assert done.returncode == 0, done.stderr
    size = run("-c", "from pathlib import Path; print(Path('page.html').stat().st_size)")
    assert int(size.stdout) > 100_000


def test_the_package_imports_without_torch_or_a_compiler(run):
    code = "import sys, harness, harness.config; print({'torch', 'deepspeed'} & set(sys.modules))"
    done = run("-c", code, PATH="", HF_HUB_OFFLINE="1")
    assert done.stdout.strip() == "set()", done.stderr


def test_the_entry_points_explain_themselves_outside_the_checkout(run):
    train = run("-m", "harness.train", "--help")
    assert train.returncode == 0 and "--deepspeed_config" in train.stdout, train.stderr
    code = "import sys; from harness.cli import main; sys.argv = ['ds-harness', '--help']; sys.exit(main())"
    verbs = run("-c", code)
    assert verbs.returncode == 0 and "check" in verbs.stdout, verbs.stderr
