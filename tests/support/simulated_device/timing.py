"""The time of a training's steps by the clock of the simulated device; runs on its ranks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness import Trainer, TrainerCallback
from harness.deepspeed.schedule import Observer, Operands
from harness.parallel.pipeline.instructions import Action
from harness.planner.hardware import Hardware, Link, load_hardware
from tests.support.simulated_device.clock import Clock, Span, running
from tests.support.training import Job, arguments_of, rows

WARM = 2  # steps before those that are timed: the first one makes the optimizer's states, and waits for all weights
MESSAGES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "send", "receive")
PASSES = (Action.FORWARD, Action.BACKWARD, Action.INPUT_GRADIENTS, Action.WEIGHT_GRADIENTS)


def slow_device() -> Hardware:
    """Return a device that tiny models keep as busy as large ones a GPU: a link has 1/25 of the memory's rate."""
    link = Link(bytes_per_second=4e6, hop_seconds=1e-6)
    rates = dict.fromkeys(("fp32", "bf16", "fp16"), 1e10)
    return replace(
        load_hardware("h100"),
        memory_bytes_per_second=1e8,
        flops=rates,
        matmul_efficiency=dict.fromkeys(rates, 1.0),
        compute_units=2,
        kernel_seconds=1e-7,
        dispatch_seconds=1e-7,
        node=link,
        network=link,
    )


@dataclass(frozen=True)
class Passed:
    """A forward or backward pass of a pipeline stage; milliseconds."""

    action: Action
    micro_batch: int
    chunk: int
    begin: float
    end: float


@dataclass
class Step:
    """A step of one rank, in milliseconds of the device's clock.

    Attributes:
        begin: when all before it has ended.
        passes: those of a pipeline stage.
        spans: kernels and collectives; their times are nanoseconds.
    """

    begin: float
    end: float = 0.0
    passes: list[Passed] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)

    @property
    def length(self) -> float:
        """Milliseconds from beginning to end."""
        return self.end - self.begin

    def messages(self, kind: str) -> list[float]:
        """Return the milliseconds of its collectives, or transfers, of one kind, in the order of their end."""
        return [(span.end - span.start) / 1e6 for span in self.spans if span.name.startswith(f"{kind} ")]

    @property
    def until_norm(self) -> float:
        """Milliseconds until the data-parallel ranks sum the gradient norm, a number in float64."""
        sums = (span.start for span in self.spans if span.name.startswith("all_reduce ") and "float64 [1]" in span.name)
        return next(sums) / 1e6 - self.begin

    @property
    def kernels_of_passes(self) -> list[Span]:
        """The kernels of a pipeline stage until its last pass has ended."""
        first, last = self.passes[0].begin * 1e6, max(each.end for each in self.passes) * 1e6
        return [
            span for span in self.spans if first <= span.start < last and span.name.partition(" ")[0] not in MESSAGES
        ]


@dataclass(frozen=True)
class Timed:
    """A step with the links of the device, and one with infinitely fast links."""

    linked: Step
    unlinked: Step

    @property
    def exposed(self) -> float:
        """Milliseconds of communication behind which nothing is computed."""
        return self.linked.length - self.unlinked.length


class _Watch(TrainerCallback):
    """Notes each step; the last two have infinitely fast links: into the first of them the weights still travel."""

    reads_weights = False

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.steps: list[Step] = []

    def now(self) -> float:
        return self.clock.now() / 1e6

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.clock.spans.clear()
        self.clock.has_links = len(self.steps) <= WARM
        self.steps.append(Step(self.now()))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps[-1].end, self.steps[-1].spans = self.now(), self.clock.spans.copy()

    def begin(self, name: str, _place: Operands) -> None:
        self.begun = self.now()

    def end(self, name: str, place: Operands) -> None:
        if name in PASSES:
            passed = Passed(Action(name), place["micro_batch"], place["chunk"], self.begun, self.now())
            self.steps[-1].passes.append(passed)


def timed(job: Job, folder: str, times: int = 1) -> Timed:
    """Train a job with samples that are `times` as long, and return steady steps of this rank."""
    output = f"{folder}/{Path(job.model).name}{job.layout}{len(list(Path(folder).iterdir()))}"
    arguments = arguments_of(job, output, logging_steps=1, max_steps=WARM + 3)
    with running(slow_device()) as clock:
        watch = _Watch(clock)
        samples = [{"input_ids": row["input_ids"] * times} for row in rows()] * arguments.max_steps
        trainer = Trainer(job.model, arguments, train_dataset=samples, callbacks=[watch])
        if trainer.run.spec.is_pipeline:
            trainer.engine.deepspeed.observe(Observer(begin=watch.begin, end=watch.end))
        trainer.train()
        trainer.close()
    return Timed(watch.steps[WARM], watch.steps[-1])


def timed_all(jobs: list[tuple[Job, int]], folder: str) -> list[Timed]:
    """As `timed`, for several jobs one after the other."""
    return [timed(job, folder, times) for job, times in jobs]
