"""Streamed files: the samples of files that are tokenised beforehand, in their order, from any position on."""

import json

import pytest
import torch

from harness.errors import UserError
from harness.training.arguments import TrainingArguments
from harness.training.arguments.themes.script import ScriptArguments
from harness.training.batches.stream import data_digest
from harness.training.data.blocks import make_blocks
from harness.training.data.files.sources import read_documents
from harness.training.data.pieces import PIECE_CHARACTERS
from harness.training.data.samples import make_samples
from harness.training.data.streaming import Streamed, streamed
from harness.training.data.tokenizer import ByteTokenizer, load_tokenizer
from harness.training.prepare import preflight
from tests.unit.training.data.streams import ranks_of

BLOCK = 64


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text").mkdir()
    long = "the quick brown fox jumps over the lazy dog, übermäßig — 日本語\n" * (PIECE_CHARACTERS // 50)
    (tmp_path / "text" / "a.txt").write_text(long)
    (tmp_path / "text" / "b.jsonl").write_text("".join(json.dumps({"text": f"row {i} " * 9}) + "\n" for i in range(40)))
    return tmp_path / "text"


@pytest.fixture
def chats(tmp_path):
    turns = [
        [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": "a" * (i % 50)}] for i in range(1, 40)
    ]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps({"messages": each}) + "\n" for each in turns if each))
    return tmp_path / "chat.jsonl"


def plain(sample):
    return {name: values.tolist() for name, values in sample.items()}


def test_text_is_cut_as_when_it_is_tokenised_beforehand(text, trained_tokenizer, tmp_path):
    tokenizer = load_tokenizer(str(trained_tokenizer))
    blocks = make_blocks(read_documents(text, tmp_path), tokenizer, BLOCK, tmp_path)
    source = streamed([str(text)], "text", tokenizer, BLOCK)
    assert len(blocks) > 500
    assert all(torch.equal(source[k]["input_ids"], blocks[k]["input_ids"]) for k in range(len(blocks)))
    # then the files come once more, behind what was left over
    assert source[len(blocks)]["input_ids"][-5:].tolist() != blocks[0]["input_ids"][-5:].tolist()


def test_conversations_are_those_of_the_file_without_what_cannot_be_learnt(chats, tmp_path):
    samples = make_samples(read_documents(chats, tmp_path), ByteTokenizer(), BLOCK, tmp_path)
    source = streamed([str(chats)], "messages", ByteTokenizer(), BLOCK)
    for k in range(2 * len(samples)):  # twice over
        found = plain(source[k])
        length = int(samples.lengths([k % len(samples)])[0])
        assert found.pop("attention_mask") == [1] * length + [0] * (BLOCK - length)
        assert found == plain(samples[k % len(samples)])
    with pytest.raises(UserError, match=r"no answer within the first 8 tokens: raise --block_size"):
        streamed([str(chats)], "messages", ByteTokenizer(), 8)[0]


def mixed(text, chats):
    sources = [
        streamed([str(text)], "text", ByteTokenizer(), BLOCK),
        streamed([str(chats)], "messages", ByteTokenizer(), BLOCK),
    ]
    return Streamed(sources, [3, 1])


def drawn(data, steps, data_size=1, consumed=0):
    ranks = ranks_of(data, 1, data_size, consumed)
    found = []
    for _ in range(steps):
        read = [rank.next_step() for rank in ranks]
        found += [ids.tolist() for turn in zip(*read, strict=True) for ids, _ in turn]
    return found, ranks


def test_every_layout_reads_the_same_and_a_position_leads_to_the_same_samples(text, chats):
    wanted, _ = drawn(lambda: mixed(text, chats), 9)
    found, ranks = drawn(lambda: mixed(text, chats), 6, data_size=2)
    assert found == wanted[:24]
    kept = json.loads(json.dumps(ranks[0].dataset.position(ranks[0].consumed)))
    assert [place["sample"] for place in kept["sources"]] == [36, 12]

    def resumed():
        data = mixed(text, chats)
        data[0]  # what is looked at before the run goes on
        data.seek(kept)
        return data

    assert drawn(resumed, 3, consumed=48)[0] == wanted[24:]
    again = resumed()
    first = plain(again[48])
    again[60]
    assert plain(again[48]) == first  # as after a rollback


def test_a_stream_is_known_by_its_files_and_never_read_to_its_end(text, chats):
    data = mixed(text, chats)
    assert data_digest(data) == data_digest(mixed(text, chats))
    (text / "c.txt").write_text("more")
    assert data_digest(data) != data_digest(mixed(text, chats))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({}, "a stream has no length: give --max_steps"),
        ({"max_steps": 3, "packing": True}, "--packing does not work with --streaming"),
        ({"max_steps": 3, "dataloader_num_workers": 1}, "--dataloader_num_workers does not work with --streaming"),
        ({"max_steps": 3, "eval_steps": 1}, "no part of a stream can be held out"),
    ],
)
def test_what_a_stream_cannot_do_is_refused(flags, words, chats):
    script = ScriptArguments(train_file=str(chats), streaming=True)
    with pytest.raises(UserError, match=words):
        preflight._require_data(script, TrainingArguments(**flags))
