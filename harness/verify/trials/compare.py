"""Compare the results of an execution with those of the training in one process: what may differ, and by how much.

In float32 an execution adds the same numbers in another order. If its results differ by more than usual, the effect of
rounding on this training is measured: one process trains again, from weights that are changed by rounding errors. In
bf16 and fp16 the limit is the effect of the precision: the distance between one process in that precision and in
float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from math import inf, isfinite
from pathlib import Path

from torch import Tensor

from harness.config.values.json_object import JsonObject
from harness.verify.trials.composition import Composition
from harness.verify.trials.execute import EXPORTED
from harness.verify.trials.reference import TrainingResult, read_weights

NOISE = 30  # times the effect of rounding errors in the weights
NOISE_IN_16_BITS = 3  # the same in 16 bits, where the errors are larger: a router may choose another expert
SEEDS = (1, 2, 3)
MORE_SEEDS = range(4, 10)


@dataclass(frozen=True, kw_only=True)
class Distance:
    """Relative differences between two trainings.

    Attributes:
        loss, norm: the largest difference of a step's loss, and of its gradient norm.
        first_norm: the difference of the first step's norm, before an optimizer has divided rounding by rounding.
        evaluation: the largest difference of an evaluation's loss.
        weights: the distance between all weights, divided by the distance that training has moved them.
        tensor: the same for the tensor that differs most.
    """

    loss: float
    first_norm: float
    norm: float
    evaluation: float
    weights: float
    tensor: float

    def within(self, limit: Distance) -> bool:
        """Return whether no number is NaN or larger than that of `limit`."""
        return all(value <= getattr(limit, name) for name, value in asdict(self).items())

    def __str__(self) -> str:
        return ", ".join(f"{name.replace('_', ' ')} {value:.1e}" for name, value in asdict(self).items() if value)


USUAL = Distance(loss=1e-6, first_norm=1e-5, norm=1e-5, evaluation=1e-6, weights=1e-4, tensor=1e-3)
"""Limits in float32, where only the order of sums differs."""
MOST = Distance(loss=1e-4, first_norm=1e-3, norm=1e-2, evaluation=1e-4, weights=5e-2, tensor=0.5)
MOST_IN_16_BITS = Distance(loss=1e-2, first_norm=2e-2, norm=0.1, evaluation=1e-2, weights=1.0, tensor=4.0)
"""Upper bounds of all limits, however large the effect of rounding: in float32, and in 16 bits."""


def numbers_of(outcome: JsonObject, place: Path, before: Mapping[str, Tensor]) -> TrainingResult:
    """Return the results of an execution, which began with the weights `before`: name -> tensor (any shape)."""
    return TrainingResult(
        losses=[row["loss"] for row in outcome["steps"]],
        norms=[row["grad_norm"] if row["grad_norm"] is not None else inf for row in outcome["steps"]],
        evaluations={row["step"]: row["eval_loss"] for row in outcome["evaluations"]},
        texts=outcome["texts"],
        weights=read_weights(place / EXPORTED),
        before=before,
    )


def other_than_numbers(found: TrainingResult, wanted: TrainingResult, *, texts: bool) -> str | None:
    """Return the first difference in steps, names, shapes, dtypes or texts; None if only numbers differ."""
    if len(found.losses) != len(wanted.losses):
        return f"{len(found.losses)} steps instead of {len(wanted.losses)}"
    if found.evaluations.keys() != wanted.evaluations.keys():
        return f"evaluations after steps {sorted(found.evaluations)} instead of {sorted(wanted.evaluations)}"
    if (difference := other_than_values(found.weights, wanted.weights)) is not None:
        return difference
    if texts and found.texts != wanted.texts:
        return f"prompts are continued by {found.texts} instead of {wanted.texts}"
    return None


def other_than_values(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> str | None:
    """Return the first difference in names, shapes or dtypes of exported tensors; None if only values differ."""
    if missing := sorted(wanted.keys() - found.keys()):
        return f"the export lacks {missing[0]} ({len(missing)} in all)"
    if extra := sorted(found.keys() - wanted.keys()):
        return f"the export has {extra[0]}, which it should not ({len(extra)} in all)"
    for name, tensor in wanted.items():
        own = found[name]
        if (own.dtype, own.shape) != (tensor.dtype, tensor.shape):
            return f"{name} is {own.dtype} {tuple(own.shape)} instead of {tensor.dtype} {tuple(tensor.shape)}"
    return None


def distance(found: TrainingResult, wanted: TrainingResult) -> Distance:
    """Return how far `found` is from `wanted`; both have the same steps, names and shapes."""
    norms = [_relative(a, b) for a, b in zip(found.norms, wanted.norms, strict=True)]
    moved: dict[str, tuple[float, float]] = {}
    for name, tensor in wanted.weights.items():
        if tensor.is_floating_point():
            start = wanted.before[name].float()
            off = (found.weights[name].float() - tensor.float()).norm().item()
            moved[name] = off, (tensor.float() - start).norm().item()
    whole = sum(b * b for _, b in moved.values()) ** 0.5
    return Distance(
        loss=max(_relative(a, b) for a, b in zip(found.losses, wanted.losses, strict=True)),
        first_norm=norms[0],
        norm=max(norms),
        evaluation=max(
            (_relative(found.evaluations[at], wanted.evaluations[at]) for at in wanted.evaluations), default=0
        ),
        weights=_quotient(sum(a * a for a, _ in moved.values()) ** 0.5, whole),
        # a tensor that hardly moves shows nothing but rounding
        tensor=max((_quotient(a, max(b, whole * 1e-3)) for a, b in moved.values()), default=0.0),
    )


def _relative(a: float, b: float) -> float:
    return abs(a - b) / max(abs(b), 1e-30) if isfinite(a) else inf


def _quotient(a: float, b: float) -> float:
    if b:
        return a / b
    return inf if a else 0.0


def is_another_course(found: TrainingResult, again: Callable[[int], TrainingResult], limit: Distance) -> bool:
    """Return whether `found` is within `limit` of one process that starts from weights changed by rounding errors.

    If a router's choice or a ReLU depends on the last bit, rounding leads a training to one of a few trajectories,
    which are far from each other. The seeds of `noise_limit` may have missed this one, so more seeds are tried.
    """
    return any(distance(found, again(seed)).within(limit) for seed in MORE_SEEDS)


def noise_limit(
    wanted: TrainingResult, again: Callable[[int], TrainingResult], least: Distance = USUAL, most: Distance = MOST
) -> Distance:
    """Return the limit that rounding errors set; `again(seed)` trains in one process from weights changed by them."""
    apart = [asdict(distance(again(seed), wanted)) for seed in SEEDS]
    times = NOISE if least == USUAL else NOISE_IN_16_BITS
    limits = {
        name: max(value, min(times * max(each[name] for each in apart), getattr(most, name)))
        for name, value in asdict(least).items()
    }
    return Distance(**limits)


LEAST = Distance(loss=1e-4, first_norm=1e-4, norm=1e-3, evaluation=1e-4, weights=0.02, tensor=0.1)
"""Lower bounds of limits in 16 bits: by chance the precision may change nothing, while executions still round."""
SHARE = Distance(loss=0.8, first_norm=0.25, norm=6.0, evaluation=0.8, weights=0.7, tensor=0.8)
SHARE_OF_SPLIT_SUMS = Distance(loss=1.5, first_norm=2.5, norm=12.0, evaluation=1.5, weights=1.4, tensor=1.5)
"""Limits in 16 bits as multiples of the effect of the precision on one process; the second for tensor-parallel ranks,
each of which rounds its part of a sum."""
COMPRESSED = {8: 0.05, 4: 0.5}
"""Limits of weights and norms with compressed gradients, by their bits. The first loss does not depend on them."""


def limit_in_16_bits(composition: Composition, own: Distance) -> Distance:
    """Return the limit of an execution in a 16-bit precision; `own` is the effect of that precision on one process."""
    share = asdict(SHARE_OF_SPLIT_SUMS if any(each.tp > 1 for each in composition.executions) else SHARE)
    return Distance(**{name: max(getattr(LEAST, name), share[name] * value) for name, value in asdict(own).items()})


def compressed_limit(composition: Composition, limit: Distance) -> Distance:
    """Return the limit of an execution whose gradients may be compressed; `limit` is that of one without."""
    allowed = max((COMPRESSED[each.bits] for each in composition.executions if each.bits), default=0.0)
    if not allowed:
        return limit
    least = Distance(
        loss=allowed / 10, first_norm=allowed, norm=allowed, evaluation=allowed / 10, weights=1.0, tensor=2.0
    )
    return Distance(**{name: max(value, getattr(least, name)) for name, value in asdict(limit).items()})
