"""The order in which each stage computes, where a stage has two model chunks, and the second half runs back.

The first stage has the first and the last chunk: it computes the loss, and its backward passes begin at once. ZB-V (Qi
et al. 2024, arXiv 2401.10241, section 6; Controllable Memory, arXiv 2405.15362) fills the waits with weight gradients
and holds as many activations on every stage as 1F1B on the first one. DualPipeV (DeepSeek-AI 2025, DualPipe, halved by
Sea AI Lab) computes a forward and a backward pass of the two chunks together; here they follow each other. It puts off
weight gradients at the beginning and at the end alone.

Both are made for at least about twice as many micro-batches as stages. Of fewer, a stage leaves out the passes of those
that are not there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from harness.config.values.model_chunks import ModelChunks
from harness.parallel.pipeline.schedules.passes import Kind, Pass


def zero_bubble_v(chunks: ModelChunks, micro_batches: int, stage: int) -> Iterator[Pass]:
    """Yield the passes of a stage under ZB-V."""
    stages, count = chunks.stages, max(2 * chunks.stages - 1, micro_batches)
    made = _Passes(chunks.of_stage(stage))
    made.add("0F", 2 * (stages - stage) - 1)
    made.add("1F 0F", stage)
    made.add("1F 1B W", stages - stage)
    steady = count - made.forwards(0)
    made.add("0F 0B W 1F 1B W", steady)
    made.add("0B W 1F 1B W", made.forwards(0) - made.forwards(1))
    made.add("0B 1B", stage)
    made.add("0B W", stages - stage)
    made.add("W", made.put_off)
    return made.of(micro_batches)


def dualpipe_v(chunks: ModelChunks, micro_batches: int, stage: int) -> Iterator[Pass]:
    """Yield the passes of a stage under DualPipeV."""
    stages, count = chunks.stages, max(2 * chunks.stages, micro_batches)
    after = stages - stage - 1
    made = _Passes(chunks.of_stage(stage))
    made.add("0F", 2 * after)
    made.add("0F 1F", stage + 1)
    made.add("1B W 1F", after)
    made.add("0F 1BW 1F 0BW", count - 2 * stages + stage + 1)
    made.add("1BW 1F 0BW", after)
    # the second half of these puts off: who waits for a stage soon waits for its input gradients alone
    half, odd = divmod(stage + 1, 2)
    made.add("1BW 0BW", half)
    made.add("1BW 0B" if odd else "1B 0B", 1)
    made.add("1B 0B", stage - half)
    made.add("W 0B", after)
    made.add("W", made.put_off)
    return made.of(micro_batches)


KINDS = {"F": Kind.FORWARD, "B": Kind.INPUT_GRADIENTS, "BW": Kind.BACKWARD}


class _Passes:
    """The passes of a stage, written down as `0F` (forward, the stage's first chunk), `1B` (input gradients of the
    second), `0BW` (the whole backward pass) and `W` (the weight gradients that were put off the longest ago)."""

    def __init__(self, chunks: list[int]) -> None:
        self._parts = chunks
        self._passes: list[Pass] = []
        self._forwards, self._backwards = [0, 0], [0, 0]
        self._put_off: deque[Pass] = deque()

    @property
    def put_off(self) -> int:
        """How many weight gradients are put off."""
        return len(self._put_off)

    def forwards(self, half: int) -> int:
        """Return how many forward passes the first (0) or the second chunk has."""
        return self._forwards[half]

    def add(self, passes: str, times: int) -> None:
        """Add passes, which follow each other, so many times."""
        for name in passes.split() * times:
            if name == "W":
                self._passes.append(self._put_off.popleft())
                continue
            half, kind = int(name[0]), KINDS[name[1:]]
            counts = self._forwards if kind is Kind.FORWARD else self._backwards
            self._passes.append(Pass(kind, counts[half], self._parts[half]))
            if kind is Kind.INPUT_GRADIENTS:
                self._put_off.append(Pass(Kind.WEIGHT_GRADIENTS, counts[half], self._parts[half]))
            counts[half] += 1

    def of(self, micro_batches: int) -> Iterator[Pass]:
        """Return the passes of the first micro-batches."""
        return (each for each in self._passes if each.micro_batch < micro_batches)
