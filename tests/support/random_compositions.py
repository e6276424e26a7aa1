"""Draw compositions at random, reduce one that fails to the smallest that still does, and count the pairs met."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from random import Random
from typing import TypeVar

from transformers import CONFIG_MAPPING

from harness.config.values.json_object import JsonObject
from harness.config.values.layout_keys import PARTITIONS
from harness.schedules import DEFAULT, INTERLEAVED, SCHEDULES, model_chunks
from harness.verify.matrix import YES, read_matrix
from harness.verify.trials.composition import OFFLOADS, ROWS, Composition, Execution, Training, Words

T = TypeVar("T")
W = TypeVar("W", bound=Words)
LAYERS = 4  # of a tiny copy
LAYOUTS = ("pipeline", "tensor", "zero3")
"""Columns of the matrix."""
HEADS: JsonObject = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16}
UNEQUAL: JsonObject = {**HEADS, "intermediate_size": 90}
"""Heads and widths that two ranks do not share equally."""
ODD: JsonObject = {"vocab_size": 99, "intermediate_size": 37, "pad_token_id": 0}
"""As transformers' own tests have them: fewer ids than bytes, and widths that nothing divides."""
TIED: JsonObject = {"tie_word_embeddings": True}


@dataclass(frozen=True)
class Families:
    """The families that compositions are drawn from.

    Attributes:
        usual: those that most compositions have.
        others: all that the matrix says are trained in every layout.
        routed: those with a router loss.
    """

    usual: Sequence[str]
    others: Sequence[str]
    routed: Sequence[str]

    @classmethod
    def read(cls) -> Families:
        """Return what random_compositions.json and the matrix say."""
        said = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
        rows = read_matrix().families
        able = sorted(name for name, row in rows.items() if all(row.get(cell) == YES for cell in LAYOUTS))
        return cls(usual=said["families"], others=able, routed=said["with_router_loss"])


def draw(random: Random, families: Families) -> Composition:
    """Return a random composition; most can run, some are to be refused."""
    model = ""
    while not model or "text_config" in CONFIG_MAPPING[model].sub_configs:  # whose text decoder is a family of its own
        model = random.choice(families.usual if random.random() < 0.6 else families.others)
    ranks = random.choices((2, 3, 4), (55, 10, 35))[0]
    is_routed = model in families.routed
    training = _training(random, ranks, is_routed)
    executions = tuple(
        _execution(random, training, ranks, is_routed) for _ in range(random.choices((1, 2), (80, 20))[0])
    )
    return Composition(model=model, training=training, executions=executions)


def _maybe(random: Random, chance: float, values: Sequence[T], otherwise: T) -> T:
    return random.choice(values) if random.random() < chance else otherwise


def _training(random: Random, ranks: int, is_routed: bool) -> Training:
    return Training(
        config=_maybe(random, 0.2, (TIED, UNEQUAL, ODD, {**TIED, **UNEQUAL}), {}),
        dropout=_maybe(random, 0.2, (0.1, 0.3), 0.0),
        data=random.choices(ROWS, (40, 25, 15, 20))[0],
        length=_maybe(random, 0.2, (17, 32), 24),
        batch=12 if ranks == 3 else 8,
        micro=random.choice((1, 2)),
        precision=_maybe(random, 0.25, ("bf16",), "fp32"),
        optimizer=_maybe(random, 0.35, ("AdamW", "Adam", "SGD", "Adagrad", "RMSprop"), ""),
        scheduler=_maybe(random, 0.2, ("linear", "cosine"), "constant"),
        warmup=_maybe(random, 0.1, (1,), 0),
        decay=_maybe(random, 0.25, (0.1,), 0.0),
        clip=_maybe(random, 0.3, (0.0, 0.1), 1.0),
        lora=_maybe(random, 0.15, (2, 4), 0),
        smoothing=_maybe(random, 0.12, (0.1,), 0.0),
        router=_maybe(random, 0.5, (0.1, 0.01), 0.0) if is_routed else 0.0,
        attention=_maybe(random, 0.15, ("eager",), ""),
        evaluate=_maybe(random, 0.2, (1, 2), 0),
        seed=random.randrange(3),
    )


def _execution(random: Random, training: Training, ranks: int, has_experts: bool) -> Execution:
    pp, tp, dp = random.choice([sizes for sizes in _sizes(ranks) if training.batch % (sizes[2] * training.micro) == 0])
    staged, divisors = pp > 1, [size for size in (2, 4) if dp % size == 0]
    cp = _maybe(random, 0.15, divisors, 1) if divisors else 1
    ep = tp * _maybe(random, 0.5, divisors, 1) if divisors and has_experts else 1
    zero = random.choice((0, 1) if staged and random.random() < 0.97 else (0, 1, 2, 3))
    schedule, chunks = DEFAULT, 0
    if staged:
        fitting = [name for name in SCHEDULES if model_chunks(pp, name).count <= LAYERS]
        schedule = random.choice(fitting)
        chunks = 2 if schedule == INTERLEAVED and random.random() < 0.5 else 0
    return Execution(
        pp=pp,
        tp=tp,
        dp=dp,
        cp=cp,
        ep=ep,
        zero=zero,
        offload=_maybe(random, 0.2, OFFLOADS[1:] if zero == 3 else OFFLOADS[1:2], "none") if zero else "none",
        schedule=schedule,
        chunks=chunks,
        partition=_maybe(random, 0.3, PARTITIONS, "balanced") if staged else "balanced",
        recompute=_maybe(random, 0.35, (1, 2), 0),
        sequence=tp > 1 and random.random() < 0.3,
        bits=_maybe(random, 0.12, (8, 4), 0) if dp > 1 and zero < 2 else 0,
        compile=_maybe(random, 0.03, ("eager",), ""),
        rest=_maybe(random, 0.15, _REST, {}),
    )


_REST: Sequence[JsonObject] = (
    {"zero_optimization": {"overlap_comm": True}},
    {"zero_optimization": {"reduce_bucket_size": 1000}},
    {"zero_optimization": {"contiguous_gradients": False}},
    {"zero_optimization": {"stage3_param_persistence_threshold": 0}},
    {"activation_checkpointing": {"partition_activations": True}},
    {"communication_data_type": "fp32"},
    {"prescale_gradients": True},
)
"""Further keys that must not change a number."""


def _sizes(ranks: int) -> list[tuple[int, int, int]]:
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    return [(pp, tp, ranks // pp // tp) for pp in divisors for tp in divisors if ranks // pp % tp == 0]


# -- shrinking ---------------------------------------------------------------------------------------------


def shrink(composition: Composition, fails: Callable[[Composition], bool]) -> Composition:
    """Return the smallest composition found that still fails: no word of it can be left out, or be smaller.

    `fails` tries one, in the way that the first has failed.
    """
    changed = True
    while changed:
        changed = False
        for smaller in _smaller(composition):
            if fails(smaller):
                composition, changed = smaller, True
                break
    return composition


def _smaller(composition: Composition) -> Iterator[Composition]:
    """Yield compositions with one thing less, the largest steps first."""
    executions, training = composition.executions, composition.training
    if len(executions) > 1:
        for index in range(len(executions)):
            yield replace(composition, executions=(*executions[:index], *executions[index + 1 :]))
    for index, execution in enumerate(executions):
        for changed in _plainer(execution):
            if changed.ranks == execution.ranks or len(executions) == 1:
                yield replace(composition, executions=(*executions[:index], changed, *executions[index + 1 :]))
    for plainer in _plainer(training):
        yield replace(composition, training=plainer)
    if composition.model != (plain := Families.read().usual[0]):
        yield replace(composition, model=plain)


def _plainer(words: W) -> Iterator[W]:
    """Yield the words with one of them at its default, and sizes at 2."""
    for name, value in words.stated():
        changes: list[JsonObject] = [{name: getattr(type(words)(), name)}]
        if name in ("pp", "tp", "dp", "cp", "ep") and value != 2:
            changes.append({name: 2})
        if isinstance(value, dict) and len(value) > 1:
            changes += [{name: {other: value[other] for other in value if other != key}} for key in value]
        for change in changes:
            yield replace(words, **change)


# -- pairs -------------------------------------------------------------------------------------------------


def features(composition: Composition) -> set[str]:
    """Return what the composition is made of, one word for each thing; the seed and the model's name are left out."""
    said = [pair for pair in composition.training.stated() if pair[0] not in ("seed", "config")]
    found = {f"config.{name}" for name in composition.training.config}
    for execution in composition.executions:
        said += [pair for pair in execution.stated() if pair[0] != "rest"]
        for section, inner in execution.rest.items():
            found |= {f"{section}.{name}" for name in inner} if isinstance(inner, dict) else {section}
    found |= {f"{name}={int(value) if isinstance(value, bool) else value}" for name, value in said}
    return found | ({"resumed"} if len(composition.executions) > 1 else set())


def pairs(compositions: Iterable[Composition]) -> Counter[tuple[str, str]]:
    """Return how often two things have met in a composition."""
    return Counter(pair for each in compositions for pair in combinations(sorted(features(each)), 2))
