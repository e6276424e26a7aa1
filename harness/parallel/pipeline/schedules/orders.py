"""The order in which each pipeline stage computes, by schedule.

Each order is a pure function of the model chunks, the number of micro-batches and the stage. With one chunk a stage:

- GPipe (Huang et al. 2019, arXiv 1811.06965) runs all forward passes, then all backward passes.
- 1F1B (Narayanan et al. 2019, PipeDream, SOSP) runs a few forward passes ahead, then one forward and one backward pass
  in turns.
- ZB-H1 (Qi et al. 2024, Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 3.1) splits the backward pass.
  Input gradients are computed at once, because the previous stage waits for them. Weight gradients are needed only by
  the update, and are deferred until the stage would be idle. Stage s defers at most s of them, so no stage holds more
  activations than the first one under 1F1B.

With several chunks a stage:

- Interleaved 1F1B (Narayanan et al. 2021, arXiv 2104.04473, section 2.2). A micro-batch passes through all stages once
  for each chunk of a stage. A chunk is a fraction of a stage, so the waits at both ends of a step are shorter by that
  factor. Micro-batches go through a chunk in groups of at least as many as there are stages, if a step has that many.
  Megatron requires the number of stages to divide that of micro-batches; here the sizes of groups may differ by one.
- ZB-V (arXiv 2401.10241, section 6; Controllable Memory, arXiv 2405.15362) folds the model: the first stage has the
  first and the last chunk. It computes the loss, so its backward passes begin at once. Weight gradients fill the waits.
  Every stage holds as many activations as the first one under 1F1B.
- DualPipeV (DeepSeek-AI 2025, DualPipe, halved by Sea AI Lab) folds likewise. It overlaps a forward pass of one chunk
  with a backward pass of the other; here one follows the other. It defers weight gradients only at the beginning and at
  the end.

The two folded orders are made for about twice as many micro-batches as stages, or more. With fewer, a stage follows the
order for that many and skips the passes of micro-batches that do not exist.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

from harness.config.values import layout_keys
from harness.config.values.model_chunks import ModelChunks


class Kind(Enum):
    """What a stage computes for a micro-batch."""

    FORWARD = "F"
    BACKWARD = "B+W"  # the gradients of inputs and weights together
    INPUT_GRADIENTS = "B"
    WEIGHT_GRADIENTS = "W"


@dataclass(frozen=True)
class Pass:
    """One micro-batch's computation of one kind, by one model chunk."""

    kind: Kind
    micro_batch: int
    chunk: int


Order = Callable[[ModelChunks, int, int], Iterator[Pass]]
"""Called with the model chunks, the number of micro-batches and the stage; yields the passes of that stage."""


def gpipe(_chunks: ModelChunks, micro_batches: int, stage: int) -> Iterator[Pass]:
    """Yield the passes of a stage under GPipe."""
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        for index in range(micro_batches):
            yield Pass(kind, index, stage)


def one_forward_one_backward(chunks: ModelChunks, micro_batches: int, stage: int) -> Iterator[Pass]:
    """Yield the passes of a stage under 1F1B."""
    ahead = min(chunks.num_stages - stage, micro_batches)
    for index in range(ahead):
        yield Pass(Kind.FORWARD, index, stage)
    for index in range(micro_batches):
        yield Pass(Kind.BACKWARD, index, stage)
        if ahead + index < micro_batches:
            yield Pass(Kind.FORWARD, ahead + index, stage)


def zero_bubble_h1(chunks: ModelChunks, micro_batches: int, stage: int) -> Iterator[Pass]:
    """Yield the passes of a stage under ZB-H1; it defers at most `stage` weight gradients."""
    ahead = min(chunks.num_stages - stage, micro_batches)
    for index in range(ahead):
        yield Pass(Kind.FORWARD, index, stage)
    for index in range(micro_batches):
        yield Pass(Kind.INPUT_GRADIENTS, index, stage)
        if index >= stage:
            yield Pass(Kind.WEIGHT_GRADIENTS, index - stage, stage)
        if ahead + index < micro_batches:
            yield Pass(Kind.FORWARD, ahead + index, stage)
    for index in range(max(0, micro_batches - stage), micro_batches):
        yield Pass(Kind.WEIGHT_GRADIENTS, index, stage)


def interleaved(chunks: ModelChunks, micro_batches: int, stage: int) -> Iterator[Pass]:
    """Yield the passes of a stage under interleaved 1F1B."""
    forwards = list(_grouped(Kind.FORWARD, chunks.of_stage(stage), _groups(chunks.num_stages, micro_batches)))
    backwards = _grouped(Kind.BACKWARD, chunks.of_stage(stage)[::-1], _groups(chunks.num_stages, micro_batches))
    yield from _in_turns(forwards, list(backwards), _ahead(chunks, micro_batches, stage))


def _groups(num_stages: int, micro_batches: int) -> list[range]:
    """Return the groups in which micro-batches go through a chunk, larger ones first."""
    count = max(1, micro_batches // num_stages)
    size, larger = divmod(micro_batches, count)
    starts = [index * size + min(index, larger) for index in range(count + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


def _grouped(kind: Kind, chunks: list[int], groups: list[range]) -> Iterator[Pass]:
    for group in groups:
        for chunk in chunks:
            for index in group:
                yield Pass(kind, index, chunk)


def _ahead(chunks: ModelChunks, micro_batches: int, stage: int) -> int:
    """Return the number of forward passes before the first backward pass.

    Each later stage has 2 fewer: one hop less for activations to the end, one less for gradients back. All chunks but
    the last run their first group before the first backward pass.
    """
    largest = len(_groups(chunks.num_stages, micro_batches)[0])
    return 2 * (chunks.num_stages - 1 - stage) + (chunks.per_stage - 1) * largest + 1


def _in_turns(forwards: list[Pass], backwards: list[Pass], ahead: int) -> Iterator[Pass]:
    yield from forwards[:ahead]
    for index, backward in enumerate(backwards):
        yield backward
        yield from forwards[ahead + index : ahead + index + 1]


def zero_bubble_v(chunks: ModelChunks, micro_batches: int, stage: int) -> Iterator[Pass]:
    """Yield the passes of a stage under ZB-V."""
    num_stages, count = chunks.num_stages, max(2 * chunks.num_stages - 1, micro_batches)
    made = _Passes(chunks.of_stage(stage))
    # Warm-up. After this many passes the first micro-batch is back at this stage, for its second chunk.
    made.add("0F", 2 * (num_stages - stage) - 1)
    made.add("1F 0F", stage)
    made.add("1F 1B W", num_stages - stage)
    # Steady phase: each forward pass is followed by a backward pass, until the first chunk has all its micro-batches.
    steady = count - made.forwards(0)
    made.add("0F 0B W 1F 1B W", steady)
    # End: the forward passes that the second chunk lacks, then backward passes only.
    made.add("0B W 1F 1B W", made.forwards(0) - made.forwards(1))
    made.add("0B 1B", stage)
    made.add("0B W", num_stages - stage)
    made.add("W", made.deferred)
    return made.of(micro_batches)


def dualpipe_v(chunks: ModelChunks, micro_batches: int, stage: int) -> Iterator[Pass]:
    """Yield the passes of a stage under DualPipeV."""
    num_stages, count = chunks.num_stages, max(2 * chunks.num_stages, micro_batches)
    after = num_stages - stage - 1
    made = _Passes(chunks.of_stage(stage))
    # warm-up: forward passes, then the first backward passes of the second chunk
    made.add("0F", 2 * after)
    made.add("0F 1F", stage + 1)
    made.add("1B W 1F", after)
    # steady phase: both chunks run a forward and a backward pass in turns
    made.add("0F 1BW 1F 0BW", count - 2 * num_stages + stage + 1)
    # end: the forward passes that the second chunk lacks, then backward passes only
    made.add("1BW 1F 0BW", after)
    # Of 2 * (stage + 1) backward passes the second half defers weight gradients, so that the stage before gets its
    # input gradients sooner. With an odd number of pairs, the middle is inside a pair.
    half, odd = divmod(stage + 1, 2)
    made.add("1BW 0BW", half)
    made.add("1BW 0B" if odd else "1B 0B", 1)
    made.add("1B 0B", stage - half)
    made.add("W 0B", after)
    made.add("W", made.deferred)
    return made.of(micro_batches)


KINDS = {"F": Kind.FORWARD, "B": Kind.INPUT_GRADIENTS, "BW": Kind.BACKWARD}


class _Passes:
    """Collects the passes of a stage from a short notation.

    `0F` is a forward pass of the stage's first chunk, `1B` the input gradients of its second chunk, `0BW` a whole
    backward pass, `W` the weight gradients that have been deferred longest.
    """

    def __init__(self, chunks: list[int]) -> None:
        self._chunks = chunks
        self._passes: list[Pass] = []
        self._forwards = [0, 0]
        self._backwards = [0, 0]
        self._deferred: deque[Pass] = deque()

    @property
    def deferred(self) -> int:
        """Number of weight gradients that are deferred now."""
        return len(self._deferred)

    def forwards(self, half: int) -> int:
        """Return the number of forward passes so far of the stage's first (0) or second (1) chunk."""
        return self._forwards[half]

    def add(self, passes: str, times: int) -> None:
        """Append a sequence of passes `times` times; micro-batches are numbered in order."""
        for name in passes.split() * times:
            if name == "W":
                self._passes.append(self._deferred.popleft())
                continue
            half, kind = int(name[0]), KINDS[name[1:]]
            counts = self._forwards if kind is Kind.FORWARD else self._backwards
            self._passes.append(Pass(kind, counts[half], self._chunks[half]))
            if kind is Kind.INPUT_GRADIENTS:
                self._deferred.append(Pass(Kind.WEIGHT_GRADIENTS, counts[half], self._chunks[half]))
            counts[half] += 1

    def of(self, micro_batches: int) -> Iterator[Pass]:
        """Return the passes of the first micro-batches."""
        return (each for each in self._passes if each.micro_batch < micro_batches)


ORDERS: Mapping[str, Order] = {
    layout_keys.DEEPSPEED_1F1B: one_forward_one_backward,
    layout_keys.GPIPE: gpipe,
    layout_keys.ZERO_BUBBLE: zero_bubble_h1,
    layout_keys.INTERLEAVED: interleaved,
    layout_keys.ZERO_BUBBLE_V: zero_bubble_v,
    layout_keys.DUALPIPE_V: dualpipe_v,
}
