"""An engine that follows a program of ours computes what DeepSpeed's own schedule does, in however many chunks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe import p2p
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.utils import PartitionedTensor
from torch import Tensor

from harness.deepspeed.schedule import METHODS, UPDATE, Observer, Schedule, ScheduledEngine, StageProgram
from harness.deepspeed.update import StagedEngine
from harness.parallel.pipeline.instructions import Action
from harness.parallel.weight_gradients import DeferredGradients
from harness.schedules import ModelChunks
from tests.unit.deepspeed.pipelines import LATE, batches, built, config_of, pipeline, scheduled, staged, weights

pytestmark = pytest.mark.usefixtures("one_rank")
ONE, TWO, FOUR, FOLDED = ModelChunks(1), ModelChunks(1, 2), ModelChunks(1, 4), ModelChunks(1, 2, folded=True)
FP32, BF16 = torch.float32, torch.bfloat16
CASES = [
    pytest.param("gpipe", ONE, 3, FP32, id="gpipe"),
    pytest.param("zero-bubble", ONE, 4, BF16, id="zero bubble"),
    pytest.param("zero-bubble", ONE, 1, FP32, id="zero bubble, one micro-batch"),
    pytest.param("interleaved", TWO, 4, FP32, id="two chunks"),
    pytest.param("interleaved", FOUR, 3, FP32, id="a chunk a layer"),
    pytest.param("interleaved", TWO, 1, FP32, id="one micro-batch"),
    pytest.param("interleaved", FOUR, 2, BF16, id="two micro-batches in bf16"),
    pytest.param("zero-bubble-v", FOLDED, 4, FP32, id="folded"),
    pytest.param(LATE, FOUR, 3, FP32, id="weight gradients last"),
    pytest.param("dualpipe-v", FOLDED, 4, BF16, id="folded, in pairs"),
]


@pytest.mark.parametrize(("name", "chunks", "micro_batches", "dtype"), CASES)
def test_no_program_changes_a_number(name: str, chunks: ModelChunks, micro_batches: int, dtype: torch.dtype) -> None:
    bf16 = dtype is torch.bfloat16
    theirs, ours = pipeline(micro_batches, bf16=bf16), scheduled(name, chunks, micro_batches, bf16=bf16)
    for seed in range(2):
        wanted = theirs.train_batch(batches(seed, dtype))
        assert torch.equal(ours.train_batch(batches(seed, dtype)), wanted)
    assert all(map(torch.equal, weights(ours), weights(theirs)))
    wanted = theirs.eval_batch(batches(7, dtype))
    assert torch.equal(ours.eval_batch(batches(7, dtype)), wanted)
    assert torch.equal(ours.train_batch(batches(3, dtype)), theirs.train_batch(batches(3, dtype)))  # and goes on


@pytest.mark.parametrize("chunks", [TWO, FOUR], ids=str)
def test_an_evaluation_may_have_another_number_of_micro_batches(chunks: ModelChunks) -> None:
    theirs, ours = pipeline(2), scheduled("interleaved", chunks, 2)
    for count in (1, 5, 2):
        wanted = theirs.eval_batch(batches(count), num_micro_batches=count)
        assert torch.equal(ours.eval_batch(batches(count), num_micro_batches=count), wanted)
    assert torch.equal(ours.train_batch(batches(0)), theirs.train_batch(batches(0)))


def test_each_batch_is_read_once_though_two_parts_need_it() -> None:
    engine = scheduled("interleaved", FOUR, 3)
    read = 0

    def counted() -> Iterator[tuple[Tensor, Tensor]]:
        nonlocal read
        for batch in batches(0):
            read += 1
            yield batch

    engine.train_batch(counted())
    assert read == 3


def test_a_step_that_failed_leaves_nothing_to_the_next() -> None:
    theirs, ours = pipeline(4), scheduled("zero-bubble-v", FOLDED, 4)

    def broken(after: int) -> Iterator[tuple[Tensor, Tensor]]:
        for number, batch in enumerate(batches(0)):
            if number == after:
                raise RuntimeError("no more data")
            yield batch

    for after in range(4):
        with pytest.raises(RuntimeError, match="no more data"):
            ours.train_batch(broken(after))
        ours.zero_grad()
        ours.timers.timers.clear()  # DeepSpeed's own, which it has left running
    assert torch.equal(ours.train_batch(batches(1)), theirs.train_batch(batches(1)))
    assert all(map(torch.equal, weights(ours), weights(theirs)))


def test_weight_gradients_of_a_step_that_failed_are_not_computed_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, ours = pipeline(2), scheduled(LATE, TWO, 2)

    def fail(_products: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="out of memory"):
        patched.setattr("harness.parallel.weight_gradients.accumulate", fail)
        ours.train_batch(batches(0))
    ours.zero_grad()
    ours.timers.timers.clear()
    assert torch.equal(ours.train_batch(batches(1)), theirs.train_batch(batches(1)))
    assert all(map(torch.equal, weights(ours), weights(theirs)))


def test_deepspeed_sends_as_before_once_an_instruction_has_ended() -> None:
    before = p2p.send, p2p.recv
    engine = scheduled("interleaved", TWO, 2)
    engine.train_batch(batches(0))
    assert (p2p.send, p2p.recv) == before
    engine.module.loss_fn = None  # the backward pass has nothing to begin with
    with pytest.raises((AttributeError, TypeError, AssertionError, RuntimeError)):
        engine.train_batch(batches(0))
    assert (p2p.send, p2p.recv) == before


# -- the program as the engine takes it ----------------------------------------------------------------------


def test_instructions_have_the_names_that_logs_show() -> None:
    assert set(METHODS) == {*(action.value for action in Action), *UPDATE}


def executed(engine: StagedEngine) -> list[tuple[str, int | None]]:
    """Note the instructions that an engine executes from now on, each with its buffer."""
    noted: list[tuple[str, int | None]] = []
    engine.observe(Observer(begin=lambda name, place: noted.append((name, place.get("buffer_id")))))
    return noted


def test_a_program_is_executed_in_order_and_ends_with_the_update() -> None:
    engine = scheduled("1f1b", ONE, 3)
    noted = executed(engine)
    engine.train_batch(batches(0))
    of_micro_batches = ("LoadMicroBatch", "ForwardPass", "BackwardPass")
    assert noted == [
        *((name, 0) for _ in range(3) for name in of_micro_batches),  # each takes the place of the one before
        *((name, None) for name in UPDATE),
    ]
    assert UPDATE[0] == "AwaitSends"  # what was sent must have arrived before weights change


def test_an_unknown_instruction_is_an_error_at_once() -> None:
    stated = StageProgram([("Teleport", 0, 0)], buffers=1)
    own, module = DeferredGradients(), staged(ONE)
    schedule = Schedule(chunks=ONE, training=lambda _: stated, evaluation=lambda _: stated, deferred=own, defers=False)
    engine = built(module, schedule, config_of(1))
    with pytest.raises(KeyError, match="Teleport"):
        engine.train_batch(batches(0))


@pytest.mark.parametrize(("name", "chunks"), [("zero-bubble", ONE), ("interleaved", TWO)])
def test_an_evaluation_ends_when_its_sends_have_arrived(name: str, chunks: ModelChunks) -> None:
    engine = scheduled(name, chunks, 2)
    noted = executed(engine)
    engine.eval_batch(batches(0), num_micro_batches=2)
    names = [name for name, _ in noted]
    assert names.count("ForwardPass") == 2 * chunks.per_stage
    assert names[-1] == "AwaitSends" and names.count("AwaitSends") == 1


@pytest.mark.parametrize("others", [(), (torch.arange(4),)], ids=["one tensor", "and integers"])
def test_between_stages_tensor_parallel_ranks_receive_and_send_their_parts_as_in_deepspeed(
    others: tuple[Tensor, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, group = scheduled("1f1b", ModelChunks(1), 2), dist.group.WORLD
    for name in ("is_first_stage", "is_last_stage"):
        monkeypatch.setattr(engine, name, lambda: False)
    monkeypatch.setattr(engine.grid, "get_slice_parallel_group", lambda: group)
    engine.is_pipe_partitioned = engine._running_engine_backward = True
    engine.module.forward = lambda value: 2 * value if isinstance(value, Tensor) else (2 * value[0], *value[1:])
    hidden = next(batches(0))[0]
    part, found = PartitionedTensor(hidden, group), []
    for forward in (PipelineEngine._exec_forward_pass, ScheduledEngine._exec_forward_pass):
        engine.pipe_partition_input_meta_cache = None
        buffers = {"inputs": (part.to_meta(), part.data(), *others), "outputs": None, "output_tensors": None}
        engine.pipe_buffers = {name: [value] for name, value in buffers.items()}
        forward(engine, 0)
        received, sent, kept = (engine.pipe_buffers[name][0] for name in buffers)
        whole = received if isinstance(received, Tensor) else received[0]
        assert kept.numel() == 1 and len(sent) == 2 + len(others)
        kept.data = 2 * hidden  # as the backward pass restores it
        kept.backward(torch.ones_like(hidden))
        found.append([*sent, whole.detach(), whole.grad])
    for theirs, ours in zip(*found, strict=True):
        assert torch.equal(theirs, ours)
