"""Profiling without ranks: the log of a step, clocks that differ, what an optimizer holds."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from harness.report.profile.clocks import Clock, answer, ask
from harness.report.profile.memory import held_bytes
from harness.report.profile.spans import SpanLog

CPU = torch.device("cpu")


@dataclass
class Ticks(Clock):
    """A clock that goes on by one second at each look."""

    ticks: int = 0

    def now(self) -> Any:
        self.ticks += 1
        return float(self.ticks)


def test_what_is_interrupted_goes_on_and_what_is_within_ends_with_it() -> None:
    clock = Ticks(CPU)
    layers = SpanLog(clock)
    log = SpanLog(clock, layers)
    log.begin("backward", "Backward")  # 1
    layers.begin("backward", "Layer", 7)  # 2
    log.begin("reduce", "Reduce")  # the layer ends at 3; 4
    log.end()  # 5
    log.end()  # 6
    log.begin("backward", "Backward")  # 7
    log.end()  # 8
    assert [(s.name, s.start, s.end, s.micro_batch) for s in log.spans(0.0)] == [
        ("Backward", 1.0, 4.0, 0),
        ("Reduce", 4.0, 5.0, None),
        ("Backward", 5.0, 6.0, 0),
        ("Backward", 7.0, 8.0, 1),
    ]
    assert [(s.layer, s.start, s.end) for s in layers.spans(1.0)] == [(7, 1.0, 2.0)]
    assert log.kind == layers.kind == ""


def test_clocks_of_other_hosts_are_compared_by_round_trips() -> None:
    store = dist.HashStore()
    import time

    found = {}
    threads = [
        threading.Thread(target=answer, args=(store, [4, 8], time.perf_counter)),
        *(
            threading.Thread(
                target=lambda rank, ahead: found.update({rank: ask(store, rank, lambda: time.perf_counter() + ahead)}),
                args=(rank, ahead),
            )
            for rank, ahead in ((4, 100.0), (8, -7.0))
        ),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    for rank, ahead in ((4, 100.0), (8, -7.0)):
        assert found[rank].seconds == pytest.approx(ahead, abs=found[rank].error + 1e-9)


def test_each_byte_of_a_model_and_its_optimizer_counts_once() -> None:
    layer = nn.Linear(10, 10, bias=False)
    twice = nn.ModuleList([layer, layer])
    optimizer = torch.optim.AdamW(twice.parameters())
    engine = SimpleNamespace(module=twice, optimizer=optimizer)
    assert held_bytes(engine, CPU) == {"parameters": 400, "gradients": 0, "optimizer": 0}
    layer(torch.ones(1, 10)).sum().backward()
    optimizer.step()
    assert held_bytes(engine, CPU) == {"parameters": 400, "gradients": 400, "optimizer": 804}
