"""`--config FILE`: what is written in YAML or JSON is what the command line would have said, and every other file is
refused with its line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness import TrainingArguments, UserError
from harness.arguments.themes.lora import LoraArguments
from harness.arguments.themes.preferences import PreferenceArguments
from harness.arguments.themes.script import ScriptArguments
from harness.command_line import parse
from harness.command_line.config_file import read_config_file
from harness.command_line.parsing import known_flags

KINDS = (ScriptArguments, TrainingArguments, LoraArguments, PreferenceArguments)
few = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=8)

finite = st.floats(allow_nan=False, allow_infinity=False)
names = st.text(alphabet="aé🙂 :#'\"\\-{[,&*!|>%@`0.~", min_size=1, max_size=8).filter(str.strip)
words = names.filter(lambda text: not text.startswith("-"))  # what begins with a dash is a flag to argparse
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | finite | names | st.sampled_from(["no", "on", "2024-01-01", ""]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=8,
)


def read(file: Path) -> tuple[Any, ...]:
    return parse(KINDS, ["--config", str(file)], prog="t", description="", epilog="")


def told(file: Path) -> str:
    """What is said of a file, without its folder."""
    with pytest.raises(UserError) as caught:
        read(file)
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(f"{file.parent}/", "")


@given(st.dictionaries(names, json_values, max_size=4), st.booleans(), st.sampled_from([None, 1]))
@few
def test_a_deepspeed_config_is_read_from_json_as_it_was_written(
    tmp_path: Path, config: dict[str, Any], escaped: bool, indent: int | None
) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"deepspeed_config": config}, ensure_ascii=escaped, indent=indent))
    found = read(tmp_path / "a.json")[1].deepspeed_config
    assert found == config
    assert repr(found) == repr(config)  # 1 and 1.0 and True are equal


@given(st.dictionaries(names, json_values, max_size=4), st.booleans())
@few
def test_a_deepspeed_config_is_read_from_yaml_as_it_was_written(
    tmp_path: Path, config: dict[str, Any], flow: bool
) -> None:
    text = yaml.safe_dump({"deepspeed_config": config}, allow_unicode=True, default_flow_style=flow)
    (tmp_path / "a.yaml").write_text(text)
    assert read(tmp_path / "a.yaml")[1].deepspeed_config == config


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "run_name": words,
            "seed": st.integers(0, 2**63 - 1),
            "learning_rate": st.floats(0, 1e300),
            "bf16": st.booleans(),
            "max_steps": st.integers(1, 2**63 - 1),
            "train_file": st.lists(words, min_size=1, max_size=3),
        },
    ),
    st.sampled_from([".json", ".yaml"]),
)
@few
def test_flags_are_read_as_python_takes_them(tmp_path: Path, flags: dict[str, Any], suffix: str) -> None:
    (tmp_path / f"a{suffix}").write_text(json.dumps(flags) if suffix == ".json" else yaml.safe_dump(flags))
    script, args, *_ = read(tmp_path / f"a{suffix}")
    of_script = {name: value for name, value in flags.items() if name == "train_file"}
    assert args == TrainingArguments(**{name: value for name, value in flags.items() if name not in of_script})
    assert script == ScriptArguments(**of_script)
    assert args.given | script.given == flags.keys()


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        pytest.param("run_name: no", "run_name", "no", id="no-is-a-name"),
        pytest.param("run_name: 2024-01-01", "run_name", "2024-01-01", id="a-date-is-a-name"),
        pytest.param("run_name: 010", "run_name", "010", id="zeros-stay"),
        pytest.param("run_name: 1e3", "run_name", "1e3", id="a-number-is-a-name"),
        pytest.param('run_name: "null"', "run_name", "null", id="null-in-quotes-is-a-name"),
        pytest.param("run_name: >\n  a\n  b\n", "run_name", "a b\n", id="folded"),
        pytest.param("run_name: --x", "run_name", "--x", id="begins-with-dashes"),
        pytest.param("bf16: no", "bf16", False, id="no"),
        pytest.param("bf16: True", "bf16", True, id="true"),
        pytest.param("no_bf16: true", "bf16", False, id="negated"),
        pytest.param("max_steps: 1e3", "max_steps", 1000, id="a-whole-number-in-e"),
        pytest.param("max_steps: 7.0", "max_steps", 7, id="a-whole-number-with-a-point"),
        pytest.param("--max-steps: 7", "max_steps", 7, id="dashes"),
        pytest.param("seed: 9007199254740993", "seed", 2**53 + 1, id="beyond-the-bits-of-a-float"),
        pytest.param("learning_rate: 1e-5", "learning_rate", 1e-5, id="no-point-in-a-float"),
        pytest.param("learning_rate: !!str 1e-5", "learning_rate", 1e-5, id="a-tag"),
        pytest.param("report_to: [csv, tensorboard]", "report_to", "csv,tensorboard", id="a-list-as-one-word"),
        pytest.param("report_to: []", "report_to", "", id="an-empty-list"),
        pytest.param("seed: ~", "seed", 42, id="null-is-the-default"),
        pytest.param("seed:", "seed", 42, id="nothing-is-the-default"),
        pytest.param("deepspeed: zero2", "deepspeed_config", "zero2", id="another-name"),
        pytest.param("max_steps: &x 3\nseed: *x", "seed", 3, id="an-anchor"),
        pytest.param("deepspeed_config: {lr: 1e-5}", "deepspeed_config", {"lr": 1e-5}, id="a-number-inside"),
        pytest.param("deepspeed_config: {a: 2024-01-01}", "deepspeed_config", {"a": "2024-01-01"}, id="a-date-inside"),
        pytest.param("deepspeed_config: {a: 12e03f}", "deepspeed_config", {"a": "12e03f"}, id="a-hash-inside"),
    ],
)
def test_a_value_means_what_the_flag_means(text: str, name: str, value: object, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(text)
    found = getattr(read(tmp_path / "a.yaml")[1], name)
    assert found == value and type(found) is type(value)


def test_words_of_a_list_stay_words(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(
        "use_peft: on\nlora_target_modules: [on, 1e5, 010]\ntrain_file: [no, a b, 'c,d']\n"
    )
    with pytest.raises(UserError, match="--use_peft: 'on' is not true or false"):
        read(tmp_path / "a.yaml")
    (tmp_path / "a.yaml").write_text(
        "use_peft: yes\nlora_target_modules: [on, 1e5, 010]\ntrain_file: [no, a b, 'c,d']\n"
    )
    script, _, lora, _ = read(tmp_path / "a.yaml")
    assert lora.lora_target_modules == ["on", "1e5", "010"]
    assert script.train_file == ["no", "a b", "c,d"]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        pytest.param(
            "a.yaml", "max-steps: 3\nmax_steps: 4\n", "a.yaml:2: max_steps is given twice", id="two-spellings"
        ),
        pytest.param(
            "a.yaml", "training:\n  steps: 3\n  steps: 4\n", "a.yaml:3: training.steps is given twice", id="in"
        ),
        pytest.param(
            "a.yaml",
            "deepspeed_config: zero2\ndeepspeed: zero3\n",
            "a.yaml:2: deepspeed_config and deepspeed are the same flag: give one of them",
            id="two-names",
        ),
        pytest.param(
            "a.yaml", "\ndeepspeed_config: &a {b: *a}\n", "a.yaml: one of its aliases contains itself", id="circle"
        ),
        pytest.param("a.yaml", "deepspeed_config: {b: !foo c}\n", "tag '!foo'", id="unknown-tag"),
        pytest.param(
            "a.yaml", "deepspeed_config: {b: !!binary aGk=}\n", "has a value that JSON does not have", id="bytes"
        ),
        pytest.param("a.yaml", "deepspeed_config: {b: !!set {a}}\n", "has a value that JSON does not have", id="set"),
        pytest.param(
            "a.yaml", "deepspeed_config: {? [1] : 2}\n", "has a value that JSON does not have", id="key-in-a-list"
        ),
        pytest.param("a.yaml", "seed: " + "[" * 600, "--config a.yaml: is nested too deeply", id="deep"),
        pytest.param("a.yaml", "seed: 1\n---\nseed: 2\n", "a.yaml:2: is neither YAML nor JSON", id="two-documents"),
        pytest.param("a.yaml", "seed:\t1\n\tb: 2", "is neither YAML nor JSON", id="tabs"),
        pytest.param("a.yaml", "seed: \x01", "--config a.yaml: is neither YAML nor JSON", id="control-character"),
        pytest.param("a.yaml", "3", "give flags and their values, as `max_steps: 100`", id="a-number"),
        pytest.param("a.yaml", "- seed", "give flags and their values", id="a-list"),
        pytest.param("a.json", '{"seed": 1,,}', "a.json:1: is neither YAML nor JSON", id="two-commas"),
        pytest.param(
            "a.yaml", "max_steps: {a: 1}", "a.yaml:1: argument --max_steps: '{\"a\": 1}' is not a", id="mapping"
        ),
        pytest.param("a.yaml", "max_steps: [1, 2]", "a.yaml:1: argument --max_steps: '1,2' is not a number", id="list"),
        pytest.param(
            "a.yaml", "train_file: []", "a.yaml:1: argument --train_file: expected at least one", id="no-file"
        ),
        pytest.param("a.yaml", "<<: {seed: 1}", "a.yaml:1: unknown flag --<<", id="merge"),
        pytest.param("a.yaml", "no_bf16: false", "--no_bf16=false takes no value: give --bf16 true or", id="not-not"),
        pytest.param("a.yaml", "arguments: 3", "a.yaml:1: unknown flag --arguments", id="a-run-without-arguments"),
        pytest.param("a.yaml", "'': 3", "a.yaml:1: unknown flag --", id="no-name"),
        pytest.param("a.yaml", "seed: caf\xe9".encode("latin-1"), "--config a.yaml: cannot be read", id="latin-1"),
    ],
)
def test_what_cannot_be_meant_is_one_line_with_its_place(
    name: str, text: str | bytes, words: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    assert words in told(tmp_path / name)


def test_several_files_are_read_in_their_order_and_the_words_win(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("seed: 1\nmax_steps: 1\nlogging_steps: 1\n")
    (tmp_path / "b.yaml").write_text("max_steps: 2\nlogging_steps: 2\n")
    words = ["--logging_steps=3", f"--config={tmp_path}/a.yaml", "--config", f"{tmp_path}/b.yaml"]
    _, args, *_ = parse(KINDS, words, prog="t", description="", epilog="")
    assert (args.seed, args.max_steps, args.logging_steps) == (1, 2, 3)
    with pytest.raises(UserError, match="--config: give a file, YAML or JSON"):
        parse(KINDS, [*words, "--config"], prog="t", description="", epilog="")


@pytest.mark.parametrize("text", ["", "\n# nothing\n", "{}", "arguments: {}"])
def test_a_file_may_say_nothing(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(text)
    assert read_config_file(str(tmp_path / "a.yaml"), known_flags(KINDS)) == []


@pytest.mark.parametrize(
    ("recorded", "flags"),
    [
        pytest.param({"max_steps": -1, "seed": 42, "bf16": False, "packing": False}, {}, id="defaults"),
        pytest.param({"warmup_steps": 0.0, "num_train_epochs": 3}, {}, id="defaults-of-another-type"),
        pytest.param({"train_file": ["python-stdlib"], "run_name": None}, {}, id="defaults-of-lists-and-null"),
        pytest.param({"seed": 43, "bf16": True}, {"seed": 43, "bf16": True}, id="others"),
        pytest.param({"learning_rate": 5.0000001e-05}, {"learning_rate": 5.0000001e-05}, id="a-close-one"),
        pytest.param({"train_file": ["python-stdlib", "a"]}, {"train_file": ["python-stdlib", "a"]}, id="one-more"),
        pytest.param({"output_dir": "/tmp/日本 🙂"}, {"output_dir": "/tmp/日本 🙂"}, id="unicode"),
        pytest.param({"deepspeed_config": {"lr": 1e-05}}, {"deepspeed_config": {"lr": 1e-05}}, id="numbers-inside"),
    ],
)
def test_of_a_run_what_is_no_default_is_given(recorded: dict[str, Any], flags: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"run_id": "x", "arguments": recorded}))
    script, args, *_ = read(tmp_path / "run.json")
    assert args.given | script.given == flags.keys()
    for name, value in flags.items():
        assert getattr(script if name == "train_file" else args, name) == value


def test_of_a_run_a_default_that_was_given_is_given_again(tmp_path: Path) -> None:
    recorded = {"gradient_checkpointing": False, "seed": 42}
    (tmp_path / "run.json").write_text(json.dumps({"arguments": recorded, "given": ["gradient_checkpointing"]}))
    assert read(tmp_path / "run.json")[1].given == {"gradient_checkpointing"}


def test_an_escape_that_is_escaped_is_none(tmp_path: Path) -> None:
    name = "\\ud83d\\ude00 🙂 \\"
    (tmp_path / "a.json").write_text(json.dumps({"run_name": name}))
    assert read(tmp_path / "a.json")[1].run_name == name


def test_a_file_that_would_never_end_is_refused_at_once(tmp_path: Path) -> None:
    laughs = "\n".join(
        ["a0: &a0 [lol, lol, lol]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30))]
    )
    (tmp_path / "laughs.yaml").write_text(f"{laughs}\nmax_steps: 1\n")
    (tmp_path / "itself.yaml").write_text("run_name: &a [*a]\n")
    told = {
        "laughs.yaml": "aliases expand to more than 262,144 values",
        "itself.yaml": "one of its aliases contains itself",
    }
    for name, words in told.items():
        with pytest.raises(UserError, match=f"{words}: write the values out"):
            parse([TrainingArguments], ["--config", str(tmp_path / name)], prog="t", description="", epilog="")
    (tmp_path / "long.yaml").write_text("a" * 2**21)
    os.mkfifo(tmp_path / "pipe.yaml")
    told = {"long.yaml": "it has more than 1,048,576 bytes", "pipe.yaml": "it is a pipe", "/dev/zero": "it is a device"}
    for name, words in told.items():
        with pytest.raises(UserError, match=f"cannot be read: {words}"):
            parse([TrainingArguments], ["--config", str(tmp_path / name)], prog="t", description="", epilog="")
