"""Data in the forms that other programs write, several sources at once, and what is refused in the first second."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset

from harness.arguments.themes.script import ScriptArguments
from harness.batches.order import OwnOrder
from harness.batches.stream import BatchStream, data_digest
from harness.data.blocks import make_blocks
from harness.data.files.documents import as_documents, hold_out, read_documents
from harness.data.files.sources import find_files, preflight, source_groups, validation_group
from harness.data.mixing import Joined, Mixture, described
from harness.data.on_disk.cache import Preparation
from harness.data.samples import make_samples
from harness.data.shares import PERIOD, Shares
from harness.data.tokenizer import ByteTokenizer
from harness.errors import UserError
from tests.unit.data.streams import ranks_of

MESSAGES = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
SHAREGPT = [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]
SYSTEM = {"role": "system", "content": "Be brief."}


def conversations(file, cache):
    return [json.loads(row)["messages"] for row in read_documents(file, cache)["conversation"]]


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"messages": MESSAGES}, MESSAGES),
        ({"conversations": SHAREGPT}, MESSAGES),
        ({"conversations": MESSAGES, "id": 3}, MESSAGES),
        ({"conversations": SHAREGPT, "system": "Be brief."}, [SYSTEM, *MESSAGES]),
        ({"instruction": "2 + 2?", "output": "4"}, MESSAGES),
        ({"instruction": "2 + 2?", "input": "", "output": "4", "system": "Be brief."}, [SYSTEM, *MESSAGES]),
        (
            {"instruction": "Add.", "input": "2 and 2", "output": "4"},
            [{"role": "user", "content": "Add.\n\n2 and 2"}, MESSAGES[1]],
        ),
    ],
)
def test_conversations_of_other_programs_are_recognised(row, messages, tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "b.json").write_text(json.dumps([row], indent=2))
    (tmp_path / "c.json").write_text(json.dumps({"version": "1", "data": [row]}))
    (tmp_path / "d.json").write_text(json.dumps(row) + "\n" + json.dumps(row))
    for name, count in (("a.jsonl", 1), ("b.json", 1), ("c.json", 1), ("d.json", 2)):
        assert conversations(tmp_path / name, tmp_path / "cache") == [messages] * count
    assert json.loads(as_documents([row], "rows")["conversation"][0])["messages"] == messages


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (3, r"rows\[1\] is int, unlike earlier rows: give dicts alone"),
        (["a"], r"rows\[1\] is list, unlike earlier rows"),
        ({"messages": MESSAGES}, r"rows\[1\] has no column `text` \(it has: messages\), unlike earlier rows"),
        ({"text": None}, r"rows\[1\]: `text` is missing, not a string"),
    ],
)
def test_a_row_of_a_data_set_that_is_unlike_the_others_is_told_by_its_number(row, words):
    with pytest.raises(UserError, match=words):
        as_documents([{"text": "a"}, row], "rows")


def test_a_csv_file_is_read_by_its_header(tmp_path):
    (tmp_path / "a.csv").write_text('\ufefftext,id\n"one, with a comma",1\n"two\nlines",2\n', encoding="utf-8")
    assert read_documents(tmp_path / "a.csv", tmp_path / "cache")["text"][:] == ["one, with a comma", "two\nlines"]
    (tmp_path / "b.csv").write_text("instruction,input,output\n2 + 2?,,4\n")
    assert conversations(tmp_path / "b.csv", tmp_path / "cache") == [MESSAGES]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.json", '[\n{"text": "a"},\n["b"]]', r"a\.json:3 is not an object"),
        ("a.json", '[\n{"text": "a"}\n{"text": "b"}]', r"a\.json:3 is not JSON \(Expecting ','"),
        ("a.json", '{"rows": [1],\n "n": {"data": []}}', r'an object with an array under "data"'),
        ("a.json", "[", r"a\.json:1 is not JSON"),
        ("a.json", '[{"question": "a"}]', r"a\.json:1 has no column `text`, .*\(it has: question\)"),
        ("a.csv", "text,id\na\n", r"a\.csv:2 does not have as many fields as the header"),
        ("a.csv", "id,label\n1,2\n", r"a\.csv:2 has no column `text`"),
        ("a.csv", 'text\n"a\n', r"a\.csv:\d is not CSV \(unexpected end of data\)"),
        ("a.jsonl", '{"text": "a"}\n[1]\n', r"a\.jsonl:2 is not an object"),
        ("a.jsonl", '{"conversations": [{"from": "me", "value": "a"}]}', r"message 1: role 'me' is not one of"),
        ("a.jsonl", '{"instruction": "a", "output": ""}', r"`instruction` and `output`|empty answer"),
        ("a.json", "", r"a\.json is empty"),
        ("a.csv", "text\n", r"a\.csv is empty"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_place(name, content, words, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=words):
        read_documents(tmp_path / name, tmp_path / "cache")


def test_globs_and_directories(tmp_path):
    for name in ("a1.txt", "a2.txt", "b.txt", "sub/a3.txt", "sub/notes.md", "info.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert [file.name for file in find_files(f"{tmp_path}/a*.txt")] == ["a1.txt", "a2.txt"]
    assert [file.name for file in find_files(f"{tmp_path}/**/a*")] == ["a1.txt", "a2.txt", "a3.txt"]
    assert "info.json" not in [file.name for file in find_files(tmp_path)]
    # what a folder holds that is matched, and what is matched beside it, counts once
    assert [file.name for file in find_files(f"{tmp_path}/**/*.txt")] == ["a1.txt", "a2.txt", "b.txt", "a3.txt"]
    (tmp_path / "info.json").unlink()
    assert sorted(find_files(f"{tmp_path}/**")) == sorted(find_files(tmp_path))
    with pytest.raises(UserError, match=r"z\* matches no .txt"):
        preflight(f"{tmp_path}/z*")


def test_weights_stand_behind_a_colon(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "odd:1.txt").write_text("a")
    (tmp_path / "c.jsonl").write_text(json.dumps({"messages": MESSAGES}))
    a, odd, chat = (f"{tmp_path}/{name}" for name in ("a.txt", "odd:1.txt", "c.jsonl"))
    (both,) = source_groups([a, odd])
    assert both.paths == (a, odd) and both.weight is None
    first, second = source_groups([f"{a}:0.7", f"{chat}:3e-1"])
    assert (first.weight, second.weight, first.kind, second.kind) == (0.7, 0.3, "text", "messages")
    for words, message in (
        ([f"{a}:much"], r"the weight 'much' is not a number: write .*a\.txt:0\.5"),
        ([f"{a}:0"], "must be a number above 0"),
        ([f"{a}:nan", f"{odd}:1"], "must be a number above 0"),
        ([f"{a}:1", odd], r"a\.txt has a weight, .*odd:1\.txt has none"),
        ([a, chat], r"has `text`, .*has `messages`: give each a weight"),
        ([f"{tmp_path}/z.txt:1"], r"z\.txt:1 does not exist"),
        (["y.txt:1,z.txt:2"], r"does not exist: separate several files by spaces: y.txt:1 z.txt:2 \(in a --config"),
        ([f"{tmp_path}/a.txt z.txt"], r"separate several files by spaces: .*a.txt z.txt "),
        ([f"{tmp_path}/z*:1"], r"z\* matches no"),
    ):
        with pytest.raises(UserError, match=message):
            source_groups(words)
    with pytest.raises(UserError, match="weights are for --train_file"):
        validation_group([f"{a}:1"])


@pytest.mark.parametrize(("percentage", "held_out"), [(None, [0, 20, 40]), (10, [0, 10, 20, 30, 40]), (0.5, [0, 2, 4])])
def test_a_part_is_held_out_evenly(percentage, held_out, tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": str(i)}) + "\n" for i in range(45)))
    script = ScriptArguments(validation_split_percentage=percentage)
    training, evaluation = hold_out(read_documents(tmp_path / "a.jsonl", tmp_path / "cache"), script.held_out)
    assert list(map(int, evaluation["text"]))[: len(held_out)] == held_out
    assert sorted(map(int, [*training["text"], *evaluation["text"]])) == list(range(45))


@pytest.mark.parametrize("percentage", [100 / 3, 0.1234567890123456789, 2e-3, 99.99999999999999])
def test_of_many_documents_the_part_is_held_out_that_was_asked_for(percentage):
    documents = Dataset.from_dict({"text": [""] * 30_000})
    part = ScriptArguments(validation_split_percentage=percentage).held_out
    training, evaluation = hold_out(documents, part)
    assert len(training) + len(evaluation) == 30_000
    assert abs(len(evaluation) - 30_000 * float(part)) <= 1


def test_a_split_that_makes_no_sense_is_refused():
    for percentage in (0, -1, 100):
        with pytest.raises(UserError, match="must be above 0 and below 100"):
            ScriptArguments(validation_split_percentage=percentage)
    with pytest.raises(UserError, match="give only one"):
        ScriptArguments(validation_split_percentage=5, validation_file="a.txt")


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    texts = as_documents([{"text": chr(97 + i % 3) * 50} for i in range(40)], "texts")
    chats = as_documents([{"messages": MESSAGES}] * 7, "chats")
    other = as_documents([{"text": "z" * 50}] * 100, "other")
    text, more = (make_blocks(documents, ByteTokenizer(), 64, Preparation(cache)) for documents in (texts, other))
    return [text, make_samples(chats, ByteTokenizer(), 64, Preparation(cache)), more]


def drawn(data, steps, batch_ranks=1, consumed=0):
    """Rows of each step, of all data ranks in the order in which they are dealt."""

    class Rows(OwnOrder):
        key, order = data.key, data.order

        def __len__(self):
            return len(data)

        def __getitem__(self, index):
            return {"input_ids": [index, index]}

    ranks = ranks_of(Rows, 3, batch_ranks, consumed)
    found = []
    for _ in range(steps):
        read = [rank.next_step() for rank in ranks]
        found += [int(ids[0]) for turn in zip(*read, strict=True) for batch, _ in turn for ids in batch]
    return found


def test_each_source_gives_its_share_in_any_layout_and_after_a_resume(sources):
    mixture = Mixture(sources, [2, 1, 7], "abc")
    rows = np.array(drawn(mixture, 100))
    ends = np.cumsum([len(source) for source in sources])
    number = np.searchsorted(ends, rows, side="right")
    for upto in (8, 80, 333, 800):
        counts = np.bincount(number[:upto], minlength=3)
        assert np.abs(counts - np.array([0.2, 0.1, 0.7]) * upto).max() <= 2
    assert drawn(mixture, 25, batch_ranks=4) == rows[:200].tolist()
    assert drawn(mixture, 10, consumed=80) == rows[80:160].tolist()
    for source, (first, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        size, mine = end - first, rows[number == source]
        for epoch in range(len(mine) // size):
            assert sorted(mine[epoch * size : (epoch + 1) * size]) == list(range(first, end))
    assert data_digest(mixture) != data_digest(Mixture(sources, [1, 1, 1], "abc")) != data_digest(Joined(sources))


def test_the_order_of_a_mixture_goes_on_over_the_end_of_its_period(sources):
    mixture = Mixture(sources, [0.3, 0.3, 0.4], "abc")
    over = mixture.order(PERIOD - 50, 100, seed=1)
    assert np.concatenate([mixture.order(PERIOD - 50, 50, 1), mixture.order(PERIOD, 50, 1)]).tolist() == over.tolist()
    rare = Shares([1, 1e-9, 1])
    assert rare.slots.sum() == PERIOD and rare.slots.min() == 1
    assert rare.before(PERIOD + 2) == (rare.slots + np.bincount(rare.positions(0, 2)[0], minlength=3)).tolist()


def test_text_and_conversations_are_one_data_set(sources):
    mixture = Mixture(sources, [1, 1, 1], "abc")
    stream = BatchStream(mixture, seed=0, micro_batch=3, accumulation=4)
    for _ in range(4):
        for ids, labels in stream.next_step():
            assert ids.shape == labels.shape == (3, 64)
            assert {int((row != -100).sum()) for row in labels} == {64, 2}
    assert stream.tokens(0) == sum(mixture.lengths(mixture.order(36, 12, 0)))
    short = mixture.padded_to(40)[len(sources[0])]
    assert short["input_ids"].shape == short["labels"].shape == (40,)
    lines = list(described(mixture))
    assert lines[0] == f"a gives 33.3% of the samples and has {len(sources[0])}"
    assert lines[1].startswith("b gives 33.3% of the samples and has 7: 7 conversations of")


def test_a_name_that_stands_twice_is_refused_with_its_line(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": "b", "x": {"y": 1, "y": 2}}\n')
    (tmp_path / "b.json").write_text('[{"text": "a"},\n{"text": "b", "text": "c"}]')
    (tmp_path / "c.csv").write_text("text,text\na,b\n")
    pq.write_table(
        pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"]), tmp_path / "d.parquet"
    )
    for name, words in (
        ("a.jsonl", "a.jsonl:2 is not JSON that can be read (the name 'y' occurs twice in an object)"),
        ("b.json", "b.json:2 is not JSON that can be read (the name 'text' occurs twice in an object)"),
        ("c.csv", "c.csv has two columns `text`: rename one"),
        ("d.parquet", "d.parquet has two columns `text`: rename one"),
    ):
        with pytest.raises(UserError) as caught:
            read_documents(tmp_path / name, tmp_path / "cache")
        assert str(caught.value).endswith(words)


def test_nulls_that_arrow_adds_to_objects_are_not_written(tmp_path):
    def asking(arguments):
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        described = {
            "type": "function",
            "function": {"name": "f", "parameters": {"properties": {n: {"type": "string"} for n in arguments}}},
        }
        turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        return {"messages": turns, "tools": [described]}

    rows = [asking({"city": "Oslo"}), asking({"query": [1], "none": None})]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "b.parquet")
    written = read_documents(tmp_path / "a.jsonl", tmp_path / "cache")["conversation"]
    assert '"none": null' in written[1]  # in JSON somebody has written it
    for documents in (
        read_documents(tmp_path / "b.parquet", tmp_path / "cache"),
        as_documents(Dataset.from_list(rows), "train_dataset"),
        as_documents(Dataset.from_list(rows).to_list(), "train_dataset"),
    ):
        found = [json.loads(text) for text in documents["conversation"]]
        assert found[0]["messages"] == rows[0]["messages"]
        assert found[1]["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"query": [1]}
        assert "null" not in "".join(documents["conversation"])
