"""What the folder of a run holds, as far as it can be read: a run may still be going on, or have died."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness.checkpoint.directories import EVALUATIONS, METRICS, RESTARTS, RUN, numbered
from harness.config.values.json_file import parse_json, read_json, regular_bytes
from harness.config.values.json_object import JsonObject
from harness.errors import UserError
from harness.report.profile.record import StepProfile, read_steps


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """One run.

    Attributes:
        name: that tells it from the others of a report.
        about: `run.json`; empty where there is none.
        steps: objects of `metrics.jsonl` by their order, each with a step.
        evaluations: of `evaluations.jsonl`, likewise.
        restarts: of `restarts.jsonl`: the steps at which ranks failed, and why.
        checkpoints: steps of the checkpoints that are there.
        profiles: the profiled steps of this run in its newest layout.
        problem: what is wrong with `run.json`; None where it is sound or absent.
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
        """The DeepSpeed JSON as it ran."""
        return _object(self.about.get("config"))

    @property
    def layout(self) -> JsonObject:
        """Sizes by axis."""
        return _object(self.about.get("layout"))

    @property
    def shown_profile(self) -> StepProfile | None:
        """The profiled step that took the median time; None without profiles."""
        by_time = sorted(self.profiles, key=lambda profile: profile.seconds)
        return by_time[len(by_time) // 2] if by_time else None


def read_runs(folders: Sequence[Path]) -> list[RunFiles]:
    """Return the runs of some folders, under names that differ; UserError for a folder that holds none."""
    folders = [folder.resolve() for folder in folders]
    for folder in {one for one in folders if folders.count(one) > 1}:
        raise UserError(f"{folder} is given twice")
    names = [folder.name for folder in folders]
    return [
        read_run(folder, folder.name if names.count(folder.name) == 1 else f"{folder.parent.name}/{folder.name}")
        for folder in folders
    ]


def read_run(folder: Path, name: str) -> RunFiles:
    """Return the run of a folder; UserError if it holds none."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder: give the --output_dir of a run")
    (about, problem), steps = _read_about(folder / RUN), list(_by_step(folder / METRICS))
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
    """Return `run.json`, and what is wrong with it."""
    try:
        return _object(read_json(path)), None
    except FileNotFoundError:
        return {}, None
    except (OSError, ValueError) as error:
        return {}, f"{path} cannot be read, so the report lacks what it says: {error}"


def _by_step(path: Path) -> Iterator[JsonObject]:
    """Yield the whole lines of a file that have a step; the last one may be half written."""
    try:
        lines = regular_bytes(path).decode("utf-8", errors="replace").splitlines()
    except (OSError, ValueError):
        return
    for line in lines:
        try:
            row = parse_json(line)
        except ValueError:
            continue
        if isinstance(row, dict) and type(row.get("step")) is int and abs(row["step"]) < 2**53:
            yield row


def _object(value: object) -> JsonObject:
    return value if isinstance(value, dict) else {}
