"""Blocks that one process has made are read by the next."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.data.blocks import make_blocks
from harness.data.files.documents import read_documents
from harness.data.on_disk.cache import Preparation
from harness.data.tokenizer import ByteTokenizer
from tests.support.ranks import script_on_ranks

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


@pytest.mark.thorough
def test_another_process_finds_the_cache(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 100)
    make_blocks(read_documents(tmp_path / "a.txt", tmp_path), ByteTokenizer(), 8, Preparation(tmp_path))
    (tmp_path / "second.py").write_text(SECOND_RUN)
    done = script_on_ranks(1, tmp_path / "second.py", tmp_path / "a.txt", tmp_path)
    assert done.stdout.strip() == "12", done.stderr
