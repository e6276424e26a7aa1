"""Partition layers into pipeline stages by their costs.

A partition of n layers into p stages is its list of boundaries: p + 1 rising indices from 0 to n, stage i holding the
layers boundaries[i] to boundaries[i + 1] - 1. Every stage holds at least one layer. A pipeline advances at the pace of
its slowest stage, so `balanced` minimises the cost of the most expensive one: the linear partition problem (Skiena, The
Algorithm Design Manual, section on partitioning without rearrangement), solved exactly here.

Costs are FLOPs per token, forward and backward together. Only their proportions matter. Sources: Kaplan et
al. 2020, Scaling Laws for Neural Language Models (section 2.1: 2 FLOPs a parameter and token forward, twice that
backward); Narayanan et al. 2021, Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM
(appendix: attention, logit layer, recomputation). Operations that move memory and hardly compute (look-ups, norms,
softmax over the vocabulary) are counted by the elements they move. Costs per step instead of per token (the
optimizer, the dense gradient of an embedding table) are left out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf, isfinite

from harness.config.values.layout_keys import PARTITION_FORMS
from harness.errors import UserError
from harness.wording import counted

# FLOPs that a device computes while it moves one element to or from memory: about 10 on one CPU core, some hundreds on
# an accelerator. The boundaries hardly depend on it: the operations that it weighs are small next to the matmuls.
FLOPS_PER_MOVE = 64.0

# Look-up: read the row and write it; backward, read the gradient and add it to the table's.
MOVES_PER_LOOKUP = 4
# Norm or bias: read and write; backward, read input and gradient, write both gradients.
MOVES_PER_VECTOR = 6
# Cross entropy: widen, find the maximum, sum the exponentials; backward, read, scale, write the gradient.
MOVES_PER_LOGIT = 6


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """The work for one token in a pipeline layer, before any tensor-parallel cut.

    Attributes:
        matmul_parameters: weights that each token is multiplied with, including a tied head's; in a mixture of experts,
            only the weights of a token's experts.
        lookup_width: elements fetched from embedding tables: the sum of the tables' widths.
        vector_parameters: elements of norms, biases and the like.
        attention_width: attention heads x head size; 0 in a layer without attention.
        sequence_length: number of tokens that one token attends to.
        logits: size of the vocabulary in the layer that computes the loss; 0 in other layers.
        checkpointed: whether the layer's forward runs again before its backward.
    """

    matmul_parameters: int = 0
    lookup_width: int = 0
    vector_parameters: int = 0
    attention_width: int = 0
    sequence_length: int = 0
    logits: int = 0
    checkpointed: bool = False

    def flops_per_token(self, flops_per_move: float = FLOPS_PER_MOVE) -> float:
        """Return the FLOPs of forward and backward, and of the second forward if the layer is checkpointed.

        A matmul costs 2 FLOPs a parameter forward and 4 backward. Attention multiplies a query with every key
        and a probability with every value: 2 x 2 x width x length forward, and twice that backward.
        """
        matmuls = 6 * self.matmul_parameters
        attention = 12 * self.attention_width * self.sequence_length
        moves = (
            MOVES_PER_LOOKUP * self.lookup_width
            + MOVES_PER_VECTOR * self.vector_parameters
            + MOVES_PER_LOGIT * self.logits
        )
        once = matmuls + attention + moves * flops_per_move
        return once * 8 / 6 if self.checkpointed else float(once)


def stage_boundaries(
    method: str, num_chunks: int, *, costs: Sequence[float], parameters: Sequence[int], names: Sequence[str]
) -> list[int]:
    """Return the boundaries for `pipeline.partition`; each sequence has one entry per pipeline layer.

    `num_chunks` is the number of stages, or of all model chunks if a stage has several.

    `balanced` and `measured` read `costs` (computed or profiled, by the caller), `parameters` reads the
    counts of trainable parameters, `type:REGEX` the layers' class names. The last three methods cut as
    DeepSpeed's PipelineModule does. Raises UserError for an unknown method, too few layers, or a regex that
    matches none.
    """
    kind, _, pattern = method.partition(":")
    if kind.lower() == "type" and pattern:
        return by_type(names, pattern, num_chunks)
    match method.lower():
        case "balanced" | "measured":
            return balanced(costs, num_chunks)
        case "uniform":
            return uniform(len(names), num_chunks)
        case "parameters":
            return narrowest(parameters, num_chunks)
    raise UserError(f"pipeline.partition: {method!r} is not a method; use one of {', '.join(PARTITION_FORMS)}")


def uniform(n_layers: int, num_chunks: int) -> list[int]:
    """Return boundaries of stages with equal numbers of layers, give or take one more on the first stages."""
    _require_enough_layers(n_layers, num_chunks)
    size, longer = divmod(n_layers, num_chunks)
    return [stage * size + min(stage, longer) for stage in range(num_chunks + 1)]


def balanced(costs: Sequence[float], num_chunks: int) -> list[int]:
    """Return the boundaries that minimise the cost of the most expensive stage.

    Ties are broken by the least sum of squares, so that the other stages are even too, then by lighter earlier stages,
    which hold the activations of more micro-batches. The result is exact: costs are compared as integers. Raises
    ValueError for a cost that is negative or not finite.
    """
    _require_enough_layers(len(costs), num_chunks)
    ends = list(accumulate(_as_integers([0.0, *costs])))
    return _evenest(ends, num_chunks, _least_highest(ends, num_chunks))


def by_type(names: Sequence[str], regex: str, num_chunks: int) -> list[int]:
    """Return boundaries that even out the number of layers whose class name matches `regex`, ignoring case.

    Raises UserError if `regex` is not a regular expression, or matches no layer.
    """
    try:
        matcher = re.compile(regex, re.IGNORECASE)
    except re.error as error:
        raise UserError(f"pipeline.partition: 'type:{regex}' is not a regular expression: {error}") from error
    matches = [int(bool(matcher.search(name))) for name in names]
    if not any(matches):
        known = ", ".join(dict.fromkeys(names))
        raise UserError(f"pipeline.partition: 'type:{regex}' matches no layer; the layers are {known}")
    return narrowest(matches, num_chunks)


def narrowest(weights: Sequence[int], num_chunks: int) -> list[int]:
    """Return boundaries that keep the heaviest and the lightest stage close, like DeepSpeed's `partition_balanced`.

    Each prefix keeps only its own best cut, so the result is good, but not always the optimum, which `balanced` finds.
    """
    _require_enough_layers(len(weights), num_chunks)
    n_layers = len(weights)
    ends = [0, *accumulate(weights)]
    # (heaviest, lightest) stage of each prefix; None for a prefix shorter than its number of stages.
    extremes: list[tuple[float, float] | None] = [(0, inf), *[None] * n_layers]
    cuts = []
    for _ in range(num_chunks):
        previous = extremes
        extremes = [None] * (n_layers + 1)
        cut = [0] * (n_layers + 1)
        for stop in range(1, n_layers + 1):
            least = inf
            for start, known in enumerate(previous[:stop]):
                if known is None:
                    continue
                weight = ends[stop] - ends[start]
                heaviest, lightest = max(known[0], weight), min(known[1], weight)
                # Of equal cuts the last, as DeepSpeed takes it.
                if heaviest - lightest <= least:
                    least = heaviest - lightest
                    extremes[stop] = (heaviest, lightest)
                    cut[stop] = start
        cuts.append(cut)
    boundaries = [n_layers]
    for cut in reversed(cuts):
        boundaries.append(cut[boundaries[-1]])
    return boundaries[::-1]


def _least_highest(ends: Sequence[int], num_chunks: int) -> int:
    """Return the least possible cost of the most expensive stage; `ends` are the running sums of the costs, from 0.

    Dynamic programming over (first layer, stages left). A longer first stage costs more and leaves less to the others,
    so the search may stop at the first length at which it costs as much as the most expensive of them.
    """
    n_layers = len(ends) - 1
    best = [ends[-1] - start for start in ends[:-1]]  # one stage for all that is left
    for left in range(2, num_chunks + 1):
        rest = best
        best = [0] * n_layers
        for start in range(n_layers - left + 1):
            least = ends[-1]
            for stop in range(start + 1, n_layers - left + 2):
                first = ends[stop] - ends[start]
                least = min(least, max(first, rest[stop]))
                if first >= rest[stop]:
                    break
            best[start] = least
    return best[0]


def _evenest(ends: Sequence[int], num_chunks: int, highest: int) -> list[int]:
    """Return the boundaries with the least sum of squared costs and no stage above `highest`; ties cut earlier.

    Dynamic programming as above. Stages above `highest` are not tried, which leaves few lengths for each.
    """
    n_layers = len(ends) - 1
    forbidden = ends[-1] * ends[-1] + ends[-1]  # more than any sum of squares, unless all costs are 0
    alone = [ends[-1] - start for start in ends[:-1]]
    best = [cost * cost if cost <= highest else forbidden for cost in alone]
    choices: list[list[int]] = []
    for left in range(2, num_chunks + 1):
        rest = best
        best = [forbidden] * n_layers
        choice = list(range(1, n_layers + 1))
        for start in range(n_layers - left + 1):
            for stop in range(start + 1, n_layers - left + 2):
                first = ends[stop] - ends[start]
                if first > highest:
                    break
                if rest[stop] + first * first < best[start]:
                    best[start] = rest[stop] + first * first
                    choice[start] = stop
        choices.append(choice)
    boundaries = [0]
    for choice in reversed(choices):
        boundaries.append(choice[boundaries[-1]])
    return [*boundaries, n_layers]


def _as_integers(costs: Sequence[float]) -> list[int]:
    """Scale all costs by one common factor to whole numbers, so that sums do not round.

    The denominators of floats are powers of two, so the largest is a multiple of all.
    """
    if not all(isfinite(cost) and cost >= 0 for cost in costs):
        raise ValueError(f"layer costs must be finite and not negative: {list(costs)}")
    exact = [cost.as_integer_ratio() for cost in costs]
    scale = max(denominator for _, denominator in exact)
    return [numerator * (scale // denominator) for numerator, denominator in exact]


def _require_enough_layers(n_layers: int, num_chunks: int) -> None:
    if not 1 <= num_chunks <= n_layers:
        raise UserError(
            f"pipeline.stages: {counted(num_chunks, 'stage')} for a model of {counted(n_layers, 'layer')}: "
            + ("use 1" if n_layers == 1 else f"use 1 to {n_layers}")
        )
