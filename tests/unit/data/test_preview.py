"""What a person is shown of the training data: marked samples, numbers, lengths."""

from __future__ import annotations

from pathlib import Path

import torch

from harness.batches.collate import IGNORED
from harness.data.blocks import make_blocks
from harness.data.files.documents import as_documents
from harness.data.mixing import Joined, joined
from harness.data.on_disk.cache import Preparation
from harness.data.preview import composition, shown, summary
from harness.data.samples import Samples, make_samples
from harness.data.tokenizer import ByteTokenizer


def samples(folder: Path, *answers: str, packing: bool = False) -> Samples:
    turns = [[{"role": "user", "content": "q\n"}, {"role": "assistant", "content": text}] for text in answers]
    documents = as_documents([{"messages": each} for each in turns], "chats")
    return make_samples(documents, ByteTokenizer(), 128, Preparation(folder), packing=packing)


def test_learnt_tokens_stand_between_brackets_on_one_line(tmp_path: Path) -> None:
    asked, end = "<|user|>\\nq\\n<|end-of-document|>\\n<|assistant|>\\n", "<|end-of-document|>"
    first, second = shown(samples(tmp_path, "a\x1b[2J", "bc"), ByteTokenizer(), 2)
    assert first == f"{asked}[[a\\x1b[2J{end}]]"
    assert second == f"{asked}[[bc{end}]]"
    assert len(list(shown(samples(tmp_path, "a"), ByteTokenizer(), 5))) == 1
    (packed,) = shown(samples(tmp_path, "a", "b", packing=True), ByteTokenizer())
    assert packed.count(f"[[a{end}]]") == packed.count(f"[[b{end}]]") == 1


def test_long_parts_are_cut_and_what_has_no_ids_is_not_shown() -> None:
    ids = torch.arange(97, 97 + 20).repeat(50)
    (text,) = shown(
        [{"input_ids": ids, "labels": torch.where(torch.arange(1000) < 500, IGNORED, ids)}], ByteTokenizer()
    )
    assert len(text) < 520 and text.count(" ... ") == 2 and text.count("[[") == 1
    assert list(shown([(torch.zeros(1), torch.zeros(1))], ByteTokenizer())) == []
    assert list(shown([{"input_ids": ids}], None)) == list(shown(None, ByteTokenizer())) == []


def test_each_source_is_counted_and_the_lengths_of_conversations(tmp_path: Path) -> None:
    chats = samples(tmp_path, *("a" * n for n in (1, 2, 3, 40)))
    text = make_blocks(as_documents([{"text": "x" * 300}], "text"), ByteTokenizer(), 128, Preparation(tmp_path))
    found = composition(joined([chats, text], [3, 1], ["chats", "text"]))
    lengths = chats.lengths()
    assert found["sources"] == [
        {"name": "chats", "share": 0.75, "samples": 4, "tokens": int(lengths.sum()), "learnt": 46 + 4},
        {"name": "text", "share": 0.25, "samples": 2, "tokens": 256, "learnt": 254},
    ]
    assert sum(found["lengths"]["counts"]) == 4
    assert found["lengths"]["least"] == lengths.min() and found["lengths"]["most"] == lengths.max()
    learnt, *of_sources, long = summary(found)
    assert learnt == f"304 of {256 + lengths.sum():,} tokens are in the loss ({304 / (256 + lengths.sum()):.1%})"
    assert of_sources == [
        f"chats: 50 of {lengths.sum()} tokens are in the loss",
        "text: 254 of 256 tokens are in the loss",
    ]
    assert long.startswith(f"conversations have {lengths.min()} to {lengths.max()} tokens, half of them up to ")
    assert composition([{"input_ids": [1]}]) == composition(None) == {}


def test_sources_that_are_evaluated_each_have_short_names(tmp_path: Path) -> None:
    chats = samples(tmp_path, "a", "b")
    names = ["x/a.jsonl", "y/a.parquet", "a2.txt", "docs/"]
    parts = Joined([chats] * 4, names).by_source()
    assert list(parts) == ["a", "a2", "a22", "docs"]
    assert [len(part) for part in parts.values()] == [2] * 4  # type: ignore[arg-type]
    assert Joined([chats], ["a"]).by_source() == Joined([chats] * 2).by_source() == {}
