"""Runs on file systems that are no ext4: ramfs, which cannot reserve blocks, and a FUSE one that lacks more."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from ctypes.util import find_library
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.e2e.launching import ROOT, launch, metrics

pytestmark = pytest.mark.ranks


@pytest.fixture(params=["ramfs", "fuse"])
def mounted(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A folder on another file system."""
    place, server = tmp_path / "mounted", None
    place.mkdir()
    if os.getuid():
        pytest.skip("only root may mount")
    if request.param == "ramfs":
        if subprocess.run(["mount", "-t", "ramfs", "none", place], capture_output=True).returncode:
            pytest.skip("ramfs cannot be mounted here")
    else:
        library = os.environ.get("FUSE_LIBRARY_PATH") or find_library("fuse3") or find_library("fuse")
        if find_spec("mfusepy") is None or not library:
            pytest.skip("mfusepy or libfuse is not installed")
        (tmp_path / "behind").mkdir()
        command = [sys.executable, "-m", "tests.e2e.plain_fuse", tmp_path / "behind", place]
        server = subprocess.Popen(list(map(str, command)), cwd=ROOT)
        until = time.monotonic() + 10
        while not place.is_mount():
            if server.poll() is not None or time.monotonic() > until:
                pytest.skip("FUSE cannot be mounted here")
            time.sleep(0.05)
    yield place
    subprocess.run(["umount", "-l", place], check=True)
    if server is not None:
        server.terminate()  # a test of network namespaces may have copied the mount meanwhile, which keeps it up
        server.wait(10)


def test_a_run_saves_resumes_and_exports(mounted: Path, tmp_path: Path) -> None:
    text = tmp_path / "fox.txt"
    text.write_text("The quick brown fox jumps over the lazy dog; 0123456789. " * 60)
    flags = [
        "--deepspeed_config",
        "zero2",
        "--train_file",
        text,
        "--block_size",
        32,
        "--save_steps",
        2,
        "--output_dir",
        mounted / "run",
    ]
    first = launch(0, *flags, "--max_steps", 2)
    assert first.returncode == 0, first.stderr
    again = launch(0, *flags, "--max_steps", 4, "--resume_from_checkpoint", "auto", "--save_total_limit", 1)
    assert again.returncode == 0, again.stderr
    assert "cannot be" not in again.stdout + again.stderr, again.stdout + again.stderr
    assert [row["step"] for row in metrics(mounted / "run")] == [1, 2, 3, 4]
    assert (mounted / "run" / "model.safetensors").stat().st_size > 1000
    assert [path.name for path in (mounted / "run").glob("*checkpoint*")] == ["checkpoint-4"]
