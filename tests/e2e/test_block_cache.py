"""Blocks that one process has made are read by the next."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from harness.data.blocks import make_blocks
from harness.data.files.documents import read_documents
from harness.data.on_disk.cache import Preparation
from harness.data.tokenizer import ByteTokenizer

SECOND_RUN = """
import sys
from harness.data.blocks import make_blocks
from harness.data.on_disk.cache import Preparation
from harness.data.piece_encoder import PieceEncoder
from harness.data.files.documents import (read_documents)
from harness.data.tokenizer import ByteTokenizer
PieceEncoder.__call__ = None
print(len(make_blocks(read_documents(sys.argv[1], sys.argv[2]), ByteTokenizer(), 8, Preparation(sys.argv[2]))))
"""


def test_another_process_finds_the_cache(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 100)
    make_blocks(read_documents(tmp_path / "a.txt", tmp_path), ByteTokenizer(), 8, Preparation(tmp_path))
    command = [sys.executable, "-c", SECOND_RUN, str(tmp_path / "a.txt"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.strip() == "12", done.stderr
