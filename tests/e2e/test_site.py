"""The docs build strictly, into a site that is whole by itself."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ranks, pytest.mark.thorough]
pytest.importorskip("mkdocs", reason="the docs extra is not installed: pip install -c constraints.txt -e .[docs]")
ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The docs, built strictly."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_site_has_every_page_and_loads_nothing_from_elsewhere(site: Path) -> None:
    for page in [*DOCS.glob("*.md"), *DOCS.glob("contributing/*.md")]:
        html = site / page.relative_to(DOCS).with_suffix("") / "index.html"
        assert (html.parent.parent if page.stem == "index" else html.parent).joinpath("index.html").is_file(), page
    for html in site.rglob("*.html"):
        loaded = re.findall(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=\"?(https?://[^\s\">]+)", html.read_text())
        assert loaded == [], html
    trainer = (site / "trainer/index.html").read_text()
    for method in ("train", "evaluate", "save_model", "trained_model"):
        assert f'id="harness.Trainer.{method}"' in trainer
