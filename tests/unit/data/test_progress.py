"""What the user sees while data is prepared."""

import io
import re

import pytest
from datasets import Dataset

from harness.data.blocks import make_blocks
from harness.data.on_disk import progress, shards
from harness.data.on_disk.cache import Preparation
from harness.data.on_disk.progress import PreparationProgress, Speaker
from harness.data.tokenizer import ByteTokenizer


@pytest.mark.parametrize("workers", [1, 2])
def test_lines_say_how_far_it_is_also_within_a_shard(workers, tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0)
    monkeypatch.setattr(shards, "_BYTES_AT_ONCE", 1 << 14)
    monkeypatch.setattr(shards, "SHARD_BYTES", 1 << 18)
    monkeypatch.setattr(shards, "_POLL_S", 0.001)
    said = []
    documents = Dataset.from_list([{"text": "word " * 200}] * 1000)
    make_blocks(documents, ByteTokenizer(), 64, Preparation(tmp_path, say=said.append, workers=workers))
    parts = [int(re.fullmatch(r"tokenising: (\d+)%, 0:\d\d:\d\d left", line)[1]) for line in said]
    assert parts == sorted(parts) and len(parts) > 2 and parts[0] < 25


def test_a_terminal_gets_a_bar_if_it_takes_some_seconds(monkeypatch):
    terminal = io.StringIO()
    soon = PreparationProgress(4, "tokenising", Speaker(print, terminal))
    soon.show(3.0)
    soon.close()
    assert terminal.getvalue() == ""
    monkeypatch.setattr(progress, "BAR_AFTER_S", 0)
    long = PreparationProgress(4, "tokenising", Speaker(print, terminal))
    long._begun -= 30
    long.show(1.0)
    long._bar.refresh()
    long.close()
    assert re.search(r"tokenising:  25%\|.*\| 00:30<01:30", terminal.getvalue())
