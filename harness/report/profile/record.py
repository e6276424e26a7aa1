"""The profile of a step, stored in `output_dir/profile/step-XXXXXXXX.json`: what each rank did, and when."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from harness.atomic import replace_text
from harness.config.values.json_file import read_object
from harness.config.values.json_object import JsonObject
from harness.schedules import DEFAULT, ModelChunks, model_chunks

FOLDER = "profile"
COMPUTING = ("forward", "backward")
KINDS = (*COMPUTING, "send", "receive", "wait", "reduce", "step", "data", "other")
"""Kinds of work in a step. `wait` is derived: the part of a send or receive before the other side has begun."""
MEMORY = ("parameters", "gradients", "optimizer", "activations", "other")
"""The parts of a rank's peak memory, lowest first."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """Something that a rank did from `start` to `end`, in seconds since the first rank began the step.

    Attributes:
        kind: one of `KINDS`; for a layer: forward, recompute or backward.
        name: name of the pipeline's instruction, or class name of the layer.
        micro_batch: number of the micro-batch within the step, if it belongs to one.
        layer: index of the layer, for spans of layers.
        chunk: the model chunk, for instructions of a schedule that is not DeepSpeed's own.
    """

    kind: str
    name: str
    start: float
    end: float
    micro_batch: int | None = None
    layer: int | None = None
    chunk: int | None = None

    @property
    def seconds(self) -> float:
        """Duration in seconds."""
        return self.end - self.start


@dataclass(frozen=True, kw_only=True)
class RankProfile:
    """One rank in one step.

    Attributes:
        instructions: the instructions that it executed, in order.
        layers: passes through single layers, in order, each within an instruction.
        memory_bytes: bytes of each of `MEMORY`, which add up to `peak`. On a CPU they are those of the process's
            resident set, on an accelerator those of torch's allocator.
    """

    rank: int
    stage: int
    dp_rank: int
    tp_rank: int
    host: str
    start: float
    end: float
    instructions: Sequence[Span]
    layers: Sequence[Span]
    memory_bytes: dict[str, int] = field(default_factory=dict)

    def since(self, moment: float) -> RankProfile:
        """Return the same profile with all times counted from `moment`."""

        def moved(spans: Sequence[Span]) -> list[Span]:
            return [replace(span, start=span.start - moment, end=span.end - moment) for span in spans]

        return replace(
            self,
            start=self.start - moment,
            end=self.end - moment,
            instructions=moved(self.instructions),
            layers=moved(self.layers),
        )


@dataclass(frozen=True, kw_only=True)
class StepProfile:
    """One step on all ranks.

    Attributes:
        run_id: that of `run.json`.
        layout: sizes by axis.
        stage_boundaries: index of the first layer of each model chunk, then the number of layers.
        micro_batches: number of micro-batches of each rank in the step.
        schedule: name of the pipeline's schedule.
        chunks_per_stage: number of model chunks of a stage; 1 means that a chunk is a stage.
    """

    step: int
    run_id: str
    device: str
    layout: dict[str, int]
    stage_boundaries: Sequence[int]
    layer_names: Sequence[str]
    micro_batches: int
    ranks: Sequence[RankProfile]
    schedule: str = DEFAULT
    chunks_per_stage: int = 1

    @property
    def pp_size(self) -> int:
        """The number of pipeline stages."""
        return self.chunks.num_stages

    @property
    def chunks(self) -> ModelChunks:
        """The model chunks, and the stage of each."""
        return model_chunks(
            (len(self.stage_boundaries) - 1) // self.chunks_per_stage, self.schedule, self.chunks_per_stage
        )

    @property
    def seconds(self) -> float:
        """Seconds from the first rank's start, which is 0, to the last rank's end."""
        return max(rank.end for rank in self.ranks)


def write_step(folder: Path, profile: StepProfile) -> None:
    """Write a step's profile; it replaces an earlier one of the same step."""
    replace_text(folder / f"step-{profile.step:08d}.json", _dumped(asdict(profile)))


def write_object(folder: Path, name: str, content: JsonObject) -> None:
    """Write a JSON file that was made from the profiles."""
    replace_text(folder / name, _dumped(content))


def read_steps(output_dir: Path, run_id: str | None = None) -> Iterator[StepProfile]:
    """Yield the profiles of a run's steps in order, without files that are damaged or belong to another run."""
    for path in sorted((output_dir / FOLDER).glob("step-*.json")):
        try:
            profile = _profile(read_object(path))
        except (OSError, ValueError, TypeError, KeyError):
            continue
        if run_id in (None, profile.run_id) and profile.ranks:
            yield profile


def _profile(content: JsonObject) -> StepProfile:
    def spans(given: Sequence[JsonObject]) -> list[Span]:
        return [Span(**span) for span in given]

    ranks = [
        RankProfile(**{**rank, "instructions": spans(rank["instructions"]), "layers": spans(rank["layers"])})
        for rank in content["ranks"]
    ]
    return StepProfile(**{**content, "ranks": ranks})


def _dumped(content: JsonObject) -> str:
    """Return JSON with times rounded to nanoseconds and without fields that are None."""

    def short(value: object) -> object:
        if isinstance(value, float):
            return round(value, 9)
        if isinstance(value, dict):
            return {key: short(item) for key, item in value.items() if item is not None}
        return [short(item) for item in value] if isinstance(value, list | tuple) else value

    return json.dumps(short(content), separators=(",", ":")) + "\n"
