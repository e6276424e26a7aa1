"""Paths that no file can have, and numbers that no run has: one line, before anything starts."""

from __future__ import annotations

from argparse import ArgumentTypeError
from pathlib import Path

import pytest

from harness import TrainingArguments, UserError
from harness.cli import main
from harness.config.values.paths import usable_path
from harness.resilience.options import read_options, usable_file
from harness.resilience.script import Script
from harness.topology.env import LaunchEnv
from harness.verb_parser import integer, positive

LONG = "a" * 300


@pytest.fixture
def loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A link that leads to itself, in the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    return "loop"


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("a\0b", "it contains a NUL character"),
        ("a\nb", "it contains a line break"),
        ("\udcff", "it is not UTF-8"),
        (LONG, "it is too long"),
        ("x/" * 3000, "it is too long"),
        ("loop", "it is a loop of links"),
        ("loop/inside", "it is a loop of links"),
    ],
)
def test_a_path_that_no_file_can_have_is_refused_with_the_reason(path: str, why: str, loop: str) -> None:
    with pytest.raises(ValueError, match=f"^{why}$"):
        usable_path(path)
    assert not usable_file(path)
    for name in ("output_dir", "deepspeed_config", "resume_from_checkpoint", "sample_prompts"):
        with pytest.raises(UserError, match=f"^--{name} .*: no file can have this name: {why}$"):
            TrainingArguments(**{"output_dir": "a", name: path})


def test_an_error_is_one_line_of_a_bounded_length_whatever_it_names() -> None:
    assert str(UserError("a\nb: no such file")) == "a\\nb: no such file"
    said = str(UserError("x/" * 3000 + ": no such file"))
    assert len(said) < 2000 and said.startswith("x/x/") and said.endswith("x/: no such file")


def test_other_paths_are_taken_as_they_are(loop: str, tmp_path: Path) -> None:
    for path in ("", "missing/größe", "/dev/null/inside", str(tmp_path), "~/a"):
        assert usable_path(path) == Path(path)
    (tmp_path / "a").write_text("a")
    assert usable_file("a") and not usable_file(".") and not usable_file("b")


@pytest.mark.parametrize("path", [LONG, "\udcff", "loop"])
@pytest.mark.parametrize(
    "words",
    [
        "check PATH",
        "check zero3 --model PATH",
        "resolve PATH",
        "plan --world_size 2 --hardware h100 --model PATH",
        "plan --world_size 2 --hardware PATH --model tiny-llama",
        "plan --world_size 2 --hardware h100 --model tiny-llama --write PATH",
        "estimate --world_size 2 --hardware h100 --model tiny-llama --deepspeed_config PATH",
        "checkpoint show PATH",
        "generate PATH --prompt a",
        "report PATH",
        "verify --model_name_or_path PATH --deepspeed_config zero3",
        "cluster slurm --gpus 1 --output PATH -- harness.train",
        "dry-run --rank 0 --world_size 2 --output_dir PATH",
        "dry-run --rank 0 --world_size 2 --train_file PATH",
        "dry-run --rank 0 --world_size 2 --model PATH",
        "dry-run --rank 0 --world_size 2 --config PATH",
    ],
)
def test_every_verb_says_it_in_one_line(words: str, path: str, loop: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = main([path if word == "PATH" else word for word in words.split()])
    except SystemExit as end:
        code = end.code
    (line,) = capsys.readouterr().err.splitlines()
    assert code in (1, 2) and "no file can have this name" in line


@pytest.mark.parametrize("words", ["check --fix", "report", "checkpoint show", "generate", "cluster slurm --output"])
def test_an_empty_path_is_not_the_working_directory(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*words.split(), ""])
    assert ended.value.code == 2 and "must not be empty; the working directory is `.`" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["1_000", "٣", "9" * 5000, "0x10", "1e3", "nan", "", " 1"])
def test_a_count_is_written_in_digits(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match=r"^must be (a whole number of at least 1|at most 10,000,000)$"):
        positive(text)
    with pytest.raises(ArgumentTypeError, match=r"^invalid int value: "):
        integer(text)
    assert positive("1000") == integer("1000") == 1000 and integer("-1") == -1


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--num_accelerators 99999999999999999999", "99999999999999999999: must be at most 1,024"),
        ("--num_accelerators 5000", "--num_accelerators 5000: must be at most 1,024"),
        ("--num_accelerators 1_000", "invalid int value: '1_000'"),
        ("--max_restarts 9" + "9" * 5000, "invalid int value: '9999"),
        ("--nnodes 99999999999999 --rdzv_endpoint a:1", "must be a number of hosts"),
        ("--nnodes 2 --rdzv_endpoint [::1", "must be HOST:PORT"),
        ("--nnodes 2 --rdzv_endpoint [::1]:99999", "must be HOST:PORT"),
        (f"--nnodes 2 --rdzv_endpoint {LONG}:1", "must be HOST:PORT"),
        ("--nnodes 2 --rdzv_endpoint a..b:1", "must be HOST:PORT"),
        ("--master_addr [::1", "must be a host's name or address"),
        ("--local_addr a..b", "must be a host's name or address"),
        (f"--hostfile {LONG}", "no such file"),
    ],
)
def test_a_launch_refuses_numbers_and_addresses_that_cannot_be(flags: str, said: str) -> None:
    with pytest.raises(UserError) as told:
        read_options([*flags.split(), "train.py"])
    assert said in str(told.value)


@pytest.mark.parametrize("endpoint", ["host-a:29400", "10.0.0.1:1", "[::1]:29400", "a.b_c.svc:65535", "größe:1"])
def test_a_launch_takes_names_and_addresses(endpoint: str) -> None:
    assert read_options(["--nnodes", "2", "--rdzv_endpoint", endpoint, "train.py"]).rdzv_endpoint == endpoint


def test_a_device_beyond_any_host_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "--include", "localhost:9999999999999999", "train.py"]) == 1
    assert "a host has at most 1,024 devices" in capsys.readouterr().err


@pytest.mark.parametrize(("flag", "what"), [({}, "file"), ({"module": True}, "module"), ({"command": True}, "command")])
def test_a_script_that_does_not_exist_is_told_before_anything_starts(flag: dict[str, bool], what: str) -> None:
    with pytest.raises(UserError, match=f"^no_such_name: no such {what}$"):
        Script(["no_such_name"]).require_startable(**{"module": False, "command": False, **flag})
    with pytest.raises(UserError, match=f"^: no such {what}$"):
        Script([""]).require_startable(**{"module": False, "command": False, **flag})
    Script([__file__]).require_startable(module=False, command=False)
    Script(["harness.train"]).require_startable(module=True, command=False)
    Script(["sh"]).require_startable(module=False, command=True)


@pytest.mark.parametrize(
    ("variables", "said"),
    [({"WORLD_SIZE": "9" * 20}, "WORLD_SIZE is 9+: too large"), ({"MASTER_PORT": "70000"}, "a port is below 65536")],
)
def test_a_launchers_numbers_are_bounded(variables: dict[str, str], said: str) -> None:
    usual = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    with pytest.raises(UserError, match=said):
        LaunchEnv.from_environ({**usual, **variables})
