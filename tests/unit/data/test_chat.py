"""Conversations: what is learnt of them under each kind of template, and how they are laid out on samples."""

import json
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from harness.batches.collate import IGNORED
from harness.data.chat import ConversationEncoder
from harness.data.files.documents import as_documents, holds_tokens, read_documents
from harness.data.files.sources import preflight
from harness.data.on_disk.cache import Preparation
from harness.data.packing import best_fit_decreasing
from harness.data.samples import make_samples
from harness.data.tokenizer import ByteTokenizer, load_tokenizer
from harness.errors import UserError

END = "<|end-of-document|>"
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
INSTRUCT = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ '<<SYS>>' + m.content + '<</SYS>>' }}"
    "{% elif m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content.strip() + eos_token }}{% endif %}{% endfor %}"
)
# an answer is written with empty thoughts, unless a question follows it
THOUGHTS_OF_THE_LAST = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{{ '<' + m.role + '>' }}"
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}{{ '<think></think>' }}{% endif %}"
    "{{ m.content + '<end>' }}{% endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
# the model is made to think, and its thoughts are left out afterwards
MADE_TO_THINK = (
    "{% for m in messages %}{{ '<' + m.role + '>' + m.content + '<end>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant><think>' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ m.role }}:{% if m.role == 'assistant' %}{% generation %}{{ m.content + eos_token }}"
    + ("{% endgeneration %};{% else %}{{ m.content }}{% endif %}{% endfor %}")
    + "{% if add_generation_prompt %}assistant:{% endif %}"
)
TURNS = [
    {"role": "system", "content": "be"},
    {"role": "user", "content": "hé?"},
    {"role": "assistant", "content": "k 日本"},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "end 🙂"},
]


def chat(messages, answers_from=0, **more):
    return json.dumps({"messages": messages, "answers_from": answers_from, **more})


def learnt(conversation, template=None, encoder=None):
    """The text of the answers, one string a run of neighbouring tokens."""
    encoder = encoder or ConversationEncoder(ByteTokenizer())
    if template:
        encoder.tokenizer.chat_template = template
    encoded = encoder(conversation, "file:1")
    edges = np.flatnonzero(np.diff(np.concatenate([[0], encoded.answers, [0]])))
    return [encoder.tokenizer.decode(encoded.ids[a:b]) for a, b in edges.reshape(-1, 2)]


@pytest.mark.parametrize(
    ("template", "answers"),
    [
        (None, ["k 日本" + END, "end 🙂" + END]),
        (CHATML, ["k 日本<|im_end|>", "end 🙂<|im_end|>"]),
        (INSTRUCT, [" k 日本" + END, " end 🙂" + END]),
        (THOUGHTS_OF_THE_LAST, ["k 日本<end>", "<think></think>end 🙂<end>"]),
        (MARKED, ["k 日本" + END, "end 🙂" + END]),
    ],
    ids=["bytes", "chatml", "instruct", "thoughts of the last", "marked"],
)
def test_every_answer_is_learnt_and_nothing_else(template, answers):
    assert learnt(chat(TURNS), template) == answers
    assert learnt(chat(TURNS, answers_from=4), template) == answers[1:]


CHATML_MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}{% else %}{{ m.content + '<|im_end|>\\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LINES = "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}" + (
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


def test_the_mask_is_the_same_with_and_without_generation_marks():
    masks = []
    for template in (CHATML, CHATML_MARKED):
        encoder = ConversationEncoder(ByteTokenizer())
        encoder.tokenizer.chat_template = template
        encoded = encoder(chat(TURNS), "file:1")
        masks.append((encoded.ids.tolist(), encoded.answers.tolist()))
    assert masks[0] == masks[1]
    with pytest.raises(UserError, match="message 3: the chat template writes no token that ends this answer"):
        learnt(chat(TURNS), LINES)  # a line break is all that ends these turns


def test_answers_are_refused_behind_a_prompt_that_opens_thoughts_which_are_never_written():
    with pytest.raises(UserError, match="message 3: the generation prompt of the chat template ends with '<think>'"):
        learnt(chat(TURNS), MADE_TO_THINK)


def test_the_bytes_tokenizer_chats_as_its_exported_directory_does(tmp_path):
    ByteTokenizer().save_pretrained(tmp_path)
    exported = AutoTokenizer.from_pretrained(tmp_path)
    theirs = exported.apply_chat_template(TURNS, return_dict=True, return_assistant_tokens_mask=True)
    ours = ConversationEncoder(ByteTokenizer())(chat(TURNS), "file:1")
    assert ours.ids.tolist() == theirs["input_ids"]
    assert ours.answers.sum() == sum(len(turn["content"].encode()) + 1 for turn in TURNS if turn["role"] == "assistant")
    assert repr(load_tokenizer(str(tmp_path))) == "ByteTokenizer()"


def test_a_prompt_is_not_learnt_and_its_completion_is_closed():
    assert learnt(json.dumps({"prompt": "2+2=", "completion": "4"})) == ["4" + END]


def test_a_conversation_that_begins_with_an_answer_and_one_that_calls_tools():
    assert learnt(chat(TURNS[2:]), CHATML) == ["k 日本<|im_end|>", "end 🙂<|im_end|>"]
    called = (
        "{% for m in messages %}{{ m.role + ':' + (m.tool_calls | tojson if m.tool_calls else m.content) + '<;>' }}"
        + ("{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}{% if tools %}{% endif %}")
    )
    turns = [TURNS[1], {"role": "assistant", "tool_calls": [{"name": "f"}]}, {"role": "tool", "content": "3"}, TURNS[4]]
    assert learnt(chat(turns), called) == ['[{"name": "f"}]<;>', "end 🙂<;>"]


def test_templates_and_tokenizers_that_do_not_serve_are_told_with_the_place(trained_tokenizer):
    with pytest.raises(UserError, match="has no chat template"):
        learnt(chat(TURNS), encoder=ConversationEncoder(load_tokenizer(str(trained_tokenizer))))
    with pytest.raises(UserError, match="file:1: the chat template rejects it: roles must alternate"):
        learnt(chat(TURNS), "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(UserError, match=r"file:1, message 3: the generation prompt"):
        learnt(
            chat(TURNS), "{% for m in messages %}{{ m.role ~ m.content | upper }}{{ messages | length }}{% endfor %}"
        )
    with pytest.raises(UserError, match="file:1: the chat template writes no answer"):
        learnt(chat(TURNS), CHATML + "{# #}{% if false %}" + MARKED + "{% endif %}")


def row(**columns):
    return json.dumps(columns) + "\n"


GOOD = row(messages=TURNS)
BAD = {
    "no list": (row(messages="hello"), "a.jsonl:1: `messages` is str, not a list of {role, content}"),
    "nothing": (row(messages=[]), "a.jsonl:1: `messages` is empty"),
    "no object": (row(messages=["hi"]), "a.jsonl:1: `messages`, message 1 is str, not an object"),
    "other names": (
        row(messages=[{"from": "human", "value": "x"}]),
        r"a.jsonl:1: `messages`, message 1 has no `role` \(it has: from, value\)",
    ),
    "wrong role": (
        GOOD + row(messages=[{"role": "gpt", "content": "x"}]),
        "a.jsonl:2: .*message 1: role 'gpt' is not one of",
    ),
    "empty answer": (
        row(messages=[TURNS[1], {"role": "assistant", "content": " "}]),
        "a.jsonl:1: `messages`, message 2 is an empty answer",
    ),
    "no answer": (
        row(messages=[TURNS[1]]),
        r"a.jsonl:1: `messages` has no message of role assistant .*\(roles: user\)",
    ),
    "pictures": (
        row(messages=[{"role": "user", "content": [{"type": "image"}]}, TURNS[2]]),
        "a.jsonl:1: .* has parts that are not text",
    ),
    "mixed": (GOOD + row(text="x"), "a.jsonl:2 has no column `messages`"),
    "completion that is no text": (row(prompt="x", completion=3), "a.jsonl:1: `completion` is int, not a string"),
    "empty completion": (row(prompt="x", completion=""), "a.jsonl:1: `completion` is empty"),
}


@pytest.mark.parametrize(("content", "words"), BAD.values(), ids=BAD)
def test_what_is_no_conversation_is_one_line_with_its_place(content, words, tmp_path):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(UserError, match=words) as caught:
        read_documents(tmp_path / "a.jsonl", tmp_path / "cache")
    assert "\n" not in str(caught.value)


def test_files_of_two_kinds_are_told_before_anything_is_read(tmp_path):
    (tmp_path / "a.jsonl").write_text(GOOD)
    (tmp_path / "b.jsonl").write_text(row(text="x"))
    with pytest.raises(UserError, match=r"a.jsonl has `messages`, .*b.jsonl has `text`: train on one kind at a time"):
        preflight(tmp_path)


def test_the_column_decides_and_both_formats_and_data_sets_agree(tmp_path):
    rows = [{"messages": TURNS, "text": "not this"}, {"messages": TURNS[:3], "text": ""}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "b.parquet")
    documents = [
        read_documents(tmp_path / "a.jsonl", tmp_path / "cache"),
        read_documents(tmp_path / "b.parquet", tmp_path / "cache"),
        as_documents(rows, "train_dataset"),
        as_documents(Dataset.from_list(rows), "train_dataset"),
    ]
    samples = [make_samples(d, ByteTokenizer(), 128, Preparation(tmp_path / "cache")) for d in documents]
    for other in samples[1:]:
        for index in range(2):
            assert other[index]["labels"].tolist() == samples[0][index]["labels"].tolist()
    assert documents[2]["place"][1] == "train_dataset[1]"
    assert not holds_tokens(rows) and holds_tokens(samples[0]) and holds_tokens([(torch.zeros(1), torch.zeros(1))])
    with pytest.raises(UserError, match=r"train_dataset\[1\]: `messages` is int"):
        as_documents([rows[0], {"messages": 3}], "train_dataset")


def conversations(*pairs):
    """One conversation for each (question, answer): 25 ids before the question and answer, 29 in all beside them."""
    turns = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in pairs]
    return as_documents([{"messages": messages} for messages in turns], "chats")


def test_samples_are_padded_on_the_right_cut_at_the_end_and_counted(tmp_path):
    documents = conversations(("q", "a"), ("q", "b" * 30), ("q" * 20, "c"))
    samples = make_samples(documents, ByteTokenizer(), 32, Preparation(tmp_path))
    padded, cut = samples  # of the third nothing would be left to learn
    assert set(padded) == {"input_ids", "labels"}
    assert padded["input_ids"].tolist()[26:] == [97, 256, 10, 257, 257, 257]
    without = make_samples(documents, ByteTokenizer(), 32, Preparation(tmp_path), vocabulary=257)  # without this id
    assert without[0]["input_ids"].tolist()[26:] == [97, 256, 10, 256, 256, 256]
    assert padded["labels"].tolist() == [IGNORED] * 26 + [97, 256] + [IGNORED] * 4
    assert cut["labels"].tolist() == [IGNORED] * 26 + [98] * 6
    assert samples.summary == (
        "3 conversations of 61 tokens; 1 longer one lost 26 tokens; 1 dropped: no answer within 32 tokens"
    )
    with pytest.raises(UserError, match="none of 3 conversations has an answer within the first 20 tokens"):
        make_samples(documents, ByteTokenizer(), 20, Preparation(tmp_path))


def test_packed_samples_hold_whole_conversations_and_positions_begin_anew(tmp_path):
    documents = conversations(*((f"q{i}", chr(97 + i) * (3 * i % 17 + 1)) for i in range(20)))
    packed = make_samples(documents, ByteTokenizer(), 96, Preparation(tmp_path), packing=True)
    alone = make_samples(documents, ByteTokenizer(), 96, Preparation(tmp_path))
    assert len(packed) < len(alone) == 20
    found = []
    for sample in packed:
        positions = sample["position_ids"]
        edges = [*(positions == 0).nonzero().flatten().tolist(), 96]
        for start, stop in pairwise(edges):
            assert positions[start:stop].tolist() == list(range(stop - start))
            if (sample["labels"][start:stop] != IGNORED).any():
                found.append((sample["input_ids"][start:stop].tolist(), sample["labels"][start:stop].tolist()))
    lengths = alone.conversations.lengths()
    wanted = [(s["input_ids"][:n].tolist(), s["labels"][:n].tolist()) for s, n in zip(alone, lengths, strict=True)]
    assert sorted(found) == sorted(wanted)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=80))
def test_best_fit_decreasing_places_every_sample_once_and_wastes_little(lengths):
    blocks = best_fit_decreasing(lengths, 50)
    assert sorted(index for block in blocks for index in block) == list(range(len(lengths)))
    loads = [sum(lengths[index] for index in block) for block in blocks]
    assert max(loads) <= 50
    assert len(loads) < 2 or sum(sorted(loads)[:2]) > 50  # two blocks that fit into one would be one
