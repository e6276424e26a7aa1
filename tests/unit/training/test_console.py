"""Who speaks to the user, and where the rest goes: rank 0 on standard output, errors in one line, chatter to a log."""

from __future__ import annotations

import io
import os
import sys
import warnings
from pathlib import Path

import pytest

import harness
from harness.console import Console, plain_console
from harness.errors import UserError
from harness.quiet import quiet


def consoles() -> tuple[Console, Console, io.StringIO, io.StringIO]:
    out, error = io.StringIO(), io.StringIO()
    first, other = (Console(out=out, error=error, speaks=speaks) for speaks in (True, False))
    return first, other, out, error


def test_rank_0_speaks_and_any_rank_fails() -> None:
    first, other, out, error = consoles()
    for console in (first, other):
        console.say("step 1")
        console.say()
        console.warn("the disk is full")
        console.fail("no such\n  file:\tx")
    assert out.getvalue() == "step 1\n\nwarning: the disk is full\n"
    assert error.getvalue() == 2 * "error: no such file: x\n"
    assert not first.is_terminal


@pytest.mark.parametrize(("rank", "speaks"), [(0, True), (1, False), (7, False)])
def test_a_program_keeps_its_own_output(rank: int, speaks: bool) -> None:
    console = plain_console(rank)
    assert console.speaks is speaks and console.out is sys.stdout and console.log is None


def test_chatter_goes_to_the_log_and_words_to_the_user(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "logs" / "rank_0.log"
    log.parent.mkdir()
    log.write_text("an earlier start\n")
    with quiet(log, rank=0) as console:
        print("python's chatter")
        print("python's error", file=sys.stderr)
        os.write(1, b"words of C++\n")
        os.write(2, b"errors of C++\n")
        console.say("step 1: naïve")
        console.fail("it ends")
        assert console.log == log
    print("after")
    out, error = capfd.readouterr()
    assert (out, error) == ("step 1: naïve\nafter\n", "error: it ends\n")
    said = log.read_text().splitlines()
    assert said[0] == "an earlier start"
    assert sorted(said[1:]) == ["errors of C++", "python's chatter", "python's error", "words of C++"]


def test_output_comes_back_after_an_exception(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    show = warnings.showwarning
    with pytest.raises(KeyError), quiet(tmp_path / "log", rank=1) as console:
        console.say("another rank's words")
        raise KeyError
    print("back")
    assert capfd.readouterr().out == "back\n" and warnings.showwarning is show


def test_our_own_warnings_are_seen_once_and_no_others(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ours = str(Path(harness.__file__).parent / "training" / "trainer.py")
    with warnings.catch_warnings(), quiet(tmp_path / "log", rank=0):
        warnings.simplefilter("always")
        for file in (ours, ours, "/site-packages/torch/nn/modules/module.py"):
            warnings.warn_explicit(f"from {Path(file).name}", UserWarning, file, 1)
    assert capfd.readouterr().out == "warning: from trainer.py\n"


def test_a_log_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file")
    with pytest.raises(UserError), quiet(tmp_path / "logs" / "rank_0.log", rank=0):
        pass


def test_a_run_goes_on_when_nobody_reads_its_output_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w", encoding="utf-8") as out:
        monkeypatch.setattr(sys, "stdout", out)
        with quiet(tmp_path / "log", rank=0) as console:
            console.say("one")
            assert os.read(reader, 10) == b"one\n"
            os.close(reader)
            with pytest.raises(BrokenPipeError):
                os.write(writer, b"two")
            console.say("three")
            console.warn("four" * 10_000)
