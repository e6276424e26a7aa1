"""The training script of a launch: how to resume it, and which layouts it accepts. No torch here."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from harness.arguments import LoraArguments, TrainingArguments, expanded, parse
from harness.arguments.configure import read_config, read_run_config
from harness.arguments.themes.script import ScriptArguments
from harness.checkpoint.atomic import replace_text
from harness.checkpoint.directories import MANIFEST, METRICS, numbered, set_aside
from harness.checkpoint.integrity import newest_whole
from harness.errors import UserError
from harness.hf.locate import model_directory
from harness.resilience.process.launcher import RESUME, with_resume
from harness.topology.layout import Layout, divisors

ACCUMULATION = "gradient_accumulation_steps"
KINDS = (ScriptArguments, TrainingArguments, LoraArguments)
CONFIG = "config-of-restart.json"  # in the output directory
HANG_S = 30.0  # --hang_seconds of a script with arguments of its own


@dataclass(frozen=True, kw_only=True)
class Start:
    """A command line of the script, for a number of ranks.

    Attributes:
        layout: None if unknown, as for a script with arguments of its own.
    """

    words: tuple[str, ...]
    ranks: int
    layout: Layout | None = None

    def __str__(self) -> str:
        ranks = f"{self.ranks} rank{'s' * (self.ranks > 1)}"
        return f"{self.layout} on {ranks}" if self.layout else ranks


class Script:
    """A script and its arguments, which are parsed if they are those of `scripts/train.py`."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = self.plain = tuple(words)  # as typed, and with the flags of config files in place
        self.args: TrainingArguments | None = None
        self._earlier: frozenset[tuple[int, int]] | None = None  # None: the folder held no run
        if {"-h", "--help"} & set(words):
            return
        try:
            given = parse(KINDS, words[1:], prog="", description="", epilog="")
            self.plain = (words[0], *expanded(KINDS, words[1:]))
        except (UserError, SystemExit):
            pass  # the ranks will report the error; or the script has arguments of its own
        else:
            self.model, self.args = given[0].model, given[1]
        self._earlier = _earlier_checkpoints(self._folder())

    @property
    def earlier(self) -> tuple[tuple[int, int], ...] | None:
        """The identities of the checkpoints that the folder held before the run; None if it held no run."""
        return None if self._earlier is None else tuple(sorted(self._earlier))

    @earlier.setter
    def earlier(self, identities: Sequence[tuple[int, int]] | None) -> None:
        self._earlier = None if identities is None else frozenset(identities)

    @property
    def is_known(self) -> bool:
        """Whether it is the harness's own. Another script may set variables before its imports: no standby for it."""
        own = Path(__file__).resolve().parents[2] / "scripts" / "train.py"
        return self.words[0] == "harness.train" or Path(self.words[0]).resolve() == own

    @property
    def output_dir(self) -> Path | None:
        """The output directory; None if unknown."""
        return None if self.args is None else Path(self.args.output_dir).absolute()

    @property
    def hang_seconds(self) -> float:
        """Seconds without progress after which the run is ended; 0: never."""
        return HANG_S if self.args is None else self.args.hang_seconds

    def require_resumable(self) -> None:
        """Raise UserError if the checkpoints of this run cannot be resumed."""
        if self.args is not None and self.args.save_only_model:
            raise UserError("--max_restarts: no run can go on from the checkpoints of --save_only_model: remove one")

    def first(self, ranks: int) -> Start:
        """Return the start as the user typed it."""
        return Start(words=self.words, ranks=ranks)

    def again(self, start: Start) -> Start:
        """Return the start from the newest checkpoint that this launch has saved.

        Before there is one, return `start` itself: `auto` would find a checkpoint of an earlier run.
        """
        folder, wanted = self._folder(), self._resumed()
        if wanted != "auto" and (wanted is not None or self._earlier is not None) and folder and not self._has_saved():
            if wanted is not None and Path(wanted).resolve().parent != folder.resolve():
                set_aside(folder / METRICS)  # else the folder would seem to hold another run
            return start
        return Start(words=tuple(with_resume(start.words)), ranks=start.ranks, layout=start.layout)

    def _folder(self) -> Path | None:
        """Return the output directory, also of another script with an --output_dir flag."""
        if self.args is not None:
            return self.output_dir
        given = value_of(self.words, "--output_dir")
        return None if given is None else Path(given).absolute()

    def _resumed(self) -> str | None:
        return value_of(self.words, RESUME) if self.args is None else self.args.resume_from_checkpoint

    def _has_saved(self) -> bool:
        """Whether this launch has saved a checkpoint."""
        folder = self._folder()
        newest = newest_whole(folder) if folder is not None else None
        return newest is not None and _identity(newest) not in (self._earlier or ())

    def on_fewer(self, wanted: int, ranks: int) -> Start | None:
        """Return the start on at most `ranks` ranks with the same global batch; None if no layout fits.

        The tensor-parallel size is kept as long as possible, then the number of stages.
        """
        if self.args is None:
            return None
        try:
            resolved = read_run_config(self.args, world_size=wanted, model=self._model()).resolved
        except UserError:
            return None
        sizes = {name: getattr(resolved, name) for name in ("pp_size", "tp_size", "ep_size", "cp_size")}
        whole = Layout.from_world(wanted, **sizes)
        words = self._with_open_accumulation()
        for layout in _smaller(whole, ranks):
            flags = _flags(layout, whole, resolved.train_batch)
            kept = without(words, set(flags))
            other = Script((*kept, *(word for pair in flags.items() for word in pair)))
            if other.accepts(layout):
                return Start(words=other.words, ranks=layout.world_size, layout=layout)
        return None

    def _with_open_accumulation(self) -> list[str]:
        """Return the words without gradient accumulation steps, which then follow from the global batch.

        A config that states them is copied into the output directory, with "auto" in their place.
        """
        assert self.args is not None and self.output_dir is not None
        words = without(self.plain, {"--gradient_accumulation_steps"})
        config = read_config(self.args.deepspeed_config).data
        if config.get(ACCUMULATION, "auto") == "auto":
            return words
        copy = self.output_dir / CONFIG
        try:
            copy.parent.mkdir(parents=True, exist_ok=True)
            replace_text(copy, json.dumps({**config, ACCUMULATION: "auto"}, indent=2) + "\n")
        except OSError as error:
            raise UserError(f"{copy}: cannot be written: {error.strerror}") from error
        return [*without(words, {"--deepspeed_config"}), "--deepspeed_config", str(copy)]

    def accepts(self, layout: Layout) -> bool:
        """Whether the config passes the checks of a run in this layout."""
        if self.args is None:
            return False
        try:
            read_run_config(self.args, world_size=layout.world_size, model=self._model())
        except UserError:
            return False
        return True

    def _model(self) -> str:
        return str(model_directory(self.model))


def _smaller(whole: Layout, ranks: int) -> Iterator[Layout]:
    """Yield the layouts for at most `ranks` ranks, the best one first."""
    for tp_size, cp_size in product(reversed(divisors(whole.tp_size)), reversed(divisors(whole.cp_size))):
        for pp_size in range(whole.pp_size, 0, -1):
            for readers in range(min(ranks // (tp_size * pp_size * cp_size), whole.world_size), 0, -1):
                dp_size = readers * cp_size
                neighbours = max(size for size in divisors(dp_size) if size <= whole.ep_data_size)
                ep_size = tp_size * neighbours if whole.ep_size > 1 else 1
                yield Layout(pp_size=pp_size, tp_size=tp_size, dp_size=dp_size, ep_size=ep_size, cp_size=cp_size)


def _flags(layout: Layout, whole: Layout, batch: int) -> dict[str, str]:
    """Return the flags that set a layout in the place of the `whole` run's, and keep the batch."""
    sizes = {"pipeline": layout.pp_size, "tensor": layout.tp_size}
    if whole.ep_size > 1:
        sizes["expert"] = layout.ep_size
    if whole.cp_size > 1:
        sizes["context"] = layout.cp_size
    flags = {f"--{axis}_parallel_size": str(size) for axis, size in sizes.items()}
    return {**flags, "--global_batch_size": str(batch)}


def _earlier_checkpoints(folder: Path | None) -> frozenset[tuple[int, int]] | None:
    """Return the identities of the checkpoints in a folder; None if it holds no run."""
    if folder is None or not ((folder / METRICS).exists() or numbered(folder)):
        return None
    return frozenset(_identity(path) for _, path in numbered(folder))


def _identity(checkpoint: Path) -> tuple[int, int]:
    with suppress(OSError):
        found = (checkpoint / MANIFEST).stat()
        return found.st_ino, found.st_mtime_ns
    return 0, 0


def value_of(words: Sequence[str], flag: str) -> str | None:
    """Return the last value of a flag among words; None without one."""
    found = None
    for word, following in zip(words, [*words[1:], None], strict=True):
        name, equals, value = word.partition("=")
        if name == flag:
            found = value if equals else following
    return found


def without(words: Sequence[str], flags: set[str]) -> list[str]:
    """Return the words without these flags and their values."""
    kept: list[str] = []
    skips = False
    for word in words:
        name, equals, _ = word.partition("=")
        if not skips and name not in flags:
            kept.append(word)
        skips = name in flags and not equals
    return kept
