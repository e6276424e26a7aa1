"""Gradients are averaged while the last backward pass of a step runs, by flat sums, and new weights travel while the
next forward pass runs; both come to the same numbers."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from harness import Trainer, TrainerCallback, TrainerState
from harness.deepspeed.flat_optimizer import FlatOptimizer
from harness.deepspeed.schedule import Observer
from harness.deepspeed.update import DividedOptimizer
from harness.training.callbacks import StepRecord
from harness.training.engine.engine import PipelineStages
from tests.support.ranks import run_ranks
from tests.support.training import STEPS, Curve, Job, arguments_of, rows, steps_of, without_shared_memory

pytestmark = pytest.mark.ranks

SMALL = {"zero_optimization": {"stage": 1, "reduce_bucket_size": 4096}}
WHOLE = {"zero_optimization": {"stage": 1, "reduce_bucket_size": 10**9, "overlap_comm": False}}
BF16: dict[str, Any] = {"bf16": {"enabled": True}}
PLAIN = {"pipeline": {"activation_checkpoint_interval": 0}}
TWO = [
    Job("tiny-llama", "dp2z1", SMALL),  # recomputed layers
    Job("tiny-gpt2", "dp2z1", SMALL | BF16),  # tied weights, which wait for the end
]
STORED = [Job("tiny-llama", "dp2z1", SMALL | PLAIN)]
INTERLEAVED = {"pipeline": {"stages": 2, "schedule": "interleaved", "chunks_per_stage": 2}}
FOUR = [
    Job("tiny-llama", "pp2dp2tp1z1", SMALL),
    Job("tiny-llama", "pp2dp2tp1z1", SMALL | INTERLEAVED),
    Job("tiny-llama", "pp2dp2tp1z1", SMALL | {"pipeline": {"stages": 2, "schedule": "zero-bubble"}}),
    Job("tiny-llama", "dp2tp2z1", SMALL),
]


class Records(TrainerCallback):
    """Keeps the records of steps, and how many groups of weights are on their way after each."""

    reads_weights = False

    def __init__(self) -> None:
        self.kept: list[StepRecord] = []
        self.travelling: list[int] = []

    def on_step_end(self, *_: Any, trainer: Trainer, record: StepRecord, **__: Any) -> None:
        self.kept.append(record)
        self.travelling.append(len(trainer.engine.deepspeed.optimizer._unsent))


def train(job: Job, folder: str) -> tuple[Curve, list[list[str]]]:
    """Losses and norms, and for each step the instructions in which the reduction of a parameter group began."""
    records = Records()
    trainer = Trainer(job.model, arguments_of(job, folder), train_dataset=rows(), callbacks=[records])
    engine = trainer.engine
    assert isinstance(engine, PipelineStages)
    now, began = [""], [[] for _ in range(STEPS)]  # type: tuple[list[str], list[list[str]]]
    engine.deepspeed.observe(Observer(begin=lambda name, _arguments: now.__setitem__(0, name)))
    optimizer = engine.deepspeed.optimizer
    assert isinstance(optimizer, FlatOptimizer)
    optimizer.start_mean = partial(_noted, optimizer.start_mean, now, began, trainer)  # type: ignore[method-assign]
    trainer.train()
    assert records.travelling[-1] == len(optimizer.bf16_groups) and not optimizer._arriving and not optimizer._unsent
    trainer.close()
    return [(record.loss, record.grad_norm or 0.0) for record in records.kept], began


def _noted(
    start: Callable[[int], Callable[[], None]], now: list[str], began: list[list[str]], trainer: Trainer, group: int
) -> Callable[[], None]:
    began[trainer.state.global_step].append(now[0])
    return start(group)


def both(jobs: list[Job], folder: str) -> list[tuple[Curve, list[list[str]], Curve]]:
    found = []
    for number, job in enumerate(jobs):
        early = train(job, f"{folder}/{number}")
        at_once = Job(job.model, job.layout, {**job.config, **WHOLE}, job.arguments)
        trainer = Trainer(job.model, arguments_of(at_once, f"{folder}/{number}-at-once"), train_dataset=rows())
        found.append((*early, steps_of(trainer)))
        trainer.close()
    return found


@pytest.mark.parametrize(
    "jobs",
    [TWO, *(pytest.param(jobs, marks=pytest.mark.thorough) for jobs in (STORED, FOUR))],
    ids=["two ranks", "stored activations", "four ranks"],
)
def test_groups_are_averaged_during_the_last_backward_pass(jobs: list[Job], tmp_path: Path) -> None:
    ranks = jobs[0].size("pp") * jobs[0].size("dp") * jobs[0].size("tp")
    for job, (curve, began, at_once) in zip(jobs, run_ranks(ranks, both, jobs, str(tmp_path))[0], strict=True):
        first, *later = began
        assert set(first) == {"ReduceGrads"}  # what is unused and what is partial is found in the first step
        early = [step.count("BackwardPass") for step in later]
        defers = job.config.get("pipeline", {}).get("schedule") == "zero-bubble"
        assert early == [0] * len(early) if defers else min(early) > 0, job
        assert all(step[-1] == "ReduceGrads" for step in later)  # the first layer has no input to wait for
        # Buckets of another size end the slices of ranks elsewhere, so sums of squares are grouped otherwise.
        near = partial(pytest.approx, rel=2e-3 if "bf16" in job.config else 1e-6)
        for found, wanted in zip(curve, at_once, strict=True):
            assert tuple(found) == near(tuple(wanted)), job


class Reads(TrainerCallback):
    """Notes a number of all weights after each step, by a reference that it has kept."""

    def __init__(self) -> None:
        self.seen: list[float] = []
        self.weights: list[nn.Parameter] = []

    def on_train_begin(self, *_: Any, model: nn.Module, **__: Any) -> None:
        self.weights = list(model.parameters())

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seen.append(sum(float(weight.detach().double().square().sum()) for weight in self.weights))


def runs(job: Job, folder: str) -> tuple[list[list[object]], Reads, list[int]]:
    """What is logged by a run, by one in which a callback of rank 0 reads weights, by one in which both ranks have such
    a callback, and by one that resumes the first; what the callback has seen, and how many groups of weights have
    travelled while others looked on."""
    logged, reads, records = [], Reads(), Records()
    alone = Reads() if dist.get_rank() == 0 else None
    named = (("plain", records, ""), ("alone", alone, ""), ("reads", reads, ""), ("resumed", None, "plain"))
    for name, callback, resumed in named:
        more = {"resume_from_checkpoint": f"{folder}/{resumed}/checkpoint-2"} if resumed else {}
        arguments = arguments_of(
            job,
            f"{folder}/{name}",
            max_steps=4,
            logging_steps=1,
            eval_steps=2,
            eval_strategy="steps",
            save_steps=2,
            **more,
        )
        given = [] if callback is None else [callback]
        trainer = Trainer(job.model, arguments, train_dataset=rows(), eval_dataset=rows()[:3], callbacks=given)
        trainer.train()
        names = ("loss", "grad_norm", "eval_loss")
        logged.append([row[key] for row in trainer.state.log_history for key in names if key in row])
        trainer.close()
    assert alone is None or alone.seen == reads.seen
    return logged, reads, records.travelling


def runs_of_all(jobs: list[Job], folder: str) -> list[tuple[list[list[object]], list[float], list[int]]]:
    found = []
    with without_shared_memory():  # which gathers at once
        for number, job in enumerate(jobs):
            logged, reads, travelling = runs(job, f"{folder}/{number}")
            found.append((logged, reads.seen, travelling))
    return found


@pytest.mark.thorough
def test_weights_on_their_way_change_nothing_and_whoever_reads_them_gets_the_new_ones(tmp_path: Path) -> None:
    first, second = run_ranks(2, runs_of_all, [*STORED, TWO[1]], str(tmp_path))
    for (logged, seen, travelling), (_, of_other, _) in zip(first, second, strict=True):
        plain, read_by_one, read, resumed = logged
        assert len(plain) == 2 * 4 + 2 and plain == read == read_by_one
        assert plain[-len(resumed) :] == resumed and len(resumed) == 2 * 2 + 1
        assert seen == of_other and len(set(seen)) == 4
        assert min(travelling[1::2]) > 1  # after the steps that are evaluated and saved


class Fails(TrainerCallback):
    """Raises after the second step."""

    reads_weights = False

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        if state.global_step == 2:
            raise ArithmeticError("the second step")


def closed_after_an_error(folder: str) -> int:
    """Close a failed Trainer, rank 1 only after rank 0 has; return how many groups of weights were not sent."""
    with without_shared_memory():
        job = STORED[0]
        trainer = Trainer(job.model, arguments_of(job, folder), train_dataset=rows() * 3, callbacks=[Fails()])
        with pytest.raises(ArithmeticError):
            trainer.train()
        unsent, closed = len(trainer.engine.deepspeed.optimizer._unsent), Path(folder, "closed")
        if dist.get_rank() == 1:
            while not closed.exists():
                time.sleep(0.1)
        trainer.close()
        closed.touch()
    return unsent


def test_a_rank_closes_a_failed_run_without_the_others(tmp_path: Path) -> None:
    assert min(run_ranks(2, closed_after_an_error, str(tmp_path))) > 1


ONCE = {"gradient_reduction": {"once_per_step": True}}
FULL = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4}
ZERO_2 = [Job("tiny-gpt2", "dp2z2", FULL | BF16 | {"zero_optimization": {"stage": 2, "overlap_comm": True}})]
BEHIND = [Job("tiny-llama", "dp2z2", FULL), Job("tiny-gpt2", "dp2z2", FULL | BF16)]
"""Buckets are reduced behind the backward pass."""


def zero2(job: Job, folder: str) -> tuple[Curve, int]:
    """Losses and norms, and how many buckets a rank has reduced."""
    trainer = Trainer(job.model, arguments_of(job, folder), train_dataset=rows())
    optimizer = trainer.engine.deepspeed.optimizer
    assert isinstance(optimizer, DividedOptimizer)
    reduced: list[int] = []
    average = optimizer.average_tensor
    optimizer.average_tensor = lambda *given: (reduced.append(1), average(*given))[1]
    records = [trainer.training_step() for _ in range(STEPS)]
    trainer.close()
    return [(record.loss, record.grad_norm) for record in records], len(reduced)


def both_zero2(jobs: list[Job], folder: str) -> list[tuple[tuple[Curve, int], tuple[Curve, int]]]:
    once = [Job(job.model, job.layout, job.config | ONCE, job.arguments) for job in jobs]
    pairs = zip(jobs, once, strict=True)
    return [(zero2(a, f"{folder}/{i}"), zero2(b, f"{folder}/{i}-once")) for i, (a, b) in enumerate(pairs)]


@pytest.mark.thorough
@pytest.mark.parametrize("jobs", [ZERO_2, BEHIND], ids=["first", "others"])
def test_zero2_reduces_once_a_step_if_it_may_keep_all_gradients(jobs: list[Job], tmp_path: Path) -> None:
    found = run_ranks(2, both_zero2, jobs, str(tmp_path))[0]
    for job, ((curve, each), (of_sums, once)) in zip(jobs, found, strict=True):
        assert each == 4 * once, job  # four micro-batches
        # gradients are sent in bf16 from each micro-batch, and their sums in float32
        tolerance = 2e-2 if "bf16" in job.config else 1e-6
        assert of_sums == [pytest.approx(pair, rel=tolerance) for pair in curve], job
