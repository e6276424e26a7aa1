"""A config's text is read as DeepSpeed reads it, with the place of everything, and no text brings a
traceback.
"""

from __future__ import annotations

import json
import os
import socket

import hjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.config.text.diagnostic import ConfigError
from harness.config.text.document import MAX_BYTES, from_text, load
from harness.config.text.parser import MAX_DEPTH, TextError, parse

TEXTS = [
    '{"a": 1, "b": [1, 2, {"c": null}]}',
    '{"a": True,\n "b": 2}',
    "{a: 1\n b: two words\n}",
    "a: 1\nb: [1 2\n 3]",
    '{"a": 1, # one\n // two\n /* three */ "b": 2,}',
    "{'a': 'x', \"b\": '''\n  many\n  lines'''}",
    '{"a": 5e8, "b": 5e10, "c": -0.5e-3, "d": 1.0}',
    '{"a": "\\u00e9\\n", "b": "\\ud83d\\ude00"}',
    '{"a": -, "b": 1}',
    '{"a": 1}}',
    '{"a": 1',
    '{"a": "x\ny"}',
    "",
    "# only a comment",
    "[1, 2]",
    "5",
    "\ufeff{}",
    '{"a": nul, "b": truely\n}',
    '{"a" 1}',
    '{"a": 1 "b": 2}',
    "{,}",
]


def hjson_reads(text: str):
    """What DeepSpeed's reader makes of a text; None if it fails."""
    try:
        return (hjson.loads(text, object_pairs_hook=dict),)
    except (ValueError, IndexError, RecursionError, OverflowError):
        return None


def we_read(text: str):
    """What ours makes of it; None if it refuses."""
    try:
        return (parse(text).root.data(),)
    except TextError:
        return None


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_means_what_it_means_to_deepspeeds_reader(text):
    theirs, ours = hjson_reads(text), we_read(text)
    if "'''" in text:  # the indentation of multi-line strings is nothing a config depends on
        assert (theirs is None) == (ours is None)
    else:
        assert ours == theirs


KEYS = st.text("abc_ é", min_size=1, max_size=4)
WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=6)  # a NUL is refused
SCALARS = st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.floats(-1e300, 1e300) | WORDS
VALUES = st.recursive(SCALARS, lambda v: st.lists(v, max_size=3) | st.dictionaries(KEYS, v, max_size=3), max_leaves=8)


@given(st.dictionaries(KEYS, VALUES, max_size=4), st.sampled_from([None, 2]))
def test_plain_json_is_read_as_json(data, indent):
    text = json.dumps(data, indent=indent)
    parsed = parse(text)
    assert parsed.root.data() == json.loads(text)
    assert not parsed.oddities


@settings(max_examples=400)
@given(st.text("{}[]\",:#/*' \n\tatrue0.5e-\\", max_size=40))
def test_any_text_is_read_or_refused_as_deepspeeds_reader_does(text):
    ours, theirs = we_read(text), hjson_reads(text)
    if ours is not None and theirs is not None and "'''" not in text:
        assert ours == theirs


def test_every_member_knows_its_place():
    document = from_text('{\n  "a": {\n    "b": 1\n  }\n}')
    assert document.locate("/a/b") == (3, 5)
    assert document.locate("/a/missing") == (2, 3)
    assert document.text[slice(*document.span("/a/b", of_value=True))] == "1"


@pytest.mark.parametrize(
    ("text", "place", "literal"),
    [
        ("{'train_batch_size': 8,\n 'zero_optimization': {'stage': True}\n}\n", "2:33", "true"),
        ('{"bf16": {"enabled": False},\n "fp16": {}}', "1:22", "false"),
        ('{"a": [None, 1]}', "1:8", "null"),
    ],
)
def test_a_literal_of_python_is_named_where_it_stands(text, place, literal):
    with pytest.raises(ConfigError, match=f"<text>:{place}: DS001 .* is Python, not JSON.*; write {literal}"):
        from_text(text)


def test_duplicate_keys_are_noted_with_the_second_place():
    (odd,) = from_text('{"a": 1,\n "a": 2}').oddities
    assert (odd.kind, odd.detail, odd.start) == ("duplicate-key", "a", 10)


def refusal(path) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_files_that_are_no_config_are_refused_in_one_line(tmp_path):
    (tmp_path / "binary.json").write_bytes(b'{"a": "\0"}')
    (tmp_path / "latin1.json").write_bytes(b'{"a": "\xe9"}')
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "large.json").write_text("{" + " " * MAX_BYTES + "}")
    (tmp_path / "deep.json").write_text('{"a":' * (MAX_DEPTH + 2) + "1" + "}" * (MAX_DEPTH + 2))
    os.mkfifo(tmp_path / "pipe.json")
    assert "is a directory" in refusal(tmp_path)
    assert "NUL" in refusal(tmp_path / "binary.json")
    assert "UTF-8" in refusal(tmp_path / "latin1.json")
    assert "a list, not an object" in refusal(tmp_path / "list.json")
    assert "has more than 2,097,152 bytes" in refusal(tmp_path / "large.json")
    assert "deep" in refusal(tmp_path / "deep.json")
    assert "is a pipe, not a file" in refusal(tmp_path / "pipe.json")
    assert "no such file" in refusal(tmp_path / "missing.json")
    assert "presets" in refusal("no-preset-of-this-name")


def test_a_socket_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as endpoint:
        endpoint.bind("s.json")
        assert "is a socket, not a file" in refusal("s.json")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_without_permission_is_refused(tmp_path):
    path = tmp_path / "secret.json"
    path.write_text("{}")
    path.chmod(0)
    assert "permission denied" in refusal(path)


def test_a_preset_is_found_by_its_name():
    assert load("zero3").data["zero_optimization"]["stage"] == 3


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ds.yaml", "train_batch_size: 8\n"),
        ("ds.json", "zero_optimization:\n  stage: 2\n"),
        ("ds.json", "---\ntrain_batch_size: 8\n"),
        ("ds.yml", "# DeepSpeed\nfp16: {enabled: true}\n"),
        ("ds.json", "train_batch_size: 8\nlist:\n  - a\n"),
    ],
)
def test_yaml_is_called_yaml(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match="is YAML, not JSON; write the DeepSpeed config as JSON"):
        load(tmp_path / name)


def test_json_with_another_suffix_and_hjson_without_braces_are_read(tmp_path):
    (tmp_path / "ds.yaml").write_text('{"train_batch_size": 8}')
    assert load(tmp_path / "ds.yaml").data == from_text("train_batch_size: 8").data


@pytest.mark.parametrize("escape", [r"\u0000", r"\ud800", r"\uDFFF", r"\udfff\ud800"])
def test_a_string_that_no_name_can_be_is_refused_where_it_stands(escape: str) -> None:
    with pytest.raises(ConfigError, match="is not a character that a name or a path can have") as told:
        from_text('{\n "csv_monitor": {"output_path": "a' + escape + '"}}', "a.json")
    assert (told.value.diagnostics[0].code, told.value.diagnostics[0].line) == ("DS001", 2)
    assert from_text(r'{"wandb": {"project": "\ud83d\ude00"}}', "a.json").data == {"wandb": {"project": "\U0001f600"}}


@pytest.mark.parametrize(
    ("text", "place", "missing"),
    [
        ('{\n  "a": {\n    "b": 1,\n  "c": 2\n}\n', (3, 11), "brace is missing here, for the one that opens on line 2"),
        ('{\n  "a": {\n    "b": {\n      "c": 1\n  },\n  "d": 2\n}\n', (4, 13), "opens on line 3"),
        ('{\n  "a": {\n    "b": {"c": 1,\n    "d": 2\n  }\n}\n', (3, 17), "opens on line 3"),
        ('{\n\t"a": {\n\t\t"b": 1\n\t"c": 2\n}\n', (3, 9), "opens on line 2"),
        ('{"a": {"b": 1}', (1, 15), "opens on line 1"),
        ('{\n  "a": 1\n\n', (2, 9), "opens on line 1"),
        ('{\n"a": {\n"b": 1\n}\n', (4, 2), "opens on line 1"),  # without indentation only the end tells
        ('{\n  "a": [1, 2}\n}', (2, 13), "bracket is missing here"),
        ('{"a": [1, 2', (1, 12), "bracket is missing here"),
        ('{\n  // {\n  "a": "{",\n  "b": \'{\'', (4, 11), "opens on line 1"),
    ],
)
def test_a_missing_brace_is_reported_where_it_is_missing(text, place, missing):
    with pytest.raises(ConfigError, match=missing) as refused:
        from_text(text)
    (found,) = refused.value.diagnostics
    assert (found.line, found.column) == place
    assert found.hint in ("add }", "add ]")


@pytest.mark.parametrize(
    "text",
    [
        *('{"a": 1,, }', '{"a": 1}}', '{"a": "x\n}', '{"a" 1}', '{"a": ]}'),
        '{\n  "a": 1,,\n  "b": {\n"c": 2\n  }\n}',  # odd indentation after the fault
        '{\n  "b": {\n"c": 2\n  },\n  "a": 1,,\n}',  # and before it
        '{\n  "b": {\n"c": 1e999\n  }\n}',
    ],
)
def test_another_fault_is_not_called_a_missing_brace(text):
    with pytest.raises(ConfigError) as refused:
        from_text(text)
    assert "missing" not in str(refused.value)
