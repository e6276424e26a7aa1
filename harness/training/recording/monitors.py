"""TensorBoard, W&B, Comet and CSV files: each value once, under one name and at one step, written by rank 0.

DeepSpeed's engine gets none of them, as it would write the loss and the learning rate under names of its own. A run
that goes back to an earlier step drops what was written of the steps after it.
"""

from __future__ import annotations

import csv
import io
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from harness.checkpoint.atomic import replace_text
from harness.config.values.json_object import JsonObject

if TYPE_CHECKING:
    import wandb
    from deepspeed.monitor.comet import CometMonitor
    from torch.utils.tensorboard import SummaryWriter


class Monitors:
    """Those of a run that are enabled; none on ranks other than 0."""

    def __init__(self, sections: Mapping[str, JsonObject], run_id: str, first_step: int) -> None:
        self._sections, self._run_id = sections, run_id
        self._tensorboard: SummaryWriter | None = None
        self._wandb: wandb.Run | None = None
        self._comet: CometMonitor | None = None
        self._tables: Path | None = None
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
            self._tables = Path(_folder(sections["csv_monitor"]))
            _cut_tables(self._tables, first_step)
        if "comet" in sections and self._comet is None:
            self._comet = _comet(sections["comet"])

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Write numbers by name, such as `train/loss`; warn where that fails, as on a full disk."""
        with _warning("TensorBoard's events"):
            for name, value in values.items():
                if self._tensorboard is not None:
                    self._tensorboard.add_scalar(name, value, step)
        if self._wandb is not None and values:
            self._wandb.log(dict(values), step=step)
        if self._comet is not None:
            self._comet.write_events([(name, value, step) for name, value in values.items()])
        with _warning("the CSV tables"):
            if self._tables is not None:
                _append(self._tables, values, step)

    def write_text(self, name: str, text: str, step: int) -> None:
        """Write a text, where one can be shown."""
        with _warning("TensorBoard's events"):
            if self._tensorboard is not None:
                self._tensorboard.add_text(name, text, step)

    def rewind(self, step: int) -> None:
        """Drop the steps after `step`."""
        self._close_tensorboard()
        with _warning("TensorBoard's events and the CSV tables"):
            self._open(step + 1)

    def close(self) -> None:
        """Write what is waiting."""
        self._close_tensorboard()
        if self._wandb is not None:
            self._wandb.finish()

    def _close_tensorboard(self) -> None:
        with _warning("TensorBoard's events"):
            if self._tensorboard is not None:
                self._tensorboard.close()


@contextmanager
def _warning(what: str) -> Iterator[None]:
    """Warn if something cannot be written: training is worth more than what shows it."""
    try:
        yield
    except OSError as error:
        warnings.warn(f"{what} cannot be written: {error.strerror or error}; training continues", stacklevel=4)


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


def _append(folder: Path, values: Mapping[str, float], step: int) -> None:
    """Add a row to the table of each value."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in values.items():
        path = folder / f"{name.replace('/', '_')}.csv"
        is_new = not path.exists()
        with path.open("a", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([["step", name.rpartition("/")[2]]] * is_new + [[step, value]])


def _cut_tables(folder: Path, first_step: int) -> None:
    """Drop the rows of `first_step` and later ones from the tables of a folder."""
    for path in folder.glob("*.csv"):
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.reader(file))
        kept = [row for row in rows if row and not (row[0].isdigit() and int(row[0]) >= first_step)]
        text = io.StringIO(newline="")
        csv.writer(text).writerows(kept)
        replace_text(path, text.getvalue())
