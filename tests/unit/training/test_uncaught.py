"""Errors that nothing catches: the user's in one line with the place, others as ever."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import pytest
import torch

from harness import uncaught
from harness.config.text.diagnostic import ConfigError, Diagnostic, Severity
from harness.config.text.document import load
from harness.errors import NotMet, UserError, UserErrors, printable
from harness.topology.env import LaunchEnv
from harness.topology.failure import tell
from harness.uncaught import lines_of, out_of_memory, report, show_in_one_line


def finding(line: int) -> Diagnostic:
    return Diagnostic(
        code="DS101", severity=Severity.ERROR, message="unknown key", file="a.json", line=line, hint="remove it"
    )


@pytest.mark.parametrize(
    ("error", "lines"),
    [
        pytest.param(UserError("a is wrong"), ["a is wrong"], id="one"),
        pytest.param(UserErrors("a is wrong", "b is wrong"), ["a is wrong", "b is wrong"], id="several"),
        pytest.param(UserError("a\x1b[31mb\u202e"), ["a\\x1b[31mb\\u202e"], id="what-a-terminal-would-act-on"),
        pytest.param(ConfigError([finding(3)]), ["a.json:3:1: DS101 unknown key; remove it"], id="a-finding"),
        pytest.param(
            ConfigError([finding(3), finding(4), finding(5)]),
            ["a.json:3:1: DS101 unknown key; remove it (and 2 more: ds-harness check a.json)"],
            id="three-findings",
        ),
    ],
)
def test_an_error_is_a_line_for_each_thing_to_correct(error: UserError, lines: list[str]) -> None:
    assert lines_of(error) == lines


@pytest.mark.parametrize(
    ("text", "shown"), [("a b é 🙂", "a b é 🙂"), ("", ""), ("\t\r\0", "\\t\\r\\x00"), ("\ud800", "\\ud800")]
)
def test_what_is_not_printable_is_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown


def uncaught_in(action: Callable[[], object]) -> tuple[type[BaseException], BaseException, TracebackType | None]:
    """What Python hands to its hook when this ends a program."""
    with pytest.raises(Exception) as caught:
        action()
    return caught.type, caught.value, caught.tb


def shown(monkeypatch: pytest.MonkeyPatch, action: Callable[[], object]) -> list[BaseException]:
    """Let the hook show what `action` raises; return what was left to Python's own."""
    left: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    show_in_one_line()
    monkeypatch.setattr(sys, "__excepthook__", lambda kind, error, trace: left.append(error))
    sys.excepthook(*uncaught_in(action))
    return left


def test_a_users_error_ends_with_the_line_of_the_users_own_program(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shown(monkeypatch, lambda: load("no-such-preset.json")) == []
    told = capsys.readouterr()
    (line,) = told.err.splitlines()
    # the package itself raises it, so the last line outside of it is the lambda above
    assert line.startswith("error: ") and "no-such-preset.json" in line and line.endswith(")")
    file, _, number = line.rpartition(" (")[2].removesuffix(")").rpartition(":")
    assert file == __file__ and "load(" in open(__file__).read().splitlines()[int(number) - 1]  # noqa: SIM115, PTH123
    assert told.out == ""


def test_each_line_of_several_has_the_place(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def raising() -> None:
        raise UserErrors("a is wrong", "b is wrong")

    shown(monkeypatch, raising)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(" (")[0] for line in lines] == ["error: a is wrong", "error: b is wrong"]
    assert len({line.partition(" (")[2] for line in lines}) == 1 and __file__ in lines[0]


def test_other_errors_are_pythons_to_show(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (error,) = shown(monkeypatch, lambda: 1 // 0)
    assert isinstance(error, ZeroDivisionError) and capsys.readouterr().err == ""


@pytest.mark.parametrize("launcher", [{}, {"TORCHELASTIC_RUN_ID": "none"}], ids=["plain processes", "torchrun"])
def test_ranks_that_wait_are_told_of_a_programs_own_error(
    launcher: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[object] = []
    monkeypatch.setattr(uncaught, "tell", lambda env, what: told.append((env.rank, what)))
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for name, value in {**place, **launcher}.items():
        monkeypatch.setenv(name, value)
    assert len(shown(monkeypatch, lambda: {}["text"])) == 1
    assert told == ([] if launcher else [(1, "KeyError: 'text'")])  # torchrun ends the others


@pytest.mark.parametrize(
    ("rank", "waits"), [("0", False), ("3", True), (None, False), ("many", False)], ids=["first", "other", "no", "odd"]
)
def test_other_ranks_wait_for_the_first_one_to_say_it(
    rank: str | None, waits: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    naps: list[float] = []
    monkeypatch.setattr(uncaught.time, "sleep", naps.append)
    place = {"RANK": rank, "WORLD_SIZE": "4", "LOCAL_RANK": rank, "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for name, value in {**place, "TORCHELASTIC_RUN_ID": "none"}.items():
        monkeypatch.delenv(name, raising=False)
        if value is not None and rank is not None:
            monkeypatch.setenv(name, value)

    def raising() -> None:
        raise UserError("a is wrong")

    shown(monkeypatch, raising)
    assert naps == [uncaught.GRACE_S] * waits
    assert capsys.readouterr().err.count("a is wrong") == 1


ENV = LaunchEnv(rank=1, world_size=2, local_rank=1, local_world_size=2, master_port=1, launched=True)


@pytest.mark.parametrize(
    ("env", "error", "how"),
    [
        pytest.param(ENV, UserErrors("a is wrong", "so is b"), ["a is wrong"], id="others-are-told-first"),
        pytest.param(ENV, ValueError("a is wrong"), ["ValueError: a is wrong"], id="of-a-program"),
        pytest.param(ENV, NotMet("rank 0 has failed"), [], id="rank-0-shows-it"),
        pytest.param(replace(ENV, rank=0), NotMet("rank 1 has failed"), ["shown"], id="rank-0-shows-it-for-all"),
        pytest.param(replace(ENV, parent="mpi"), NotMet("two kinds"), [6.0, "shown"], id="the-launcher-ends-it-before"),
    ],
)
def test_an_error_of_all_ranks_is_shown_by_one(
    env: LaunchEnv, error: BaseException, how: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[object] = []
    monkeypatch.setattr(uncaught.time, "sleep", done.append)
    monkeypatch.setattr(uncaught, "show_and_tell", lambda _, what, show: done.append(what))
    report(env, error, lambda: done.append("shown"))
    assert done == how


def test_an_error_that_is_shown_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten: list[object] = []
    monkeypatch.setattr(uncaught.atexit, "unregister", forgotten.append)
    report(LaunchEnv(), UserError("a is wrong"), lambda: None)
    assert forgotten == [tell]


def test_a_hook_of_the_program_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    own = lambda *_: None  # noqa: E731
    monkeypatch.setattr(sys, "excepthook", own)
    show_in_one_line()
    assert sys.excepthook is own


LIMITED = """
import os, resource, sys
from harness.composition import Trainer
from harness.train import main

train = Trainer.train

def with_little_memory(self, *args):
    with open("/proc/self/statm") as pages:
        size = int(pages.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (size + (1 << 30),) * 2)
    return train(self, *args)

Trainer.train = with_little_memory
os.chdir(os.path.dirname(sys.argv[1]))
flags = "--model_name_or_path tiny-llama --max_steps 1 --per_device_train_batch_size 512 --block_size 512"
sys.exit(main(f"{flags} --train_file text.txt --output_dir {sys.argv[1]}".split()))
"""
ADVICE = r"use a smaller --per_device_train_batch_size .*, or put fewer ranks on a host"


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="the size of a process is read from /proc")
def test_a_step_that_exhausts_the_memory_of_a_cpu_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a few words " * 30_000)
    env = {**os.environ, "HF_DATASETS_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", LIMITED, str(tmp_path / "run")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    last, size = done.stderr.splitlines()[-1], r"\([\d,.]+ [MG]iB could not be allocated\)"
    begins = rf"error: rank 0: out of its host's memory in step 1 {size}: {ADVICE}; the traceback is in "
    assert re.match(begins, last), last
    assert "DefaultCPUAllocator: can't allocate memory" in (tmp_path / "run/logs/rank_0.log").read_text()


def test_a_program_of_its_own_gets_the_advice_below_the_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (error,) = shown(monkeypatch, lambda: torch.empty(2**60))
    assert isinstance(error, RuntimeError)
    size = r"\([\d,]+\.0 GiB could not be allocated\)"
    assert re.match(rf"error: rank 0: out of its host's memory {size}: {ADVICE}$", capsys.readouterr().err)


def test_what_is_no_lack_of_memory_has_no_advice() -> None:
    with pytest.raises(MemoryError) as caught:
        bytearray(2**62)
    assert re.match(rf"out of its host's memory: {ADVICE}$", out_of_memory(caught.value) or "")
    on_gpu = out_of_memory(RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity"))
    assert on_gpu is not None and on_gpu.startswith("out of its device's memory (2.00 GiB could not be allocated): use")
    assert out_of_memory(RuntimeError("shape '[2]' is invalid for input of size 3")) is None
