"""What shows a log the layers of a step, and the clock of a stage."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from harness.device import moments
from harness.extras.rebalancing.rebalancer import StageClock
from harness.parallel.pipeline.staged_module import LayerSequence
from harness.report.profile.clocks import Clock
from harness.report.profile.spans import SpanLog, layers_of, log_layers

CPU = torch.device("cpu")
NAMES = ("first", "function", "last")


def test_layers_are_logged_forward_and_backward_and_no_hook_is_left() -> None:
    layers = [nn.Linear(2, 2), torch.relu, nn.Linear(2, 1)]
    module = LayerSequence(layers, checkpoint_interval=0, seed=0)
    assert sorted(index for index, _ in layers_of(module)) == [0, 2]
    log, instructions = SpanLog(Clock(CPU)), SpanLog(Clock(CPU))
    with log_layers(module, NAMES, log, instructions):
        instructions.begin("forward", "Forward")
        loss = module(torch.ones(1, 2, requires_grad=True)).sum()
        instructions.end()
        instructions.begin("backward", "Backward")
        loss.backward()
        instructions.end()
    log.end_all()
    assert [(span.kind, span.name, span.layer) for span in log.spans(0.0)] == [
        ("forward", "first", 0),
        ("forward", "last", 2),
        ("backward", "last", 2),
        ("backward", "first", 0),
    ]
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for _, layer in layers_of(module))


def test_a_stage_clock_counts_what_computes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(float(second * second) for second in range(20))
    monkeypatch.setattr(moments.time, "perf_counter", lambda: next(now))
    clock = StageClock(CPU)
    for instruction, part in (("ForwardPass", 0), ("SendActivation", 0), ("RecvGrad", 3), ("BackwardPass", 3)):
        clock.begin(instruction, part)
    clock.begin("WeightGradients", 0)
    clock.begin("OptimizerStep", 0)
    assert clock.take() == {0: (1.0 - 0.0) + (25.0 - 16.0), 3: 9.0 - 4.0}
    assert clock.take() == {}
