"""SIGTERM, SIGINT, SIGUSR1 and SIGHUP: a run that trains saves and ends; before and after that it ends at once.

Python calls a handler only between two instructions of its main thread, which may wait for another rank. So a thread
reads the signals as they come, and looks after the launcher as well: when that is gone, nobody would end the ranks.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from harness.resilience.process import activity
from harness.resilience.process.launcher import Launcher
from harness.topology.processes import children_of, command_of, wait_readable

SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT)  # the later count where ranks get several
POLL_S = 0.1  # between two looks at the launcher, which has 0.25 s from its SIGINT to its traceback
SAME_S = 0.2  # signals so close are one
FORWARDED_S = 2.0  # how long after a signal to all the launcher's own SIGTERM may come


class Stopped(SystemExit):
    """A signal ended the training, after a checkpoint; `code` is the usual exit code, 128 + its number."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number


class Interrupted(Exception):
    """A signal asks for the end of the run, so an evaluation is left unfinished; the training loop saves and ends."""


class SignalListener:
    """Receives the signals of this process while it is open.

    Attributes:
        say: prints a line for the user.
        first: number of the signal that asked for the end, 0 if none did.
    """

    def __init__(self, say: Callable[[str], None], launcher: Launcher) -> None:
        self.launcher = launcher
        self.say = say
        self.first = 0
        self.saves = False  # whether the main thread will see `first` and save
        self.promise = ""  # what is reported at the first signal, if anything
        self.where: str | None = "before the first step"  # of an end at once; None: nothing is said of it
        self._first_at = 0.0
        self._wakes = launcher.runner_wakes()
        self._open = False

    def __enter__(self) -> SignalListener:
        self._read, self._write = os.pipe()
        for end in (self._read, self._write):
            os.set_blocking(end, False)
        ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()  # nohup
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
        os.write(self._write, b"\0")
        self._thread.join()
        os.close(self._read)
        os.close(self._write)

    def _noted(self, number: int, frame: FrameType | None) -> None:
        """Do nothing, in the main thread: the other one reads the signal."""

    def _listen(self) -> None:
        while self._open:
            for number in self._next(POLL_S):
                self._receive(number)
            if self._runner_is_interrupted() and not self.first:
                self._receive(signal.SIGINT)
            if not self.first and self.launcher.is_gone():
                self._receive(signal.SIGTERM)

    def _next(self, seconds: float) -> list[int]:
        """Return the signals that came within some time."""
        ready = wait_readable([self._read], seconds)
        return [number for number in os.read(self._read, 512) if number in self.handlers] if ready else []

    def _receive(self, number: int) -> None:
        now = time.monotonic()
        if number == signal.SIGINT:  # Ctrl-C reaches the `deepspeed` command too
            self._runner_is_interrupted()
        if not self.saves:
            self._end(number)
        elif not self.first:
            self.first, self._first_at = number, now
            if self.promise:
                self.say(f"{signal.Signals(number).name}: {self.promise}")
        elif now - self._first_at > self._apart(number):
            self._end(number)

    def _runner_is_interrupted(self) -> bool:
        """End the `deepspeed` command if it was interrupted; returns whether it was."""
        wakes, self._wakes = self._wakes, self.launcher.runner_wakes()
        interrupted = self.launcher.is_interrupted(wakes)
        if interrupted:
            self.launcher.end_runner()
        return interrupted

    def _apart(self, number: int) -> float:
        """Seconds after the first signal from which on this one is a second one."""
        return FORWARDED_S if self.launcher.is_deepspeed and number == signal.SIGTERM else SAME_S

    def _end(self, number: int) -> None:
        activity.leave()
        if self.where is not None:
            self.say(f"{signal.Signals(number).name} {self.where}: the run has ended")
        sys.stdout.flush()
        sys.stderr.flush()
        for package in ("multiprocessing", "multiprocess"):  # what they have started would wait for work for ever
            for child in getattr(sys.modules.get(package), "active_children", list)():
                child.kill()
        abandon_builds()
        is_stopping = self.where is None and self.first  # the launcher ends the ranks that are left by SIGTERM
        os._exit(128 + (self.first if is_stopping else number))


@contextmanager
def listening(say: Callable[[str], None], parent: str = "") -> Iterator[SignalListener | None]:
    """Receive signals; nothing is done in a thread that is not the main one, or where they are received already.

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
    """Let `say` print what is said of signals; afterwards, when its file may be closed, as before."""
    listener = _active()
    if listener is None:
        yield
        return
    before, listener.say = listener.say, say
    try:
        yield
    finally:
        listener.say = before


@contextmanager
def at_the_end_of_a_step(say: Callable[[str], None], parent: str = "") -> Iterator[None]:
    """Keep a signal for `received` instead of ending at once: the caller looks at the end of each step, and saves.

    A signal after the last step lets the script write the model, as all the work is done; without a script around
    it, that signal is raised again.
    """
    is_outer = _active() is None
    with listening(say, parent) as listener:
        if listener is None:
            yield
            return
        listener.saves, listener.where = True, "again"
        try:
            yield
        except BaseException as error:
            listener.saves, listener.where = False, None  # whoever raised it says why the run ends
            listener.first = error.number if isinstance(error, Stopped) else listener.first
            raise
        listener.promise = (
            "the training is done, and the run ends when the model is written; a second one ends it at once"
        )
    if is_outer and listener.first:
        signal.raise_signal(listener.first)


def received() -> int:
    """Return the number of the signal that asked for the end of the run, 0 if none did."""
    listener = _active()
    return 0 if listener is None else listener.first


def precedence(number: int) -> int:
    """Place of a signal from 1, 0 for none: of what several ranks received the highest is the run's.

    SIGTERM comes last, as it also stands for the end of the launcher, which another signal may have caused.
    """
    return SIGNALS.index(signal.Signals(number)) + 1 if number else 0


def of_precedence(place: int) -> int:
    """Return the number of the signal at a place; 0 for none."""
    return SIGNALS[place - 1] if place else 0


def say_nothing() -> None:
    """From here on end by a signal silently: another reason is reported."""
    if listener := _active():
        listener.where = None


def resume_command() -> str | None:
    """Return the command by which the user goes on, as far as it is known."""
    listener = _active()
    return None if listener is None else listener.launcher.resume_command()


def _active() -> SignalListener | None:
    """Return the listener that receives this process's signals; its handler is the one place that knows it."""
    listener = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    return listener if isinstance(listener, SignalListener) else None


def _forget() -> None:
    """In a forked child: end by signals as usual, and do not hand them to the parent's thread."""
    if listener := _active():
        signal.set_wakeup_fd(-1)
        for number in listener.handlers:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


os.register_at_fork(after_in_child=_forget)


def abandon_builds() -> None:
    """Stop the compilation that this process has started, and release its lock.

    Torch keeps other processes out by a file, which it removes only where Python ends as usual: the next run would
    wait for it for ever.
    """
    for child in children_of(os.getpid()):
        if any(Path(word).name == "ninja" for word in command_of(child)[:2]):
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGTERM)  # it ends its compilers, and removes what they have started to write
    lock = getattr(sys.modules.get("torch.utils.file_baton"), "FileBaton", None)
    for held in [thing for thing in gc.get_objects() if type(thing) is lock] if lock else []:
        with suppress(OSError, TypeError):  # not acquired, or released already
            if os.path.samestat(os.fstat(held.fd), Path(held.lock_file_path).stat()):
                held.release()
