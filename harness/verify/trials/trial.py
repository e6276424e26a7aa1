"""Try compositions: run each on ranks, train it again in one process, and compare the results."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import transformers

from harness.config.values.json_object import JsonObject
from harness.errors import text_of
from harness.verify.trials.compare import (
    MOST,
    MOST_IN_16_BITS,
    USUAL,
    Distance,
    compressed_limit,
    distance,
    is_another_course,
    limit_in_16_bits,
    noise_limit,
    numbers_of,
    other_than_numbers,
)
from harness.verify.trials.composition import Composition
from harness.verify.trials.execute import run_lines, run_lines_unverified
from harness.verify.trials.launch import Worker, run_on_ranks
from harness.verify.trials.reference import TrainingResult, reference
from harness.verify.trials.subject import Subject, make_subject

RIGHT, REFUSED, WRONG, FAILED, UNTRIED = "right", "refused", "wrong", "failed", "untried"
LIMIT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """The result of trying a composition.

    Attributes:
        kind: right; refused before the start; wrong in its numbers; failed with an error or by its time limit; untried
            if plain transformers cannot train it.
        reason: why it is not right.
        off: differences from one process, if it has trained; limit: how large they may be.
        own: in 16 bits, the differences between one process and float32.
    """

    composition: Composition
    kind: str
    reason: str = ""
    off: Distance | None = None
    limit: Distance | None = None
    own: Distance | None = None

    @property
    def is_bad(self) -> bool:
        """Whether the composition is neither right nor refused."""
        return self.kind in (WRONG, FAILED)

    def __str__(self) -> str:
        return f"{self.kind}: {self.composition}" + (f": {self.reason}" if self.reason else "")


Report = Callable[[TrialResult], None]


def try_all(
    compositions: Sequence[Composition],
    report: Report = lambda _: None,
    *,
    limit_s: float = LIMIT_S,
    judge: Judge | None = None,
    root: Path | None = None,
    verify_plan: bool = True,
) -> list[TrialResult]:
    """Return a verdict on each composition, in their order; each is reported as soon as it is known.

    Args:
        judge: a judge that has already trained some compositions in one process.
        root: root of another copy of the harness, which is tried instead of this one.
        verify_plan: whether a run may be refused because its tiny copy, cut, differs from the whole one.
    """
    worker = run_lines if verify_plan else run_lines_unverified
    found: dict[int, TrialResult] = {}

    def conclude(index: int, verdict: TrialResult) -> None:
        found[index] = verdict
        report(verdict)

    with _as_a_rank(), tempfile.TemporaryDirectory(prefix="parity_") as folder:
        judge = judge or Judge()
        ranks = sorted({each.ranks for each in compositions})
        for size in ranks:
            some = [(index, each) for index, each in enumerate(compositions) if each.ranks == size]
            _try_some(some, size, Path(folder) / f"on_{size}", judge, conclude, limit_s, root, worker)
    return [found[index] for index in range(len(compositions))]


def _try_some(
    some: Sequence[tuple[int, Composition]],
    ranks: int,
    folder: Path,
    judge: Judge,
    conclude: Callable[[int, TrialResult], None],
    limit_s: float,
    root: Path | None,
    worker: Worker,
) -> None:
    """Try compositions that need the same number of ranks."""
    able: list[tuple[int, Composition]] = []
    for index, each in some:
        try:  # no ranks are started for a model that cannot be made
            make_subject(each, folder / "models")
            able.append((index, each))
        except Exception as error:  # a family's config or model may raise anything for sizes that do not fit it
            reason = f"no such model: {type(error).__name__}: {text_of(error, 160)}"
            conclude(index, TrialResult(composition=each, kind=UNTRIED, reason=reason))

    def judged(number: int, outcome: JsonObject) -> None:
        index, composition = able[number]
        subject = make_subject(composition, folder / "models")
        conclude(index, judge.verdict(composition, subject, outcome, folder / str(number)))

    lines = [str(each) for _, each in able]
    run_on_ranks(lines, ranks, folder, worker=worker, limit_s=limit_s, report=judged, root=root)


@contextmanager
def _as_a_rank() -> Iterator[None]:
    """Compute in one thread, as a rank does (with several, sums have another order), and without messages."""
    threads = torch.get_num_threads()
    verbosity = transformers.logging.get_verbosity()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads(threads)
        transformers.logging.set_verbosity(verbosity)
        transformers.logging.enable_progress_bar()


class Judge:
    """Compares executions with the training in one process, which is made once for all executions of it.

    Args:
        strict: in 16 bits, keep the usual limit instead of measuring the effect of rounding; for compositions that are
            known to keep it.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict
        self._known: dict[str, TrainingResult] = {}

    def verdict(self, composition: Composition, subject: Subject, outcome: JsonObject, place: Path) -> TrialResult:
        """Return the verdict on the outcome of a composition, whose files are in `place`."""
        if "refused" in outcome:
            return TrialResult(composition=composition, kind=REFUSED, reason=outcome["refused"])
        try:
            wanted = self.reference(composition, subject)
        except Exception as error:  # a family may raise anything in plain transformers
            reason = f"plain transformers: {type(error).__name__}: {text_of(error, 160)}"
            return TrialResult(composition=composition, kind=UNTRIED, reason=reason)
        if "error" in outcome:
            return TrialResult(composition=composition, kind=FAILED, reason=outcome["error"])
        found = numbers_of(outcome, place, wanted.before)
        precision = composition.training.precision
        compresses = any(each.bits for each in composition.executions)
        if (fault := other_than_numbers(found, wanted, texts=precision == "fp32" and not compresses)) is not None:
            return TrialResult(composition=composition, kind=WRONG, reason=fault)
        off = distance(found, wanted)
        limit = USUAL
        own = None
        if precision != "fp32":
            own = distance(wanted, self.reference(composition, subject, precision="fp32"))
            limit = limit_in_16_bits(composition, own)
        limit = compressed_limit(composition, limit)
        right = off.within(limit)
        if not compresses and not right and not (self._strict and precision != "fp32"):
            most = MOST if precision == "fp32" else MOST_IN_16_BITS

            def again(seed: int) -> TrainingResult:
                return reference(composition, subject, rounding=seed)

            limit = noise_limit(wanted, again, limit, most)
            right = off.within(limit) or is_another_course(found, again, limit)
        reason = "" if right else f"{off} (limits: {limit})"
        kind = RIGHT if right else WRONG
        return TrialResult(composition=composition, kind=kind, reason=reason, off=off, limit=limit, own=own)

    def reference(self, composition: Composition, subject: Subject, precision: str | None = None) -> TrainingResult:
        """Return the results of one process, in the composition's precision or another one."""
        training = replace(composition.training, precision=precision or composition.training.precision)
        key = f"{composition.model} {training}"
        if key not in self._known:
            self._known[key] = reference(composition, subject, precision=precision)
        return self._known[key]
