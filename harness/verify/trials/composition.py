"""Describe a run in one line of text: a model, its training, and how ranks compute it.

    llama data=masked precision=bf16 : pp=2 zero=1 schedule=gpipe | tp=2 zero=3

The words before the colon decide the numbers. Those after it say how ranks compute them, which must not change them; a
second execution, after a bar, resumes the checkpoint of the first. Words that are left out have their defaults. A line
holds everything: `Composition.parse(str(composition)) == composition`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Self

from harness.config.values.json_object import JsonObject
from harness.errors import UserError
from harness.schedules import DEFAULT

ROWS = ("blocks", "masked", "padded", "packed")
"""Forms of samples: whole blocks; some labels -100, unequally many; padded on the right; several documents a row."""
OFFLOADS = ("none", "optimizer", "all")


@dataclass(frozen=True, kw_only=True)
class Words:
    """A part of a line: the fields that differ from their defaults, each written as `name=value`."""

    def __str__(self) -> str:
        return " ".join(f"{name}={_written(value)}" for name, value in self.stated())

    def stated(self) -> Iterator[tuple[str, object]]:
        """Yield name and value of each field that differs from its default."""
        for item in fields(self):
            value = getattr(self, item.name)
            if value != _default(item):
                yield item.name, value

    @classmethod
    def read(cls, words: list[str]) -> Self:
        """Parse words. UserError for an unknown name or an unusable value."""
        known = {item.name: item for item in fields(cls)}
        given: JsonObject = {}
        for word in words:
            name, found, text = word.partition("=")
            if not found or name not in known:
                raise UserError(f"composition: {word!r}: write NAME=VALUE with one of {', '.join(known)}")
            given[name] = _read(word, text, _default(known[name]))
        return cls(**given)


def _default(item: Field[object]) -> object:
    return item.default if item.default_factory is MISSING else item.default_factory()


def _written(value: object) -> str:
    if isinstance(value, dict):
        return json.dumps(value, separators=(",", ":"), sort_keys=True).replace(" ", "\\u0020")
    return str(int(value)) if isinstance(value, bool) else str(value)


def _read(word: str, text: str, default: object) -> object:
    try:
        if isinstance(default, dict):
            value: object = json.loads(text)
            if not isinstance(value, dict):
                raise ValueError
            return value
        return bool(int(text)) if isinstance(default, bool) else type(default)(text)  # type: ignore[call-arg]
    except ValueError as error:
        raise UserError(f"composition: {word!r}: write a value like {_written(default)!r}") from error


@dataclass(frozen=True, kw_only=True)
class Execution(Words):
    """How ranks compute a training: nothing here may change a number.

    Attributes:
        dp: data-parallel ranks; cp: how many of them share each sequence.
        ep: ranks of a stage that divide the experts among them.
        offload: what lies in host memory: none, optimizer (its states), all (parameters too).
        chunks: model chunks a stage (`pipeline.chunks_per_stage`); 0: the schedule's default.
        recompute: layers whose activations are recomputed together; 0: none.
        sequence: whether tensor-parallel ranks share the tokens between blocks.
        bits: bits of compressed gradients; 0: no compression.
        compile: backend of torch.compile; "": no compilation.
        rest: further keys of the DeepSpeed JSON.
    """

    pp: int = 1
    tp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    zero: int = 0
    offload: str = "none"
    schedule: str = DEFAULT
    chunks: int = 0
    partition: str = "balanced"
    recompute: int = 0
    sequence: bool = False
    bits: int = 0
    compile: str = ""
    rest: JsonObject = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.pp * self.tp * self.dp

    @property
    def sizes(self) -> str:
        """The sizes of its layout above 1, as text."""
        found = {name: getattr(self, name) for name in ("pp", "tp", "dp", "cp", "ep")}
        return " ".join(f"{name}={size}" for name, size in found.items() if size > 1) or "one rank"


@dataclass(frozen=True, kw_only=True)
class Training(Words):
    """The settings that decide the numbers.

    Attributes:
        config: fields of the model's config that differ from the tiny copy.
        dropout: rate of every dropout that the config has.
        data: the form of the samples, one of `ROWS`.
        batch: samples in a step; micro: samples in a micro-batch.
        precision: fp32, bf16 or fp16; sums: precision of accumulated gradients, "": the harness's choice.
        optimizer: a type of the DeepSpeed JSON; "": the harness's default.
        scheduler: transformers' name of the learning-rate schedule; warmup: its number of warm-up steps.
        lora: rank of adapters; 0: all weights are trained.
        smoothing: label smoothing.
        router: coefficient of the router loss; 0: none.
        evaluate: steps between evaluations, each with samples of two prompts; 0: none.
    """

    config: JsonObject = field(default_factory=dict)
    dropout: float = 0.0
    data: str = "blocks"
    length: int = 24
    batch: int = 8
    micro: int = 2
    steps: int = 3
    precision: str = "fp32"
    sums: str = ""
    optimizer: str = ""
    rate: float = 1e-3
    scheduler: str = "constant"
    warmup: int = 0
    decay: float = 0.0
    clip: float = 1.0
    lora: int = 0
    smoothing: float = 0.0
    router: float = 0.0
    attention: str = ""
    evaluate: int = 0
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Composition:
    """A training of a model, and one or more executions of it; each resumes the checkpoint of the one before.

    Attributes:
        model: a family of transformers, or a directory with a config.json.
    """

    model: str
    training: Training = field(default_factory=Training)
    executions: tuple[Execution, ...] = (Execution(),)

    def __str__(self) -> str:
        head = " ".join(filter(None, (self.model, str(self.training))))
        return " : ".join(filter(None, (head, " | ".join(str(each) or "pp=1" for each in self.executions))))

    @classmethod
    def parse(cls, line: str) -> Self:
        """Parse a line. UserError if it cannot be parsed."""
        head, _, tail = line.strip().partition(" : ")
        model, *words = head.split() or [""]
        if not model or "=" in model:
            raise UserError(f"composition {line.strip()!r}: it must begin with a model family or a directory")
        executions = tuple(Execution.read(part.split()) for part in tail.split("|"))
        return cls(model=model, training=Training.read(words), executions=executions)

    @property
    def ranks(self) -> int:
        """Number of ranks. UserError if the executions need different numbers."""
        found = {each.ranks for each in self.executions}
        if len(found) > 1:
            raise UserError(f"composition {self}: its executions run on {' and '.join(map(str, sorted(found)))} ranks")
        return found.pop()
