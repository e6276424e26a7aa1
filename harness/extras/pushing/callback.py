"""The callback that copies what a run writes to a second place (`--push_checkpoints_to`); rank 0 alone copies."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Unpack

from harness.arguments import TrainingArguments
from harness.atomic import replace_text
from harness.checkpoint.directories import MANIFEST, RUN, read_manifest
from harness.checkpoint.integrity import damage, newest_whole
from harness.config.values.json_file import object_or_empty, read_object
from harness.config.values.json_object import JsonObject
from harness.config.values.pointers import lookup
from harness.console import Console
from harness.errors import UserError
from harness.extras.pushing.read_back import read_back
from harness.extras.pushing.store import CANNOT, MARKER, Store, marker, why
from harness.extras.pushing.uploads import Outcome, Upload, Uploads
from harness.resilience.process.activity import beat
from harness.topology.agreement import any_rank
from harness.training.callbacks import MomentValues, TrainerControl, TrainerState
from harness.training.parts import PushingCallback

FOLDER = "pushing-"
"""How the names of folders begin that hold links to the files of a checkpoint while it is copied."""
OF_A_MODEL = (".safetensors", ".json", ".jinja", ".model", ".txt", ".tiktoken")
TURN_S = 5.0
NAME_OF_MODEL = "the model"


class PushCallback(PushingCallback):
    """Copies each finished checkpoint in the background, and the exported model at the end."""

    reads_weights = False

    def __init__(self, store: Store, output_dir: str, console: Console, *, copies: bool) -> None:
        self.store = store
        self._output_dir = Path(output_dir).absolute()
        self._console = console
        self._copies = copies  # whether this is rank 0
        self._uploads: Uploads | None = None  # on rank 0, once training begins
        self._earlier = _rows(self._output_dir, store) if copies else {}  # before `run.json` is written anew
        self._complete: list[JsonObject] = []
        self._failed: list[JsonObject] = []

    def read_back(self, wanted: str | Path | bool) -> None:
        """Read the checkpoint that a run resumes back to `output_dir`, if that has lost it."""
        if not self._copies:
            return
        if wanted in ("auto", True):
            read_back(self.store, self._output_dir, self._console)
            return
        path = Path(str(wanted)).absolute()
        if path.parent != self._output_dir or damage(path) is None:  # another run's, or nothing is lost
            return
        if read_back(self.store, self._output_dir, self._console, path.name) is None:
            raise UserError(f"--resume_from_checkpoint {wanted}: no whole checkpoint there, nor in {self.store.url}")

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Unpack[MomentValues]
    ) -> None:
        """Find out what the store has; copy the newest checkpoint if an earlier process has not completed that."""
        if not self._copies:
            return
        output_dir = self._output_dir
        for left in output_dir.glob(f"{FOLDER}*"):
            shutil.rmtree(left, ignore_errors=True)
        self._uploads = self._uploads or Uploads(self.store)
        if state.global_step == 0:
            return
        names: list[str] = []
        with suppress(CANNOT):  # then the newest is copied once more
            names = [name for _, name in self.store.checkpoints()]
        self._complete = [self._earlier.get(name, {"name": name}) for name in reversed(names)]
        newest = newest_whole(output_dir)
        if newest is not None and newest.name not in names:
            self._push(newest)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Unpack[MomentValues]
    ) -> None:
        """Begin to copy the checkpoint."""
        self._push(kwargs["checkpoint"])
        self._report()

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Unpack[MomentValues]
    ) -> None:
        """Report what has been copied."""
        self._report()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Unpack[MomentValues]
    ) -> None:
        """Wait for the last copy, also after a signal: the end of its grace period leaves an incomplete copy behind."""
        if self._uploads is not None and not self._uploads.is_idle:
            self._console.say(f"copying the last checkpoint to {self.store.url}")
        self._wait()

    def copy_model(self, directory: Path) -> None:
        """Copy an exported model to the store itself, and wait for it; all ranks call it."""
        self._wait()  # else a checkpoint that waits would be left out for the model
        if self._uploads is not None:
            self._push_model(self._uploads, directory)
        self._wait()

    def _push_model(self, uploads: Uploads, directory: Path) -> None:
        sizes = {
            path.relative_to(directory).as_posix(): path.stat().st_size
            for folder in (directory, directory / "base_model")
            for path in sorted(folder.glob("*"))
            if path.suffix in OF_A_MODEL and path.name not in (RUN, MARKER)
        }
        staged = directory / f"{FOLDER}model"
        try:
            _link(directory, staged, list(sizes))
            (staged / MARKER).write_text(marker(sizes), encoding="utf-8")
        except OSError as error:
            shutil.rmtree(staged, ignore_errors=True)
            self._record([Outcome(name="", problem=why(error))], directory)
            return
        uploads.add(Upload(name="", folder=staged, files=[*sizes, MARKER]))

    def _push(self, checkpoint: Path) -> None:
        if self._uploads is None:
            return
        files = [*sorted(read_manifest(checkpoint).files), MANIFEST]
        staged = checkpoint.with_name(f"{FOLDER}{checkpoint.name}")
        try:
            _link(checkpoint, staged, files)
        except OSError as error:  # the run's own limit of checkpoints may delete it at any time
            self._record([Outcome(name=checkpoint.name, problem=why(error))], checkpoint.parent)
            return
        self._uploads.add(Upload(name=checkpoint.name, folder=staged, files=files))

    def _wait(self) -> None:
        """Wait until nothing is being copied; all ranks call it.

        They wait in turns of a few seconds: rank 0 may take longer than a collective lets the others wait, and longer
        than the watch lets a rank go without progress.
        """
        while any_rank(self._uploads is not None and not self._uploads.wait(TURN_S)):
            beat("waiting for the last copy")
        self._report()

    def _report(self) -> None:
        if self._uploads is not None and (outcomes := self._uploads.outcomes()):
            self._record(outcomes, self._output_dir)

    def _record(self, outcomes: list[Outcome], output_dir: Path) -> None:
        """Tell the user of copies, and list them in `run.json`."""
        for outcome in outcomes:
            name = outcome.name or NAME_OF_MODEL
            if outcome.problem is None:
                row = {"name": name, "bytes": outcome.nbytes, "seconds": round(outcome.seconds, 3)}
                self._complete = [*(each for each in self._complete if each["name"] != name), row]
                self._console.say(f"{name} copied to {self.store.url}")
            else:
                self._failed.append({"name": name, "problem": outcome.problem})
                self._console.warn(f"{name} not copied to {self.store.url}: {outcome.problem}; training continues")
        with suppress(OSError, ValueError):  # a file that somebody has replaced is not worth an error
            content = read_object(output_dir / RUN)
            content["pushed"] = {"to": self.store.url, "complete": self._complete, "failed": self._failed}
            replace_text(output_dir / RUN, json.dumps(content, indent=2) + "\n")


def _rows(output_dir: Path, store: Store) -> dict[str, JsonObject]:
    """Return what the `run.json` of an earlier process says of each complete copy in the store, by its name."""
    about = object_or_empty(output_dir / RUN)
    rows = lookup(about, "/pushed/complete") if lookup(about, "/pushed/to") == store.url else None
    # somebody may have edited the file
    named = [row for row in rows if isinstance(row, dict) and "name" in row] if isinstance(rows, list) else []
    return {str(row["name"]): row for row in named}


def _link(folder: Path, into: Path, names: list[str]) -> None:
    """Link files of a folder into a new one: they stay if the folder is deleted. OSError if that fails."""
    shutil.rmtree(into, ignore_errors=True)
    for name in names:
        (into / name).parent.mkdir(parents=True, exist_ok=True)
        try:
            (into / name).hardlink_to(folder / name)
        except OSError:  # a file system without hard links
            shutil.copyfile(folder / name, into / name)
