"""Streamed files: the samples of files that are tokenised beforehand, in their order, from any position on."""

import itertools
import json
import os
import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import IterableDataset

from harness import preflight
from harness.arguments import TrainingArguments
from harness.arguments.themes.script import ScriptArguments
from harness.batches.given import read_all
from harness.batches.stream import data_digest
from harness.data.blocks import make_blocks
from harness.data.files.documents import read_documents
from harness.data.files.sources import find_files
from harness.data.formats import format_of, jsonl_format, txt_format
from harness.data.on_disk import progress
from harness.data.on_disk.cache import Preparation
from harness.data.piece_encoder import PieceEncoder
from harness.data.rows import pieces
from harness.data.rows.pieces import PIECE_CHARACTERS
from harness.data.samples import make_samples
from harness.data.streaming import makers
from harness.data.streaming import source as source_module
from harness.data.streaming.iterable import IterableRows
from harness.data.streaming.makers import sample_maker
from harness.data.streaming.rows import DocumentRows, FileRows
from harness.data.streaming.source import RowsAsTheyAre, Streamed, StreamedSource
from harness.data.tokenizer import ByteTokenizer, load_tokenizer
from harness.errors import UserError
from tests.unit.data.streams import ranks_of

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


def streamed(path, kind, tokenizer, block_size, *, packing=False):
    rows = FileRows(find_files(path), kind)
    return StreamedSource(rows, sample_maker(kind, tokenizer, block_size, packing=packing))


def plain(sample):
    return {name: values.tolist() for name, values in sample.items()}


def test_text_is_cut_as_when_it_is_tokenised_beforehand(text, trained_tokenizer, tmp_path):
    tokenizer = load_tokenizer(str(trained_tokenizer))
    blocks = make_blocks(read_documents(text, tmp_path), tokenizer, BLOCK, Preparation(tmp_path))
    source = streamed(text, "text", tokenizer, BLOCK)
    assert len(blocks) > 500
    assert all(torch.equal(source[k]["input_ids"], blocks[k]["input_ids"]) for k in range(len(blocks)))
    # then the files come once more, behind what was left over
    assert source[len(blocks)]["input_ids"][-5:].tolist() != blocks[0]["input_ids"][-5:].tolist()


def test_conversations_are_those_of_the_file_without_what_cannot_be_learnt(chats, tmp_path, monkeypatch):
    samples = make_samples(read_documents(chats, tmp_path), ByteTokenizer(), BLOCK, Preparation(tmp_path))
    source = streamed(chats, "messages", ByteTokenizer(), BLOCK)
    for k in range(2 * len(samples)):  # twice over
        found = plain(source[k])
        length = int(samples.lengths([k % len(samples)])[0])
        assert found.pop("attention_mask") == [1] * length + [0] * (BLOCK - length)
        assert found == plain(samples[k % len(samples)])
    monkeypatch.setattr(makers, "_MOST_UNUSED", 200)  # of 10,000
    with pytest.raises(UserError, match=r"201 conversations in a row have no answer within the first 8 tokens"):
        streamed(chats, "messages", ByteTokenizer(), 8)[0]


def mixed(text, chats, buffer=0, *, packing=False):
    sources = [
        streamed(text, "text", ByteTokenizer(), BLOCK, packing=packing),
        streamed(chats, "messages", ByteTokenizer(), BLOCK, packing=packing),
    ]
    return Streamed(sources, [3, 1], buffer)


def drawn(data, steps, batch_ranks=1, consumed=0):
    ranks = ranks_of(data, 1, batch_ranks, consumed)
    found = []
    for _ in range(steps):
        read = [rank.next_step() for rank in ranks]
        found += [
            (torch.stack(ids, -1) if isinstance(ids, tuple) else ids).tolist()
            for turn in zip(*read, strict=True)
            for ids, _ in turn
        ]
    return found, ranks


def steps_and_a_resume(make, samples=None):
    """Nine steps; the first six of them on two data ranks, the last three resumed from the position of the first of
    these."""
    wanted, _ = drawn(make, 9)
    found, ranks = drawn(make, 6, batch_ranks=2)
    assert found == wanted[:24]
    kept = json.loads(json.dumps(ranks[0].dataset.position(ranks[0].consumed)))
    if samples is not None:
        assert [place["sample"] for place in kept["sources"]] == samples

    def resumed():
        data = make()
        data[0]  # what is looked at before the run goes on
        data.seek(kept, 48)
        return data

    assert drawn(resumed, 3, consumed=48)[0] == wanted[24:]
    return wanted, resumed


def test_every_layout_reads_the_same_and_a_position_leads_to_the_same_samples(text, chats):
    _, resumed = steps_and_a_resume(lambda: mixed(text, chats), [36, 12])
    again = resumed()
    first = plain(again[48])
    again[60]
    assert plain(again[48]) == first  # as after a rollback


def test_a_buffer_is_shuffled_within(text, chats):
    wanted, _ = steps_and_a_resume(lambda: mixed(text, chats, 20), [30, 10])
    in_order, _ = drawn(lambda: mixed(text, chats), 10)
    rows = [[row for ids in found for row in ids] for found in (wanted, in_order)]
    assert rows[0][:40] != rows[1][:40]
    for start in (0, 20, 40):  # each buffer holds what comes then, in an order of its own
        assert sorted(rows[0][start : start + 20]) == sorted(rows[1][start : start + 20])
    assert Streamed([], buffer=20).order(0, 20, 1).tolist() != Streamed([], buffer=20).order(20, 20, 1).tolist()


def test_packed_text_is_that_of_blocks_and_packed_conversations_are_whole(text, chats, tmp_path):
    steps_and_a_resume(lambda: mixed(text, chats, packing=True))
    blocks = make_blocks(read_documents(text, tmp_path), ByteTokenizer(), BLOCK, Preparation(tmp_path), packing=True)
    source = streamed(text, "text", ByteTokenizer(), BLOCK, packing=True)
    assert all(plain(source[k]) == plain(blocks[k]) for k in range(len(blocks)))
    wide = 4 * BLOCK
    source = streamed(chats, "messages", ByteTokenizer(), wide, packing=True)
    samples = make_samples(read_documents(chats, tmp_path), ByteTokenizer(), wide, Preparation(tmp_path))
    to_learn = sum(learnt(samples[k]) for k in range(len(samples)))
    learnt_so_far = itertools.accumulate(learnt(source[k]) for k in itertools.count())
    packed = next(k for k, total in enumerate(learnt_so_far, start=1) if total >= to_learn)
    assert packed < 0.6 * len(samples)


def test_packed_documents_keep_their_starts_however_often_a_stream_goes_on(tmp_path):
    lengths = [5 * BLOCK, 10, 3 * BLOCK + 7, 20, 2 * BLOCK - 1, 30, BLOCK, 5]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": "x" * length}) + "\n" for length in lengths))

    def make():
        return streamed(tmp_path / "rows.jsonl", "text", ByteTokenizer(), BLOCK, packing=True)

    whole, kept, begun = make(), {}, 0
    for k in range(40):
        source = make()
        source.seek(kept)
        wanted = plain(whole[k])
        assert plain(source[k]) == wanted
        kept = json.loads(json.dumps(source.position(k + 1)))
        begun += wanted["position_ids"].count(0)
    assert begun > 20


def learnt(sample):
    return int((sample["labels"] != -100).sum())


class Empty(IterableDataset):
    def __iter__(self):
        return iter([])


class Counting(IterableDataset):
    """Rows of text, some of them long; a pass draws from the global generators."""

    def __init__(self, make, rows=7):
        self.make, self.passes, self.rows = make, [], rows

    def set_epoch(self, number):
        self.passes.append(number)

    def __iter__(self):
        for i in range(self.rows):
            yield self.make(i)


ITERABLES = [
    lambda i: {"text": f"row {i} {torch.rand(1).item():.9f} {random.random():.9f} {np.random.rand():.9f} " * 9},
    lambda i: {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": str(i) * (i + 1)}]},
    lambda i: {"input_ids": [i, 2, int(torch.randint(9, (1,)))], "labels": [1, 2, 3]},
]


@pytest.mark.parametrize("make", ITERABLES)
def test_an_iterable_data_set_is_a_stream(make):
    def data():
        rows = DocumentRows(Counting(make), "train_dataset")
        maker = RowsAsTheyAre() if rows.kind is None else sample_maker(rows.kind, ByteTokenizer(), BLOCK, packing=False)
        return Streamed([StreamedSource(rows, maker)], buffer=5)

    steps_and_a_resume(data)
    assert data_digest(data()) == data_digest(data())


def test_an_iterable_of_the_package_datasets_is_shuffled_anew_in_each_pass():
    from datasets import Dataset

    dataset = Dataset.from_list([{"input_ids": [i]} for i in range(8)]).to_iterable_dataset().shuffle(1, buffer_size=8)
    source = StreamedSource(DocumentRows(dataset, "train_dataset"), RowsAsTheyAre())
    first, second = ([source[k]["input_ids"][0] for k in range(start, start + 8)] for start in (0, 8))
    assert sorted(first) == sorted(second) == list(range(8)) and first != second
    kept = source.position(16)
    assert kept["section"] == 2 or (kept["section"], kept["row"]) == (1, 8)
    assert sorted(row["input_ids"][0] for row in read_all(dataset, "eval_dataset")) == list(range(8))


LONG = 3000


def written(file):
    """A file of many rows, in several parts."""
    rows = [{"text": f"row {i} {'é' * (i % 40)}\n"} for i in range(LONG)]
    if file.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), file, row_group_size=50)
    elif file.suffix == ".txt":
        file.write_text("".join(row["text"] for row in rows))
    elif file.suffix == ".csv":
        file.write_text("text\n" + "".join(f'"{row["text"]}"\n' for row in rows))
    else:
        file.write_text("".join(json.dumps(row) + "\n" * (1 + i % 3) for i, row in enumerate(rows)))
    return file


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet", "a.txt", "a.csv"])
def test_a_stream_goes_on_in_a_file_without_reading_what_is_before(name, tmp_path, monkeypatch):
    for module in (jsonl_format, txt_format):
        monkeypatch.setattr(module, "SHARD_BYTES", 4096)
    for module in (pieces, txt_format):
        monkeypatch.setattr(module, "PIECE_CHARACTERS", 512)
    file, read = written(tmp_path / name), []
    form = type(format_of(file))
    is_read = form.documents

    def noted(self, extent, kind):
        for found in is_read(self, extent, kind):
            read.append(found)
            yield found

    monkeypatch.setattr(form, "documents", noted)
    whole, kept, step = streamed(file, "text", ByteTokenizer(), BLOCK, packing=True), {}, 97
    for k in range(0, 900, step):
        source = streamed(file, "text", ByteTokenizer(), BLOCK, packing=True)
        source.seek(kept)
        wanted = plain(whole[k])
        read.clear()
        assert plain(source[k]) == wanted
        assert len(read) < 130 or name == "a.csv"
        kept = json.loads(json.dumps(source.position(k + step)))
    if name in ("a.jsonl", "a.json", "a.parquet"):  # lines are still counted from the beginning
        broken(file)
        source.seek(kept)
        with pytest.raises(UserError, match=rf"{name}(:6001 is not JSON|, row 3001: `text` is missing)"):
            source[2500]


def test_a_stream_that_resumed_late_in_its_only_file_begins_it_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(jsonl_format, "SHARD_BYTES", 1000)
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"text": f"row {i} " + "x" * BLOCK}) + "\n" for i in range(40)))
    whole, resumed, again = (streamed(file, "text", ByteTokenizer(), BLOCK) for _ in range(3))
    end = next(k for k in range(1, 99) if whole.position(k)["row"] == 0)  # the next sample has the first row once more
    resumed.seek(json.loads(json.dumps(whole.position(end - 9))))
    assert resumed.position(end - 9)["mark"]["row"] > 0
    again.seek(json.loads(json.dumps(resumed.position(end))))
    assert [plain(again[k]) for k in range(end, end + 9)] == [plain(whole[k]) for k in range(end, end + 9)]


def broken(file):
    """Put a row that is none behind the last one."""
    if file.suffix == ".parquet":
        rows = [pq.read_table(file), pa.table({"text": pa.array([None], pa.string())})]
        pq.write_table(pa.concat_tables(rows), file, row_group_size=50)
    else:
        with file.open("a") as stream:
            stream.write("{\n")


def test_a_file_that_was_touched_or_moved_is_the_same_and_another_is_not(text, chats, tmp_path):
    data = mixed(text, chats)
    wanted, kept = plain(data[60]), None
    kept = json.loads(json.dumps(data.position(60)))
    os.utime(text / "b.jsonl", ns=(1, 1))
    text.rename(tmp_path / "elsewhere")
    again = mixed(tmp_path / "elsewhere", chats)
    assert again.key == data.key
    again.seek(kept, 60)
    assert plain(again[60]) == wanted
    other = tmp_path / "elsewhere" / "b.jsonl"
    other.write_text(other.read_text().replace("row", "rwo"))
    assert mixed(tmp_path / "elsewhere", chats).key != data.key


def test_other_data_goes_on_where_the_earlier_stood_and_tokenises_nothing_before(tmp_path, monkeypatch):
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"text": "x" * 100}) + "\n" for _ in range(400)))

    def data(weights=()):
        sources = [streamed(file, "text", ByteTokenizer(), BLOCK) for _ in weights or [1]]
        return Streamed(sources, weights)

    first = data()
    first[300]
    kept = json.loads(json.dumps(first.position(301)))
    made, encode = [], PieceEncoder.__call__
    monkeypatch.setattr(PieceEncoder, "__call__", lambda *args: made.append(1) or encode(*args))
    with file.open("a") as stream:
        stream.write('{"text": "y"}\n')
    for again in (data(), data([1, 1])):  # another file, and other sources
        made.clear()
        again.seek(kept, 301)
        again[301], again[302]
        assert len(made) < 8
    file.write_text('{"text": "%s"}\n' % ("z" * 100))  # the place is there no more
    again = data()
    again.seek(kept, 301)
    assert again[301]["input_ids"].tolist()[-10:] == [ord("z")] * 10


def test_passing_over_rows_shows_that_it_goes_on(monkeypatch):
    said, beats = [], []
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0)
    monkeypatch.setattr(source_module, "beat", beats.append)
    rows = IterableRows(Counting(ITERABLES[2], 2000), "train_dataset", say=said.append)
    source = StreamedSource(rows, RowsAsTheyAre())
    source.seek({"sample": 1500, "row": 1500})
    assert source[1500]["input_ids"][0] == 1500
    assert len(beats) > 20 and set(beats) == {"passing over rows"}
    assert len(said) > 20 and said[3].startswith("passing over rows: 1")


class Stateful(Counting):
    """A data set that can say where it stands."""

    def __init__(self, make, rows):
        super().__init__(make, rows)
        self.at, self.read = 0, 0

    def __iter__(self):
        begin, self.at = self.at, 0
        for i in range(begin, self.rows):
            self.at, self.read = i + 1, self.read + 1
            yield self.make(i)
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


@pytest.mark.parametrize("make", ITERABLES)
def test_a_data_set_that_knows_where_it_stands_is_asked_for_it(make):
    def stream(buffer=5):
        rows = DocumentRows(Stateful(lambda i: make(i % 40), 450), "train_dataset")
        maker = RowsAsTheyAre() if rows.kind is None else sample_maker(rows.kind, ByteTokenizer(), BLOCK, packing=False)
        return Streamed([StreamedSource(rows, maker)], buffer=buffer), rows._dataset

    whole, _ = stream()
    for consumed in (440, 905):  # in the first pass, and in a later one
        kept = json.loads(json.dumps(whole.position(consumed)))
        again, dataset = stream()
        again.seek(kept, consumed)
        before = dataset.read
        for k in range(consumed, consumed + 9):
            assert plain_values(again[k]) == plain_values(whole[k])
        assert dataset.read - before < 400
        assert plain_values(again[consumed]) == plain_values(whole[consumed])  # as after a rollback


def plain_values(sample):
    return {name: torch.as_tensor(values).tolist() for name, values in sample.items()}


@pytest.mark.parametrize("shuffled", [False, True])
def test_an_iterable_of_datasets_goes_on_from_its_state_where_that_is_exact(shuffled):
    from datasets import Dataset

    def stream():
        dataset = Dataset.from_list([{"input_ids": [i]} for i in range(900)]).to_iterable_dataset(num_shards=4)
        dataset = dataset.shuffle(1, buffer_size=50) if shuffled else dataset
        return StreamedSource(DocumentRows(dataset, "train_dataset"), RowsAsTheyAre())

    whole = stream()
    for at in (700, 1400):
        kept, again = json.loads(json.dumps(whole.position(at))), stream()
        assert bool(kept["mark"]) is not shuffled
        again.seek(kept)
        assert [again[at + k] for k in range(500)] == [whole[at + k] for k in range(500)]


def test_an_iterable_that_gives_nothing_is_refused():
    class Once(IterableDataset):
        def __init__(self):
            self.rows = iter([{"input_ids": [1]}] * 3)

        def __iter__(self):
            return self.rows

    with pytest.raises(UserError, match="train_dataset is empty"):
        DocumentRows(Empty(), "train_dataset")
    source = StreamedSource(DocumentRows(Once(), "train_dataset"), RowsAsTheyAre())
    with pytest.raises(UserError, match="train_dataset gives no sample in pass 2: its __iter__ must begin anew"):
        source[4]
    with pytest.raises(UserError, match="gives more than 4 samples, too many to be held"):
        read_all(Counting(lambda i: {"input_ids": [i]}), "eval_dataset", 4)


def test_a_stream_of_a_file_that_is_gone_is_told(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    rows = FileRows([tmp_path / "a.txt"], "text").since(0, {})
    (tmp_path / "a.txt").unlink()
    with pytest.raises(UserError, match=r"cannot read .*a\.txt: No such file or directory"):
        next(rows)


def test_a_stream_is_known_by_its_files_and_never_read_to_its_end(text, chats):
    data = mixed(text, chats)
    assert data_digest(data) == data_digest(mixed(text, chats))
    (text / "c.txt").write_text("more")
    assert data_digest(data) != data_digest(mixed(text, chats))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({}, "a stream has no length: give --max_steps"),
        ({"max_steps": 3, "save_strategy": "epoch"}, "--save_strategy epoch: a stream has no epochs"),
        ({"max_steps": 3, "dataloader_num_workers": 1}, "--dataloader_num_workers does not work with --streaming"),
        ({"max_steps": 3, "eval_steps": 1}, "no part of a stream can be held out"),
    ],
)
def test_what_a_stream_cannot_do_is_refused(flags, words, chats):
    script = ScriptArguments(train_file=str(chats), streaming=True)
    with pytest.raises(UserError, match=words):
        preflight._require_data(script, TrainingArguments(**flags))


def test_a_buffer_without_a_stream_is_refused(chats):
    with pytest.raises(UserError, match="--shuffle_buffer_size 8 needs --streaming or an IterableDataset"):
        preflight._require_data(ScriptArguments(train_file=str(chats)), TrainingArguments(shuffle_buffer_size=8))
