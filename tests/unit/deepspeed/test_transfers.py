"""What a stage sends arrives in order, as it was when it was sent; chunks of one stage exchange within it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe import p2p
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from harness.deepspeed import schedule
from harness.deepspeed.schedule import Transfers, in_place_of_p2p, open_transfers
from harness.schedules import ModelChunks
from tests.unit.deepspeed.pipelines import pipeline

ANY: Any = object()


class Wire:
    """The processes of a world: what is sent from stage to stage, by group, and what has arrived."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[tuple[Tensor, int, object]] = []
        self.received: list[tuple[int, object]] = []
        self.waited = 0
        self.arrived = False
        monkeypatch.setattr(schedule.dist, "isend", self.isend)
        monkeypatch.setattr(schedule.dist, "recv", self.recv)

    def isend(self, tensor: Tensor, to: int, group: object) -> object:
        self.sent.append((tensor, to, group))
        return SimpleNamespace(is_completed=lambda: self.arrived, wait=self.wait)

    def recv(self, tensor: Tensor, source: int, group: object) -> None:
        tensor.fill_(source)
        self.received.append((source, group))

    def wait(self) -> None:
        self.waited += 1


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    return Wire(monkeypatch)


def of_stage(stage: int, chunks: ModelChunks) -> Transfers:
    """The transfers of one stage of several; its ranks in the world are ten times the stage."""
    engine: Any = SimpleNamespace(stage_id=stage, grid=SimpleNamespace(stage_to_global=lambda stage_id: 10 * stage_id))
    groups: Any = {True: "to later stages", False: "to earlier stages"}
    return Transfers(engine, chunks, groups)


@pytest.mark.parametrize(
    ("stage", "chunk", "to", "group"),
    [
        pytest.param(0, 1, 10, "to later stages", id="the next"),
        pytest.param(1, 0, 0, "to earlier stages", id="the one before"),
        pytest.param(2, 3, 0, "to earlier stages", id="round to the first"),
        pytest.param(0, 5, 20, "to later stages", id="back round to the last"),
    ],
)
def test_each_direction_has_its_group(stage: int, chunk: int, to: int, group: str, wire: Wire) -> None:
    own = of_stage(stage, ModelChunks(3, 2))
    own.send(torch.ones(2), chunk)
    ((_, rank, used),) = wire.sent
    assert (rank, used) == (to, group)
    own.receive(into := torch.zeros(2), chunk)
    source, used = wire.received[0]
    assert (source, used) == (to, "to earlier stages" if group == "to later stages" else "to later stages")
    assert into.tolist() == [to, to]


@given(st.lists(st.booleans(), max_size=20))
def test_parts_of_one_stage_exchange_in_order_and_on_no_wire(sends: list[bool]) -> None:
    own, waiting, number = of_stage(1, ModelChunks(2, 2, folded=True)), [], 0  # it has chunks 1 and 2
    for sent in sends:
        if sent:
            own.send(torch.tensor([float(number)]), 2)
            waiting.append(number)
            number += 1
        elif waiting:
            own.receive(into := torch.zeros(1), 1)
            assert into.item() == waiting.pop(0)


def test_what_is_sent_keeps_no_graph_and_no_gaps(wire: Wire) -> None:
    own = of_stage(0, ModelChunks(2))
    tensor = torch.arange(6.0, requires_grad=True).view(2, 3).t() * 1
    own.send(tensor, 1)
    sent, _, _ = wire.sent[0]
    assert sent.is_contiguous() and not sent.requires_grad and torch.equal(sent, tensor)


def test_a_tensor_is_kept_until_it_has_arrived(wire: Wire) -> None:
    own = of_stage(0, ModelChunks(2))
    for number in range(3):
        own.send(torch.tensor([number]), 1)
    assert len(own._under_way) == 3
    wire.arrived = True
    own.send(torch.tensor([3]), 1)
    assert len(own._under_way) == 1  # the last one alone
    own.finish()
    assert wire.waited == 1 and own._under_way == []
    own.finish()
    assert wire.waited == 1


def test_a_receive_before_its_send_within_a_stage_is_an_error_and_takes_nothing() -> None:
    own = of_stage(0, ModelChunks(1, 2))
    with pytest.raises(IndexError):
        own.receive(torch.zeros(1), 0)
    own.send(torch.ones(1), 1)
    own.clear()  # of a step that failed
    with pytest.raises(IndexError):
        own.receive(torch.zeros(1), 0)


def test_an_instruction_sends_here_and_deepspeed_elsewhere_even_after_an_error() -> None:
    own, before = of_stage(0, ModelChunks(1, 2)), (p2p.send, p2p.recv)

    with in_place_of_p2p(own):
        p2p.send(torch.tensor([1.0]), 1)
    with pytest.raises(RuntimeError, match="out of memory"), in_place_of_p2p(own):
        p2p.send(torch.tensor([2.0]), 1)
        raise RuntimeError("out of memory")
    assert (p2p.send, p2p.recv) == before
    for expected in (1.0, 2.0):
        own.receive(into := torch.zeros(1), 0)
        assert into.item() == expected


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("each", "groups"), [(1, 0), (2, 2)])
def test_one_part_a_stage_needs_no_groups_of_its_own(each: int, groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = pipeline(1)
    made: list[object] = []
    real = dist.new_group
    monkeypatch.setattr(
        schedule.dist, "new_group", lambda *args, **kwargs: made.append(real(*args, **kwargs)) or made[-1]
    )
    activations, gradients = open_transfers(engine, ModelChunks(1, each))
    assert len(made) == groups
    assert activations.groups.keys() | gradients.groups.keys() == {True, False}
    assert activations.groups.get(False) is not gradients.groups[False]  # they must not wait for each other
    if each > 1:
        assert activations.groups[False] is made[0] and gradients.groups[True] is made[1]
