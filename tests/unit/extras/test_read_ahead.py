"""Worker processes read ahead of the run: the steps that are asked for, in their order, and no longer than it lives."""

from __future__ import annotations

import itertools
import multiprocessing
import multiprocessing.util
import os
import pickle
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from harness.batches.stream import BatchStream
from harness.errors import UserError
from harness.extras.read_ahead import ReadAhead


def counting(plan: int) -> Iterator[int]:
    return itertools.count(plan)


@pytest.fixture
def squares() -> Iterator[ReadAhead[int, tuple[int, int]]]:
    """Gives the square of a plan, and the process that has computed it."""
    ahead = ReadAhead(lambda plan: (plan**2, os.getpid()), counting, workers=2)
    yield ahead
    ahead.close()


def ends(pid: int) -> bool:
    """Whether a process, of which we need not be the parent, ends before long."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                return True
        except OSError:
            return True
        time.sleep(0.01)
    return False


def test_steps_come_in_order_also_after_a_jump(squares: ReadAhead[int, tuple[int, int]]) -> None:
    read = [squares(plan) for plan in (3, 4, 5, 6)]
    assert [square for square, _ in read] == [9, 16, 25, 36]
    workers = {pid for _, pid in read}
    assert len(workers) == 2 and os.getpid() not in workers
    assert [squares(plan)[0] for plan in (4, 5, 20, 21)] == [16, 25, 400, 441]  # back, then forward
    assert {child.pid for child in multiprocessing.active_children()}.isdisjoint(workers)


def test_an_error_of_the_users_comes_at_its_step_and_is_no_traceback() -> None:
    def read(plan: int) -> int:
        if plan == 1:
            raise UserError("row 1: correct it")
        return 2 * plan

    ahead = ReadAhead(read, counting, workers=1)
    assert ahead(0) == 0
    with pytest.raises(UserError, match=r"^row 1: correct it$"):
        ahead(1)
    assert ahead(2) == 4  # what comes behind was read meanwhile
    ahead.close()


def test_a_step_of_more_tensors_than_files_may_be_open_comes_as_it_was_read() -> None:
    kinds = [torch.int64, torch.bfloat16, torch.bool, torch.float64, torch.complex64]

    def read(plan: int) -> list[dict[str, torch.Tensor]]:
        one = torch.arange(6).reshape(2, 3).T.to(kinds[plan % 5]) + plan
        return [{"input_ids": one, "labels": one, "none": torch.empty(0, 3), "loss": torch.tensor(2.0)}] * 2 + [
            {"input_ids": torch.full((k % 3, 2), plan + k)} for k in range(400)
        ]

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = len(list(Path("/proc/self/fd").iterdir())) + 200  # tests before this one may have left files open
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, limits[1]))
    ahead = ReadAhead(read, counting, workers=2)
    try:
        for plan in range(6):
            found = ahead(plan)
            for given, wanted in zip(found, read(plan), strict=True):
                for name, tensor in wanted.items():
                    assert given[name].dtype == tensor.dtype and torch.equal(given[name], tensor)
            assert found[0]["input_ids"] is found[0]["labels"]  # one tensor stays one
            found[2]["input_ids"].add_(1)  # it may be written to
    finally:
        ahead.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_step_that_cannot_be_sent_is_an_error_and_no_hang() -> None:
    ahead = ReadAhead(lambda plan: lambda: plan, counting, workers=1)
    with pytest.raises((AttributeError, pickle.PicklingError), match="pickle"):
        ahead(0)
    ahead.close()


def test_the_signal_of_the_run_itself_ends_a_worker(squares: ReadAhead[int, tuple[int, int]]) -> None:
    _, pid = squares(0)
    os.kill(pid, signal.SIGINT)
    (worker,) = (child for child in multiprocessing.active_children() if child.pid == pid)
    worker.join(20)
    assert worker.exitcode == 0


def test_workers_end_with_a_run_that_is_killed() -> None:
    receive, send = os.pipe()
    run = os.fork()
    if run == 0:
        try:
            # the second step takes long: torch looks for the parent between two
            ahead = ReadAhead(lambda plan: time.sleep(60 * plan) or os.getpid(), counting, workers=1)
            os.write(send, str(ahead(0)).encode())
            time.sleep(60)
        finally:
            os._exit(1)
    os.close(send)
    worker = int(os.read(receive, 20))
    os.close(receive)
    os.kill(run, signal.SIGKILL)
    os.waitpid(run, 0)
    assert ends(worker)


def streamed(rows: list[dict[str, list[int]]], micro_batch: int, workers: int) -> BatchStream:
    """Steps of 4 samples; without workers the process itself reads."""
    ahead = partial(ReadAhead, workers=workers) if workers else None
    return BatchStream(rows, seed=7, micro_batch=micro_batch, accumulation=4 // micro_batch, read_ahead=ahead)


def test_workers_read_ahead_the_same_samples_also_after_a_rollback_and_end() -> None:
    def step(stream: BatchStream) -> list[list[int]]:
        return [ids[:, 0].tolist() for ids, _ in stream.next_step()]

    rows = [{"input_ids": [row, 0, 1]} for row in range(37)]
    alone, ahead = streamed(rows, 2, workers=0), streamed(rows, 2, workers=2)
    state = torch.get_rng_state()
    before = set(multiprocessing.active_children())  # what other tests have left
    for _ in range(6):
        assert step(ahead) == step(alone)
    for stream in (ahead, alone):
        stream.consumed = 8
        stream.skipped.append([12, 16])
    for _ in range(4):
        assert step(ahead) == step(alone)
    assert torch.equal(torch.get_rng_state(), state)
    workers = set(multiprocessing.active_children()) - before
    assert len(workers) == 2
    for number in ("TERM", "INT"):  # for the whole run, which saves first
        subprocess.run(["kill", f"-{number}", *(str(worker.pid) for worker in workers)], check=True)
    assert step(ahead) == step(alone)
    ahead.close()
    for worker in workers:
        worker.join(20)
    assert not any(worker.is_alive() for worker in workers)


def test_a_signal_to_the_whole_run_is_blocked_in_every_thread_of_a_worker() -> None:
    """Also in threads that start before the worker's own code runs, as torch's may."""

    class Early:
        """Starts a thread in each process that is forked, as its first act."""

        def start(self) -> None:
            threading.Thread(target=time.sleep, args=(60,), daemon=True, name="early").start()

    early = Early()
    multiprocessing.util.register_after_fork(early, Early.start)
    ahead = ReadAhead(lambda plan: (os.getpid(), [t.name for t in threading.enumerate()]), counting, workers=1)
    try:
        worker, _ = ahead(0)
        for plan in range(1, 6):  # which thread gets a signal is the kernel's choice
            subprocess.run(["kill", "-TERM", str(worker)], check=True)
            again, threads = ahead(plan)
            assert again == worker and "early" in threads
    finally:
        ahead.close()


def test_what_a_worker_cannot_use_is_one_line() -> None:
    rows = [{"input_ids": [1] * (1 + i)} for i in range(8)]
    stream = streamed(rows, 4, workers=1)
    with pytest.raises(UserError, match=r"^input_ids of .* in one micro-batch: pad them"):
        stream.next_step()
    stream.close()
