"""Draw compositions at random, reduce one that fails to the smallest that still does, and count the pairs met."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from random import Random
from typing import Any

from harness.config.values.layout_keys import INTERLEAVED, PARTITIONS, SCHEDULES
from harness.config.values.model_chunks import model_chunks
from harness.hf.matrix import CELLS, YES, read_matrix
from harness.parity.composition import OFFLOADS, ROWS, Composition, Execution, Training

USUAL_FAMILIES = ("llama", "qwen3", "gpt2", "mixtral", "gemma2", "bloom", "deepseek_v3", "mistral")
LAYERS = 4  # of a tiny copy
UNEQUAL = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16, "intermediate_size": 90}
"""Heads and widths that two ranks do not share equally."""
TIED = {"tie_word_embeddings": True}


def families() -> list[str]:
    """Return the families of which the matrix says that all layouts train them."""
    return sorted(name for name, row in read_matrix().families.items() if all(row.get(cell) == YES for cell in CELLS))


def draw(random: Random, known: Sequence[str]) -> Composition:
    """Return a random composition; most can run, some are to be refused. `known`: families beside the usual ones."""
    model = random.choice(USUAL_FAMILIES if random.random() < 0.6 else known)
    ranks = random.choices((2, 3, 4), (55, 10, 35))[0]
    training = _training(random, model)
    number = random.choices((1, 2), (80, 20))[0]
    executions = tuple(_execution(random, training, ranks) for _ in range(number))
    return Composition(model=model, training=training, executions=executions)


def _maybe(random: Random, chance: float, values: Sequence[Any], otherwise: Any) -> Any:
    return random.choice(values) if random.random() < chance else otherwise


def _training(random: Random, model: str) -> Training:
    lora = _maybe(random, 0.15, (2, 4), 0)
    config = _maybe(random, 0.2, (TIED, UNEQUAL, {**TIED, **UNEQUAL}), {})
    return Training(
        config=config,
        dropout=_maybe(random, 0.2, (0.1, 0.3), 0.0),
        data=random.choices(ROWS, (40, 25, 15, 20))[0],
        length=_maybe(random, 0.2, (17, 32), 24),
        micro=random.choice((1, 2)),
        precision=_maybe(random, 0.25, ("bf16",), "fp32"),
        optimizer=_maybe(random, 0.35, ("AdamW", "Adam", "SGD", "Adagrad", "RMSprop"), "adamw"),
        scheduler=_maybe(random, 0.2, ("linear", "cosine"), "constant"),
        warmup=_maybe(random, 0.1, (1,), 0),
        decay=_maybe(random, 0.25, (0.1,), 0.0),
        clip=_maybe(random, 0.3, (0.0, 0.1), 1.0),
        lora=lora,
        smoothing=_maybe(random, 0.12, (0.1,), 0.0),
        router=_maybe(random, 0.5, (0.1, 0.01), 0.0) if model in ("mixtral", "qwen3_moe") else 0.0,
        attention=_maybe(random, 0.15, ("eager",), ""),
        evaluate=_maybe(random, 0.2, (1, 2), 0),
        seed=random.randrange(3),
    )


def _execution(random: Random, training: Training, ranks: int) -> Execution:
    pp, tp, dp = random.choice([sizes for sizes in _sizes(ranks) if training.batch % (sizes[2] * training.micro) == 0])
    staged = pp > 1
    zero = random.choice((0, 1) if staged and random.random() < 0.97 else (0, 1, 2, 3))
    schedule, chunks = SCHEDULES[0], 0
    if staged:
        fitting = [name for name in SCHEDULES if model_chunks(pp, name).count <= LAYERS]
        schedule = random.choice(fitting)
        chunks = 2 if schedule == INTERLEAVED and random.random() < 0.5 else 0
    return Execution(
        pp=pp,
        tp=tp,
        dp=dp,
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


_REST: Sequence[dict[str, Any]] = (
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
    if composition.model != USUAL_FAMILIES[0]:
        yield replace(composition, model=USUAL_FAMILIES[0])


def _plainer(words: Any) -> Iterator[Any]:
    """Yield the words with one of them at its default, and sizes at 2."""
    for name, value in words.stated():
        yield replace(words, **{name: getattr(type(words)(), name)})
        if name in ("pp", "tp", "dp") and value > 2:
            yield replace(words, **{name: 2})
        if isinstance(value, dict):
            for key in value if len(value) > 1 else ():
                yield replace(words, **{name: {other: value[other] for other in value if other != key}})


# -- pairs -------------------------------------------------------------------------------------------------


def features(composition: Composition) -> set[str]:
    """Return what the composition is made of, one word for each thing; the seed and the model's name are left out."""
    found = {
        f"{name}={_short(value)}" for name, value in composition.training.stated() if name not in ("seed", "config")
    }
    found |= {f"config.{name}" for name in composition.training.config}
    for execution in composition.executions:
        found |= {f"{name}={_short(value)}" for name, value in execution.stated() if name != "rest"}
        found |= {
            f"{section}.{name}" if isinstance(inner, dict) else section
            for section, inner in execution.rest.items()
            for name in (inner if isinstance(inner, dict) else [""])
        }
    return found | ({"resumed"} if len(composition.executions) > 1 else set())


def _short(value: object) -> object:
    return int(value) if isinstance(value, bool) else value


def pairs(compositions: Iterable[Composition]) -> Counter[tuple[str, str]]:
    """Return how often two things have met in a composition."""
    return Counter(pair for each in compositions for pair in combinations(sorted(features(each)), 2))
