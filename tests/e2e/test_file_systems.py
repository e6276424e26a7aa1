"""Runs on file systems that are no ext4: ramfs, which cannot reserve blocks, and a FUSE one that lacks more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from ctypes.util import find_library
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.e2e.launching import ROOT, launch
from tests.support.training import logged

pytestmark = pytest.mark.ranks


def mount_fuse(behind: Path, place: Path) -> subprocess.Popen[bytes] | None:
    """The server of a FUSE file system that shows `behind`; None if none can be mounted here."""
    library = os.environ.get("FUSE_LIBRARY_PATH") or find_library("fuse3") or find_library("fuse")
    if find_spec("mfusepy") is None or not library:
        return None
    server = subprocess.Popen([sys.executable, "-m", "tests.e2e.plain_fuse", behind, place], cwd=ROOT)
    until = time.monotonic() + 10
    while not place.is_mount():
        if server.poll() is not None or time.monotonic() > until:
            server.kill()
            return None
        time.sleep(0.05)
    return server


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[list[Path]]:
    """Folders on other file systems."""
    if os.getuid():
        pytest.skip("only root may mount")
    folders = {name: tmp_path / name for name in ("ramfs", "fuse", "behind")}
    for folder in folders.values():
        folder.mkdir()
    subprocess.run(["mount", "-t", "ramfs", "none", folders["ramfs"]], capture_output=True)
    server = mount_fuse(folders["behind"], folders["fuse"])
    found = [folder for folder in folders.values() if folder.is_mount()]
    yield found or pytest.skip("nothing can be mounted here")
    for folder in found:
        subprocess.run(["umount", "-l", folder], check=True)
    if server is not None:
        server.terminate()  # a test of network namespaces may have copied the mount meanwhile, which keeps it up
        server.wait(10)


RUNS = """
import json, sys
from harness.train import main
sys.exit(max(main(words) for words in json.loads(sys.argv[1])))
"""


@pytest.mark.thorough
def test_runs_save_resume_and_export(mounted: list[Path], tmp_path: Path) -> None:
    text = tmp_path / "fox.txt"
    text.write_text("The quick brown fox jumps over the lazy dog; 0123456789. " * 60)
    flags = ["--deepspeed_config", "zero2", "--train_file", text, "--block_size", 32, "--save_steps", 2]
    runs = []
    for place in mounted:
        whole = [*flags, "--output_dir", place / "run"]
        runs.append([*whole, "--max_steps", 2])
        runs.append([*whole, "--max_steps", 4, "--resume_from_checkpoint", "auto", "--save_total_limit", 1])
    words = json.dumps([list(map(str, run)) for run in runs])
    done = launch(0, words, program=["-c", RUNS])  # all in one process, which imports once
    said = done.stdout + done.stderr
    assert done.returncode == 0 and "cannot be" not in said, said
    for place in mounted:
        assert [row["step"] for row in logged(place / "run")] == [1, 2, 3, 4]
        assert (place / "run" / "model.safetensors").stat().st_size > 1000
        assert [path.name for path in (place / "run").glob("*checkpoint*")] == ["checkpoint-4"]
    if missing := {"ramfs", "fuse"} - {place.name for place in mounted}:
        pytest.skip(f"right on {mounted[0].name}; {missing.pop()} cannot be mounted here")
