"""Handle SIGTERM, SIGINT, SIGUSR1 and SIGHUP: a training run saves and exits; any other process exits at once.

Python runs signal handlers only between instructions of the main thread, which may be blocked in a collective. So a
thread reads the signals from a pipe. After each step the Trainer asks for them and tells all ranks
(`_agree_on_control` in `harness/training/trainer.py`). The thread also ends this rank if its launcher is gone, as
nobody else would.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from harness.device.builds import abandon_builds
from harness.resilience.process import activity
from harness.resilience.process.launcher import Launcher
from harness.topology.processes import wait_readable

# In ascending precedence: if ranks received different signals, the highest one counts. SIGTERM is the lowest, because a
# rank treats the loss of its launcher as a SIGTERM, whatever ended the launcher.
SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT)
POLL_S = 0.1  # interval of checks of the launcher
SAME_S = 0.2  # signals within this time of the first count as one
# DeepSpeed's launcher may send its own SIGTERM this late after a signal to the whole process group.
FORWARDED_S = 2.0
_OF_THREAD = threading.local()  # `mask`: signals that the thread blocked before it began to fork


class Stopped(SystemExit):
    """A signal ended training, after a checkpoint. The exit `code` is 128 + the signal's number."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number


class Interrupted(Exception):
    """A signal requested the end of the run. Raised to leave an evaluation; the training loop then saves."""


class SignalListener:
    """Receives the signals of this process inside its `with` block; `say` prints a line for the user."""

    def __init__(self, say: Callable[[str], None], launcher: Launcher) -> None:
        self.say = say
        self.launcher = launcher
        self.first = 0  # number of the first signal, which asks for the end
        self._first_at = 0.0  # its time
        self.saves = False  # whether the training loop checks `first` and saves; else a signal ends the process at once
        self.promise = ""  # message for the first signal, if any
        self.where: str | None = "before the first step"  # named in the message of an exit at once; None: no message

    def __enter__(self) -> SignalListener:
        self._read, self._write = os.pipe()
        # `set_wakeup_fd` requires it of the writing end: a handler must not block on a full pipe.
        for end in (self._read, self._write):
            os.set_blocking(end, False)
        # Under nohup, a closed terminal must not end the run.
        ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
        self.handlers = {number: signal.signal(number, self._noted) for number in SIGNALS if number not in ignored}
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._open = True
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._open = False
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        # Wakes the thread, which reads 0 as no signal.
        os.write(self._write, b"\0")
        self._thread.join()
        os.close(self._read)
        os.close(self._write)

    def _noted(self, number: int, frame: FrameType | None) -> None:
        """Do nothing: the listening thread reads the signal from the pipe."""

    def _listen(self) -> None:
        while self._open:
            arrived = os.read(self._read, 512) if wait_readable([self._read], POLL_S) else b""
            for number in arrived:
                if number in self.handlers:
                    self._receive(number)
            if not self.first and self.launcher.is_gone():
                self._receive(signal.SIGTERM)

    def _receive(self, number: int) -> None:
        is_forwarded = self.launcher.is_deepspeed and number == signal.SIGTERM
        since_first = time.monotonic() - self._first_at
        if number == signal.SIGINT:
            self.launcher.end_runner()
        # The first signal asks for a checkpoint; a later one that is not its echo ends the process at once.
        if self.saves and not self.first:
            self.first = number
            self._first_at = time.monotonic()
            if self.promise:
                self.say(f"{signal.Signals(number).name}: {self.promise}")
        elif not self.saves or since_first > (FORWARDED_S if is_forwarded else SAME_S):
            self._end(number)

    def _end(self, number: int) -> None:
        activity.leave()
        if self.where is not None:
            self.say(f"{signal.Signals(number).name} {self.where}: the run has ended")
        sys.stdout.flush()
        sys.stderr.flush()
        # os._exit skips the exit handlers that end these workers, which would wait for work forever.
        for package in ("multiprocessing", "multiprocess"):
            for child in getattr(sys.modules.get(package), "active_children", list)():
                child.kill()
        abandon_builds()
        # The launcher ends the last ranks by SIGTERM: the exit code stays that of the signal which stopped the run.
        os._exit(128 + (self.first if self.where is None and self.first else number))


@contextmanager
def listening(say: Callable[[str], None], parent: str = "") -> Iterator[SignalListener | None]:
    """Receive signals in this block. Does nothing outside the main thread, or inside another such block.

    `parent` is `LaunchEnv.parent`.
    """
    active = _active()
    if active is not None or threading.current_thread() is not threading.main_thread():
        yield active
        return
    with SignalListener(say, Launcher.find(parent)) as listener:
        yield listener


@contextmanager
def reported_by(say: Callable[[str], None]) -> Iterator[None]:
    """Print messages about signals through `say` in this block."""
    listener = _active()
    if listener is None:
        yield
        return
    before = listener.say
    listener.say = say
    try:
        yield
    finally:
        listener.say = before


@contextmanager
def at_the_end_of_a_step(say: Callable[[str], None], parent: str = "") -> Iterator[SignalListener | None]:
    """Defer signals in this block: the caller checks the listener's `first` after each step, saves and stops.

    Yields the listener; None outside the main thread, which cannot have one.

    After a signal in the last step, all work is done, and the script still writes the model. Without an outer
    `listening` block, that signal is raised again at the end of this block.
    """
    is_outer = _active() is None
    with listening(say, parent) as listener:
        if listener is None:
            yield None
            return
        listener.saves = True
        listener.where = "again"
        try:
            yield listener
        except BaseException as error:
            listener.saves = False
            # The error itself says why the run ends.
            listener.where = None
            listener.first = error.number if isinstance(error, Stopped) else listener.first
            raise
        listener.promise = (
            "the training is done, and the run ends when the model is written; a second one ends it at once"
        )
    if is_outer and listener.first:
        signal.raise_signal(listener.first)


def received() -> int:
    """Return the number of the signal that requested the end of the run; 0 without a signal."""
    listener = _active()
    return 0 if listener is None else listener.first


def precedence(number: int) -> int:
    """Return the precedence of a signal, from 1; 0 for no signal. Among all ranks, the highest counts."""
    return SIGNALS.index(signal.Signals(number)) + 1 if number else 0


def of_precedence(place: int) -> int:
    """Return the signal with this precedence; 0 for precedence 0."""
    return SIGNALS[place - 1] if place else 0


def say_nothing() -> None:
    """Exit without a message on further signals, because another reason is reported."""
    if listener := _active():
        listener.where = None


def typed_command() -> tuple[str, ...] | None:
    """Return the command that the user typed to start the run; None if it is unknown."""
    listener = _active()
    return None if listener is None else listener.launcher.command


def _active() -> SignalListener | None:
    # The signal handler is a bound method of the open listener, so no global variable is needed.
    listener = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    return listener if isinstance(listener, SignalListener) else None


def _hold_back() -> None:
    # Before a fork: a child that receives a signal too early would write it to its parent's pipe.
    if listener := _active():
        _OF_THREAD.mask = signal.pthread_sigmask(signal.SIG_BLOCK, listener.handlers)


def _let_through() -> None:
    # Delivers the signals that arrived during the fork.
    if (mask := vars(_OF_THREAD).pop("mask", None)) is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _forget() -> None:
    # In a forked child the default handlers return, as the pipe belongs to the parent's thread.
    if listener := _active():
        signal.set_wakeup_fd(-1)
        for number in listener.handlers:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    _let_through()


os.register_at_fork(before=_hold_back, after_in_parent=_let_through, after_in_child=_forget)
