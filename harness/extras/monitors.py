"""Write to TensorBoard, W&B, Comet and CSV files: rank 0 writes each value once, under one name and step.

DeepSpeed's engine gets no monitors, as it would write loss and learning rate again under its own names. When a run goes
back to an earlier step, it drops the values of later steps.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from harness.atomic import open_no_link, replace_text
from harness.checkpoint.directories import set_aside
from harness.config.values.json_object import JsonObject
from harness.config.values.secrets import Secrets
from harness.console import warn

if TYPE_CHECKING:
    import wandb
    from deepspeed.monitor.comet import CometMonitor
    from torch.utils.tensorboard import SummaryWriter


class Monitors:
    """The enabled monitors of a run, by section of the DeepSpeed JSON."""

    def __init__(self, sections: Mapping[str, JsonObject], run_id: str, first_step: int) -> None:
        self._sections = sections
        self._run_id = run_id
        self._tensorboard: SummaryWriter | None = None
        self._wandb: wandb.Run | None = None
        self._comet: CometMonitor | None = None
        self._tables: Tables | None = None
        self._open(first_step)

    def _open(self, first_step: int) -> None:
        sections = self._sections
        if "tensorboard" in sections:
            from torch.utils.tensorboard import SummaryWriter

            purge = first_step if first_step > 1 else None
            self._tensorboard = SummaryWriter(_folder(sections["tensorboard"]), purge_step=purge, flush_secs=10)
        if "wandb" in sections and self._wandb is None:
            self._wandb = _wandb(sections["wandb"], self._run_id)
        if "csv_monitor" in sections:
            if self._tables is None:
                self._tables = Tables(Path(_folder(sections["csv_monitor"])), first_step)
            else:
                self._tables.rewind(first_step - 1)
        if "comet" in sections and self._comet is None:
            self._comet = _comet(sections["comet"])

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Write numbers by name, such as `train/loss`. Warn if that fails, for instance on a full disk."""
        with _warning("TensorBoard's events"):
            for name, value in values.items():
                if self._tensorboard is not None:
                    self._tensorboard.add_scalar(name, value, step)
        with _warning("W&B's run"):
            if self._wandb is not None and values:
                self._wandb.log(dict(values), step=step)
        with _warning("Comet's experiment"):
            if self._comet is not None:
                self._comet.write_events([(name, value, step) for name, value in values.items()])
        with _warning("the CSV tables"):
            if self._tables is not None:
                self._tables.append(values, step)

    def write_text(self, name: str, text: str, step: int) -> None:
        """Write a text to TensorBoard, the only monitor that shows texts."""
        with _warning("TensorBoard's events"):
            if self._tensorboard is not None:
                self._tensorboard.add_text(name, Secrets.known().masked(text), step)

    def rewind(self, step: int) -> None:
        """Drop the values of steps after `step`, if the monitor can."""
        self._close_tensorboard()
        with _warning("TensorBoard's events and the CSV tables"):
            self._open(step + 1)

    def close(self) -> None:
        """Flush and close the monitors."""
        self._close_tensorboard()
        with _warning("W&B's run"):
            if self._wandb is not None:
                self._wandb.finish()

    def _close_tensorboard(self) -> None:
        with _warning("TensorBoard's events"):
            if self._tensorboard is not None:
                self._tensorboard.close()


@contextmanager
def _warning(what: str) -> Iterator[None]:
    """Turn whatever a monitor raises into a warning: training continues without it."""
    try:
        yield
    except Exception as error:
        text = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        warn(f"{what} cannot be written: {text}; training continues")


def _folder(section: JsonObject) -> str:
    return str(Path(section.get("output_path", "")) / section.get("job_name", "DeepSpeedJobName"))


def _wandb(section: JsonObject, run_id: str) -> wandb.Run:
    import wandb

    names = {"entity": section.get("team"), "group": section.get("group"), "name": section.get("name")}
    folder = section.get("dir")
    return wandb.init(project=section.get("project", "deepspeed"), id=run_id, resume="allow", dir=folder, **names)


def _comet(section: JsonObject) -> CometMonitor:
    from deepspeed.monitor.comet import CometMonitor
    from deepspeed.monitor.config import CometConfig

    return CometMonitor(CometConfig(**{**section, "enabled": True}))


class Tables:
    """CSV files in one folder, one for each value; other files there are not touched.

    At a value's first row, an existing file of its name is checked. If it is this run's, the rows of later steps are
    dropped; any other file is renamed.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        self._folder = folder
        self._first_step = first_step
        self._is_fresh = first_step == 1
        self._own: set[Path] = set()

    def append(self, values: Mapping[str, float], step: int) -> None:
        """Add a row to the table of each value."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for name, value in values.items():
            path = self._folder / f"{name.replace('/', '_')}.csv"
            header = ["step", name.rpartition("/")[2]]
            if path not in self._own:
                self._take(path, header)
            is_new = not path.exists()
            with open(path, "a", encoding="utf-8", newline="", opener=open_no_link) as file:  # an opener
                csv.writer(file).writerows([header] * is_new + [[step, value]])

    def rewind(self, step: int) -> None:
        """Drop the rows of the steps after `step`."""
        self._first_step = step + 1
        for path in self._own:
            self._cut(path)

    def _take(self, path: Path, header: list[str]) -> None:
        """Drop the later rows of this run's table, or rename a file of another run."""
        if path.exists() and (self._is_fresh or self._rows(path)[:1] != [header]):
            set_aside(path)
        elif path.exists():
            self._cut(path)
        self._own.add(path)

    def _cut(self, path: Path) -> None:
        if path.exists():
            rows = [row for row in self._rows(path) if not (row[0].isdigit() and int(row[0]) >= self._first_step)]
            text = io.StringIO(newline="")
            csv.writer(text).writerows(rows)
            replace_text(path, text.getvalue())

    def _rows(self, path: Path) -> list[list[str]]:
        try:
            with path.open(encoding="utf-8", newline="") as file:
                return [row for row in csv.reader(file) if row]
        except (ValueError, csv.Error):  # no table at all
            return []
