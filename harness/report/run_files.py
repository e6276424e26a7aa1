"""Read the files of a run, and predict the run with the planner, for comparison with what was measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from harness.checking import resolve
from harness.checkpoint.directories import EVALUATIONS, METRICS, RESTARTS, RUN, numbered
from harness.config import AutoValues
from harness.config.text.document import from_values
from harness.config.values.json_file import objects_of_lines, read_object, regular_bytes
from harness.config.values.json_object import JsonObject
from harness.errors import UserError
from harness.planner.estimate import Estimate, predict
from harness.planner.hardware import GIB, Hardware
from harness.planner.model_config import decoder_of
from harness.report.profile.record import StepProfile, read_steps

MOST_OFF = 0.03  # relative error of the planner's parameter count above which it has misread the model


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """The files of one run.

    Attributes:
        name: unique among the runs of a report.
        about: content of `run.json`; empty if there is none.
        steps: rows of `metrics.jsonl` that have a step, in order.
        evaluations: the same of `evaluations.jsonl`.
        restarts: rows of `restarts.jsonl`: the steps at which ranks failed, and why.
        checkpoints: steps of the checkpoints that exist.
        profiles: the profiled steps of this run in its newest layout.
        problem: why `run.json` cannot be read; None if it can, or is absent.
    """

    name: str
    folder: Path
    about: JsonObject
    steps: Sequence[JsonObject]
    evaluations: Sequence[JsonObject] = ()
    restarts: Sequence[JsonObject] = ()
    checkpoints: Sequence[int] = ()
    profiles: Sequence[StepProfile] = field(default_factory=list)
    problem: str | None = None

    @property
    def config(self) -> JsonObject:
        """The resolved DeepSpeed JSON of the run."""
        return _object(self.about.get("config"))

    @property
    def certificate(self) -> JsonObject:
        """The certificate of `ds-harness verify` for its config and model; empty if there is none."""
        return _object(self.about.get("certificate"))

    @property
    def layout(self) -> JsonObject:
        """Sizes by axis; entries that are no plausible size are left out, as the file may have been edited."""
        sizes = _object(self.about.get("layout"))
        return {axis: size for axis, size in sizes.items() if type(size) is int and 0 < size < 2**31}

    @property
    def shown_profile(self) -> StepProfile | None:
        """The profiled step with the median time; None without profiles."""
        by_time = sorted(self.profiles, key=lambda profile: profile.seconds)
        return by_time[len(by_time) // 2] if by_time else None


def read_runs(folders: Sequence[Path]) -> list[RunFiles]:
    """Return the runs of some folders, with unique names. Raises UserError for a folder that holds none."""
    folders = [folder.resolve() for folder in folders]
    for folder in {one for one in folders if folders.count(one) > 1}:
        raise UserError(f"{folder} is given twice")
    names = [folder.name for folder in folders]
    return [
        read_run(folder, folder.name if names.count(folder.name) == 1 else f"{folder.parent.name}/{folder.name}")
        for folder in folders
    ]


def read_run(folder: Path, name: str) -> RunFiles:
    """Return the run of a folder. Raises UserError if it holds none."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder: give the --output_dir of a run")
    about, problem = _read_about(folder / RUN)
    steps = list(_by_step(folder / METRICS))
    if not about and not steps:
        raise UserError(f"{folder} holds no run: it has no {RUN} and no {METRICS} that can be read")
    found = list(read_steps(folder, about.get("run_id")))
    newest = [
        one for one in found if (one.layout, one.stage_boundaries) == (found[-1].layout, found[-1].stage_boundaries)
    ]
    return RunFiles(
        name=name,
        folder=folder,
        about=about,
        problem=problem,
        steps=steps,
        evaluations=list(_by_step(folder / EVALUATIONS)),
        restarts=list(_by_step(folder / RESTARTS)),
        checkpoints=[step for step, _ in numbered(folder)],
        profiles=newest,
    )


def _read_about(path: Path) -> tuple[JsonObject, str | None]:
    """Return the content of `run.json`, and why it cannot be read, if so."""
    try:
        return read_object(path), None
    except FileNotFoundError:
        return {}, None
    except (OSError, ValueError) as error:
        return {}, f"{path} cannot be read, so the report leaves out its content: {error}"


def _by_step(path: Path) -> Iterator[JsonObject]:
    """Yield the rows of a file that have a step. A last line that is half written is left out."""
    try:
        content = regular_bytes(path)
    except (OSError, ValueError):
        return
    for row in objects_of_lines(content):
        if type(row.get("step")) is int and abs(row["step"]) < 2**53:
            yield row


def _object(value: object) -> JsonObject:
    return value if isinstance(value, dict) else {}


def predict_run(run: RunFiles, hardware: Hardware) -> Estimate | None:
    """Return the planner's prediction of a run's step on other devices; None if it cannot read model or config.

    The run itself predicted its memory (`expected_parts`); without that prediction there is none here, either.
    """
    model = run.about.get("model")
    block = _object(run.about.get("arguments")).get("block_size")
    block = _object(run.about.get("expected")).get("sequence_length", block)
    if run.about.get("expected", ...) is None:  # adapters, or an optimizer that the planner does not know
        return None
    if not (isinstance(model, dict) and "model_type" in model and isinstance(block, int) and run.config):
        return None
    try:
        resolved = resolve(from_values(run.config), AutoValues(world_size=run.layout.get("world_size", 1)))
        shape = decoder_of(model, run.name)
        counted = run.about.get("parameters")
        if isinstance(counted, int) and abs(shape.parameters / max(counted, 1) - 1) > MOST_OFF:
            return None  # the config describes another model to the planner than the one that ran
        boundaries = _boundaries(run, len(shape.layers) + 2, resolved.chunks.count)
        flags = _object(run.about.get("arguments"))
        # a run from before the flag existed had none of these kernels, but for Liger's
        fused = flags.get("fused_kernels") is True or flags.get("use_liger_kernel") is True
        found = predict(resolved, shape, block, hardware=hardware, boundaries=boundaries, fused_kernels=fused)
        assert isinstance(found, Estimate)  # its hardware is known
        return found
    except UserError:
        return None


def _boundaries(run: RunFiles, layers: int, chunks: int) -> tuple[int, ...] | None:
    """Return the stage boundaries of the run; None if its files do not have them.

    The planner would choose others if the run's were chosen by measured times or by a user's pattern of class names, or
    if layers have moved since.
    """
    found = run.profiles[-1].stage_boundaries if run.profiles else run.about.get("stage_boundaries")
    if not isinstance(found, list) or len(found) != chunks + 1:
        return None
    if found[0] != 0 or found[-1] != layers or any(a >= b for a, b in pairwise(found)):
        return None
    return tuple(found)


def expected_parts(run: RunFiles) -> list[dict[str, float]]:
    """Return the bytes of each stage that the run predicted at its start, by the parts that a profile measures.

    A profile measures a step's own tensors as one sum. Empty if the run made no prediction.
    """
    stages = _object(_object(run.about.get("expected")).get("memory_gib")).get("stages")
    try:
        return [
            {
                **{part: GIB * float(stage[part]) for part in ("parameters", "gradients", "optimizer")},
                "activations": GIB * sum(float(stage[part]) for part in ("activations", "logits", "buffers")),
            }
            for stage in stages or ()
        ]
    except (KeyError, TypeError, ValueError):  # the file may have been edited
        return []
