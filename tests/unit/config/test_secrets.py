"""Passwords, keys and tokens stay out of the files and the words of a run."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from harness.checking.check import check
from harness.checking.cli.render import text_block
from harness.checkpoint.exporting.model_files import hide_secrets
from harness.config.text.document import from_text
from harness.config.values.secrets import Secrets, masked_by_name
from harness.console import Console
from harness.training.recording.files import write_run
from harness.training.recording.recorder import MetricsFile

OF_CONFIG, OF_ENVIRONMENT = "comet-key-4711", "hf_abcdefghij"


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", OF_ENVIRONMENT)
    monkeypatch.setenv("SHORT_TOKEN", "run")
    monkeypatch.setenv("DATABASE_URL", "postgres://me:of-a-url-4711@host/x")
    monkeypatch.setenv("PGPASSWORD", "of-postgres-4711")


def test_run_json_holds_no_secret_of_the_config_and_none_of_the_environment(tmp_path):
    comet = {"enabled": True, "api_key": OF_CONFIG, "project": "p"}
    content = {
        "config": {"comet": comet, "other": [{"password": 12345678}]},
        "arguments": {"deepspeed_config": {"comet": comet}, "run_name": f"run {OF_CONFIG}", "sample_tokens": 64},
        "model": {"pad_token_id": 257, "eos_token": "</s>"},
        "command": f"train.py {OF_ENVIRONMENT}",
        "remote": "https://me:hunter2@host/x",
    }
    write_run(tmp_path, content)
    text = (tmp_path / "run.json").read_text()
    assert not [secret for secret in (OF_CONFIG, OF_ENVIRONMENT, "12345678", "hunter2") if secret in text]
    kept = json.loads(text)
    assert kept["config"]["comet"] == {"enabled": True, "project": "p"}
    assert kept["arguments"] == {
        "deepspeed_config": {"comet": {"enabled": True, "project": "p"}},
        "run_name": "run ***",
        "sample_tokens": 64,
    }
    assert kept["model"] == content["model"]
    assert comet["api_key"] == OF_CONFIG


def test_metrics_and_the_words_of_a_run_hold_no_secret(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl", 1)
    file.write({"step": 1, "note": f"with {OF_ENVIRONMENT}", "sizes": {"https://h/x?token=4711": 1}, "loss": 2.5})
    file.close()
    out, error = io.StringIO(), io.StringIO()
    console = Console(out=out, error=error, speaks=True)
    console.say(f"logged in by {OF_ENVIRONMENT}, run 1")
    console.fail(f"401 for {OF_ENVIRONMENT}")
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {
        "step": 1,
        "note": "with ***",
        "loss": 2.5,
        "sizes": {"https://h/x?token=***": 1},
    }
    assert (out.getvalue(), error.getvalue()) == ("logged in by ***, run 1\n", "error: 401 for ***\n")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("of-a-url-4711, of-postgres-4711 in $PWD", "***, *** in $PWD"),
        ("https:/me:pass%40word@host/x does not exist", "https:/me:***@host/x does not exist"),
        ("https://0123456789abcdef@host/1", "https://***@host/1"),
        ("ssh://git@host/a, hf://datasets/a@main/b", "ssh://git@host/a, hf://datasets/a@main/b"),
        ("https://b/x?X-Amz-Signature=abc&part=2&sig=d", "https://b/x?X-Amz-Signature=***&part=2&sig=***"),
        ("Server=x;Password=abc;Port=5", "Server=x;Password=***;Port=5"),
        ("Bearer abcdefgh.1", "Bearer ***"),
        (f"as hf_{'a1' * 17} and ghp_{'b2' * 18}", "as *** and ***"),
        ("unknown flag --wandb_api_key: use another", "unknown flag --wandb_api_key: use another"),
    ],
)
def test_a_text_is_shown_without_what_looks_like_a_secret(text, shown):
    folder = str(Path.cwd())
    assert Secrets.known().masked(text.replace("$PWD", folder)) == shown.replace("$PWD", folder)


def test_whatever_lies_below_a_secret_name_is_hidden_wherever_it_stands():
    config = {"credentials": {"for": ["of-a-list-4711"]}, "url": "ftp://me:of-this-url@host", "pwd": "of-pwd-4711"}
    content = {**config, "headers": {"Authorization": "Basic abc"}, "note": "of-a-list-4711 of-this-url of-pwd-4711"}
    shown = Secrets.known(config).without(content)
    assert shown == {"url": "ftp://me:***@host", "headers": {}, "note": "*** *** ***"}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("""train.py --deepspeed_config '{"comet": {"api_key": "a b"}}'""", """'{"comet": {"api_key": ***}}'"""),
        ("train.py --hub_token abc --seed 3", "--hub_token *** --seed 3"),
        ("train.py --wandb_api_key=abc", "--wandb_api_key=***"),
        ("pad_token: <pad>, sample_tokens 64", "pad_token: <pad>, sample_tokens 64"),
        ("the api_key is missing", "the api_key is missing"),
    ],
)
def test_a_command_is_shown_without_the_values_of_its_secrets(text, shown):
    assert masked_by_name(text).endswith(shown)


def test_a_finding_beside_a_secret_does_not_show_it():
    text = json.dumps({"train_batch_size": 8, "comet": {"enabled": True, "api_key": OF_CONFIG, "projct": "x"}})
    found = check(from_text(text))
    assert found
    assert OF_CONFIG not in "".join(text_block(item, text, colour=False) + str(item) for item in found)


def test_switches_and_measurements_are_no_secrets():
    content = {"use_auth_token": True, "token": None, "eval_secret": 0.5, "hub_token": "x"}
    assert Secrets.known().without(content) == {"use_auth_token": True, "token": None, "eval_secret": 0.5}


def test_an_export_does_not_publish_what_a_models_directory_knows(tmp_path):
    kept = {
        "label2id": {"token": 0, "password": 1},
        "eos_token": "</s>",
        "chat_template": "{{ 'Bearer ' + message.content }}",
        "token_type_ids": [0],
    }
    hub = {"token": "t", "nested": [{"api_key": ["k"]}], "source": "https://me:hunter2@host/x"}
    for name in ("config.json", "tokenizer_config.json"):
        (tmp_path / name).write_text(json.dumps({**kept, **hub}))
    hide_secrets(tmp_path)
    for name in ("config.json", "tokenizer_config.json"):
        assert json.loads((tmp_path / name).read_text()) == {**kept, "nested": [{}], "source": "https://me:***@host/x"}
