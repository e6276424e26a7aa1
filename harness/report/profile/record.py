"""The profile of a step as `output_dir/profile/step-XXXXXXXX.json` holds it: what each rank did, and when."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from harness.checkpoint.atomic import replace_text
from harness.config.values.json_file import read_json
from harness.config.values.json_object import JsonObject
from harness.config.values.layout_keys import DEEPSPEED_1F1B
from harness.config.values.model_chunks import ModelChunks, model_chunks

FOLDER = "profile"
COMPUTING = ("forward", "backward")
KINDS = (*COMPUTING, "send", "receive", "wait", "reduce", "step", "data", "other")
"""What a rank may do in a step. `wait` is derived: the part of a send or receive before the other side has begun."""
MEMORY = ("parameters", "gradients", "optimizer", "activations", "other")
"""The parts of a rank's peak memory, lowest first."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """Something that a rank did from `start` to `end`, in seconds since the first rank began the step.

    Attributes:
        kind: one of `KINDS`; of a layer: forward, recompute or backward.
        name: of the pipeline's instruction, or of the layer.
        micro_batch: its number within the step, where there is one.
        layer: index of the layer, for the spans of layers.
        part: the model chunk, for the instructions of a schedule that is not DeepSpeed's own.
    """

    kind: str
    name: str
    start: float
    end: float
    micro_batch: int | None = None
    layer: int | None = None
    part: int | None = None

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start


@dataclass(frozen=True, kw_only=True)
class RankProfile:
    """One rank in one step.

    Attributes:
        instructions: what it did, one after the other.
        layers: passes through single layers, one after the other, each within an instruction.
        memory_bytes: `MEMORY`, which add up to `peak`: the process's resident set on a CPU, else the allocator's.
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
        """Return the same with all times counted from a moment."""

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
        run_id: of the run, as in `run.json`.
        layout: sizes by axis.
        stage_boundaries: index of the first layer of each model chunk, then the number of layers.
        micro_batches: of each rank in the step.
        schedule: of the pipeline.
        parts_per_stage: how many model chunks a stage has; with one a chunk is a stage.
    """

    step: int
    run_id: str
    device: str
    layout: dict[str, int]
    stage_boundaries: Sequence[int]
    layer_names: Sequence[str]
    micro_batches: int
    ranks: Sequence[RankProfile]
    schedule: str = DEEPSPEED_1F1B
    parts_per_stage: int = 1

    @property
    def pp_size(self) -> int:
        """The number of pipeline stages."""
        return self.chunks.stages

    @property
    def chunks(self) -> ModelChunks:
        """The model chunks, and which stage has which."""
        return model_chunks(
            (len(self.stage_boundaries) - 1) // self.parts_per_stage, self.schedule, self.parts_per_stage
        )

    @property
    def seconds(self) -> float:
        """From the first rank's begin to the last one's end."""
        return max(rank.end for rank in self.ranks)


def write_step(folder: Path, profile: StepProfile) -> None:
    """Write a step's profile; one of the same step is replaced."""
    replace_text(folder / f"step-{profile.step:08d}.json", _dumped(asdict(profile)))


def write_object(folder: Path, name: str, content: JsonObject) -> None:
    """Write a file that is made of the profiles."""
    replace_text(folder / name, _dumped(content))


def read_steps(output_dir: Path, run_id: str | None = None) -> Iterator[StepProfile]:
    """Yield the profiles of a run's steps in order; files that are not whole, or of another run, are left out."""
    for path in sorted((output_dir / FOLDER).glob("step-*.json")):
        try:
            profile = _profile(read_json(path))
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
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
    """Return JSON in which times have nanoseconds and no field is there that says nothing."""

    def short(value: object) -> object:
        if isinstance(value, float):
            return round(value, 9)
        if isinstance(value, dict):
            return {key: short(item) for key, item in value.items() if item is not None}
        return [short(item) for item in value] if isinstance(value, list | tuple) else value

    return json.dumps(short(content), separators=(",", ":")) + "\n"
