"""The report as files: drawn by a real browser, and as pictures by a process of its own."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.browser import dom_of, needs_browser
from tests.support.report_runs import made, write_other, write_run

pytestmark = pytest.mark.ranks


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "first")


@pytest.fixture
def other(run: Path) -> Path:
    return write_other(run)


def test_pictures_are_written_without_a_browser_and_torch_is_not_imported(run: Path, other: Path) -> None:
    pytest.importorskip("matplotlib")
    code = (
        "import sys; from harness.cli import main; code = main(sys.argv[1:]); sys.exit(code or 'torch' in sys.modules)"
    )
    words = ["report", run, other, "--png", run.parent / "png"]
    done = subprocess.run([sys.executable, "-c", code, *map(str, words)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.splitlines()[0]) == run / "report.html"
    for name in ("loss", "tokens_per_second", "first-timeline", "first-layers", "first-memory", "second-stages"):
        content = (run.parent / f"png/{name}.png").read_bytes()
        width, height = struct.unpack(">II", content[16:24])
        assert content.startswith(b"\x89PNG") and width >= 700 and height >= 250


@needs_browser
def test_a_browser_draws_every_figure(run: Path, tmp_path: Path) -> None:
    _, figures = made(tmp_path / "report.html", run)
    shown = dom_of(tmp_path / "report.html")
    page = shown.rpartition('id="figures"')[0] or shown
    assert 'data-theme="light"' in page or 'data-theme="dark"' in page
    for name, figure in figures.items():
        drawn = page.partition(f'id="{name}"')[2].partition("</figure>")[0]
        assert "main-svg" in drawn, f"{name} is not drawn"
        bars = sum(len(trace["x"]) for trace in figure["data"] if trace["type"] == "bar" and trace["visible"] is True)
        assert drawn.count('class="point"') >= bars if bars else "scatterlayer" in drawn
