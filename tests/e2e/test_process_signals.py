"""Signals to single processes: what ends at once, what waits for the end of a step, who ends with its launcher."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.topology.process_status import status_of
from harness.topology.processes import children_of

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.ranks
PROGRAM = """
import os, signal, sys, time
if sys.argv[1] == "signalled as it is forked":
    os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGTERM))
from harness.resilience.process import signals
say = lambda text: print(text, flush=True)
def train():
    if "fork" in sys.argv[1] and not os.fork():
        time.sleep(30)
        os._exit(1)
    say("ready")
    while not signals.received():
        time.sleep(0.02)
    time.sleep(float(sys.argv[2]))
    raise signals.Stopped(signals.received())
with signals.listening(say, sys.argv[3]):
    if sys.argv[1] == "preparing":
        say("ready")
        time.sleep(30)
    with signals.at_the_end_of_a_step(say):
        if sys.argv[1] != "exporting":
            train()
    say("ready")
    time.sleep(float(sys.argv[2]))
    say("written")
"""
ENDING = """
import os, signal, sys, time
from harness.resilience.process import signals
say = lambda text: print(text, flush=True)
with signals.listening(say):
    with open(os.devnull, "w") as log, signals.reported_by(lambda text: print(text, file=log)):
        with signals.at_the_end_of_a_step(say):
            pass
    say("ready")
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(1)
"""
BUILDING = """
import sys
from harness.resilience.process import signals
with signals.listening(print):
    from torch.utils.cpp_extension import load_inline
    load_inline("waits", ["#include <torch/extension.h>"], build_directory=sys.argv[1])
"""
LAUNCHER = """
import subprocess, sys
subprocess.run([sys.executable, "-c", sys.argv[1], "training", "0", "torchrun"])
"""


CODES = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGUSR1: 138, signal.SIGHUP: 129}


def _not_ignoring() -> None:
    """Undo what `nohup` and a shell's `&` set, which the program would respect."""
    for number in CODES:
        signal.signal(number, signal.SIG_DFL)


class Process:
    """A program that is ready to be signalled."""

    def __init__(self, program: str, *arguments: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, *map(str, arguments)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=_not_ignoring,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def end(self) -> tuple[int, str]:
        """Its exit code, and what it said after it was ready."""
        assert self.process.stdout is not None
        said = self.process.stdout.read()  # `communicate` would lose what came together with the first line
        return self.process.wait(30), said


def run(doing: str, seconds: float = 0) -> Process:
    return Process(PROGRAM, doing, seconds, "")


@pytest.mark.parametrize("number", CODES)
def test_a_signal_ends_a_run_with_the_usual_code(number: signal.Signals) -> None:
    preparing, training = run("preparing"), run("training")
    for process in (preparing, training):
        process.process.send_signal(number)
    said = f"{number.name} before the first step: the run has ended\n"
    assert preparing.end() == (CODES[number], said)
    assert training.end() == (CODES[number], "")


def test_a_second_signal_ends_at_once_and_one_right_after_the_first_is_the_same() -> None:
    patient, hurried = run("training", 1.5), run("training", 60)
    for process in (patient, hurried):
        process.process.send_signal(signal.SIGTERM)
        process.process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert hurried.process.poll() is None
    hurried.process.send_signal(signal.SIGINT)
    code, said = hurried.end()
    assert (code, said) == (130, "SIGINT again: the run has ended\n")
    assert patient.end() == (143, "")


@pytest.mark.parametrize("when", ["forking", "signalled as it is forked"])
def test_a_forked_child_ends_by_its_own_signal_and_leaves_the_parent_alone(when: str) -> None:
    parent = run(when)
    if when == "forking":
        child = int(subprocess.check_output(["pgrep", "-P", str(parent.process.pid)], text=True))
        os.kill(child, signal.SIGTERM)
    time.sleep(0.3)
    assert parent.process.poll() is None
    parent.process.send_signal(signal.SIGUSR1)
    assert parent.end()[0] == 138


@pytest.mark.skipif(not all(map(shutil.which, ("c++", "ninja"))), reason="no compiler")
def test_a_signal_while_an_operator_is_compiled_leaves_no_lock_and_no_compiler(tmp_path: Path) -> None:
    building = subprocess.Popen([sys.executable, "-c", BUILDING, tmp_path], cwd=ROOT, start_new_session=True)
    until = time.monotonic() + 60
    while not (listed := subprocess.run(["pgrep", "-s", str(building.pid), "cc1plus"], capture_output=True).stdout):
        assert time.monotonic() < until
        time.sleep(0.1)
    assert (tmp_path / "lock").exists()
    building.terminate()
    assert building.wait(30) == 143
    assert not (tmp_path / "lock").exists()
    compiler, until = int(listed.split()[0]), time.monotonic() + 30
    while (status := status_of(compiler)) is not None and status.state != "Z":  # whoever is its parent now may not reap
        assert time.monotonic() < until
        time.sleep(0.1)


def test_a_rank_ends_when_its_launcher_is_gone() -> None:
    launcher = Process(LAUNCHER, PROGRAM)
    launcher.process.kill()
    code, said = launcher.end()  # the pipe is closed once the rank, too, has ended
    assert (code, said) == (-signal.SIGKILL, "")


def test_a_signal_when_the_runs_log_is_closed_is_reported_where_it_was_before() -> None:
    code, said = Process(ENDING).end()
    assert (code, said.count("SIGINT: the training is done"), said.count("\n")) == (0, 1, 1)


def test_a_signal_after_the_last_step_lets_the_model_be_written_and_a_second_one_does_not() -> None:
    patient, hurried = run("exporting", 1), run("exporting", 60)
    for process in (patient, hurried):
        process.process.send_signal(signal.SIGTERM)
    code, said = patient.end()
    assert (code, said.splitlines()[1:]) == (0, ["written"])
    assert said.startswith("SIGTERM: the training is done")
    hurried.process.send_signal(signal.SIGTERM)
    code, said = hurried.end()
    assert (code, said.splitlines()[1:]) == (143, ["SIGTERM again: the run has ended"])


@pytest.fixture
def chain(tmp_path: Path) -> Iterator[list[str]]:
    """Words that start a stand-in of DeepSpeed's two processes above `python -c PROGRAM`, named as they are named."""
    starts = "import subprocess, sys; subprocess.Popen([sys.executable, *sys.argv[1:]]).wait()"  # as DeepSpeed's does
    (tmp_path / "deepspeed").write_text(starts)
    passed = "import subprocess, sys; subprocess.run([sys.executable, *sys.argv[2:]])"
    yield [str(tmp_path / "deepspeed"), "-c", passed, "deepspeed.launcher.launch", "-c"]


def test_the_deepspeed_command_is_found_two_processes_above(chain: list[str]) -> None:
    show = (
        "from harness.arguments.words import resume_command; "
        "from harness.resilience.process.launcher import Launcher; l = Launcher.find(); "
        "print(len(l.links), l.is_deepspeed, l.runner > 1, l.is_gone(), resume_command(l.command))"
    )
    told = subprocess.check_output([sys.executable, *chain, show, "--resume_from_checkpoint=x"], cwd=ROOT, text=True)
    assert told.startswith("2 True True False ")
    assert told.rstrip().endswith("--resume_from_checkpoint auto") and "=x" not in told


@pytest.mark.parametrize("doing", ["preparing", "training"])
def test_the_deepspeed_command_prints_no_traceback_after_ctrl_c(chain: list[str], doing: str) -> None:
    start = "import sys; sys.exit(__import__('subprocess').call([sys.executable, *sys.argv[1:]]))"
    process = Process(start, *chain, PROGRAM, doing, 0, "")
    (runner,) = children_of(process.process.pid)
    (launch,) = children_of(runner)
    (rank,) = children_of(launch)
    os.kill(runner, signal.SIGSTOP)  # as Ctrl-Z and `fg`, which are no reason to end
    os.kill(runner, signal.SIGCONT)
    time.sleep(0.5)
    assert process.process.poll() is None
    for each in (runner, rank):  # Ctrl-C reaches both; DeepSpeed's process between them has a handler
        os.kill(each, signal.SIGINT)
    code, said = process.end()
    assert "Traceback" not in said
    assert said == ("SIGINT before the first step: the run has ended\n" if doing == "preparing" else "")
    assert code == 256 - signal.SIGTERM  # of sys.exit(-15)
