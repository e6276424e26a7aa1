"""The flags of the run as a whole."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import ClassVar

from harness.arguments.themes.flags import Flags, flag
from harness.errors import UserError

NONFINITE = ("stop", "skip", "warn", "rollback")


@dataclass
class RunArguments(Flags):
    """Which config to run, where to write, and what to do on faults."""

    TITLE: ClassVar[str] = "The run"

    output_dir: str = flag("runs/default", "where checkpoints, metrics and the trained model go", paths=True)
    # Programs written for HuggingFace pass output_dir by position.
    _: KW_ONLY
    deepspeed_config: Mapping[str, object] | str | None = flag(
        None, "DeepSpeed JSON: a file or a preset's name", paths=True, aliases=["deepspeed"]
    )
    do_train: bool = flag(False, "train, although --do_eval is given; without both a run trains")
    do_eval: bool = flag(
        False, "evaluate on validation_file, or on a held-out part of train_file; given alone, do not train"
    )
    resume_from_checkpoint: str | None = flag(
        None, "auto: the newest complete checkpoint in output_dir; or a checkpoint's path", paths=True
    )
    overwrite_output_dir: bool = flag(
        False, "start a new run in an output_dir that holds a run, whose checkpoints are renamed"
    )
    seed: int = flag(42, "seed of initial weights, sample order and dropout", least=0)
    data_seed: int | None = flag(None, "seed of the sample order (default: seed)", least=0)
    nonfinite: str = flag(
        "stop",
        "if a loss, gradient or weight is not finite: stop the run, skip the step, warn and continue, or rollback to "
        "the last checkpoint and leave out the batch",
        choices=NONFINITE,
    )
    hang_seconds: float = flag(
        30.0,
        "end a run of several ranks if none makes progress in a step for this many seconds, or for the time of 5 "
        "steps if that is longer; 0: never",
        least=0,
    )
    allow_ignored_keys: bool = flag(False, "run even if a key of the JSON looks like a misspelling of a known one")
    verify_plan: str = flag(
        "auto",
        "test the sharding on a tiny copy first: on, off, or auto (only for families outside the tested matrix)",
        choices=("auto", "on", "off"),
        hf_only=True,
    )

    skip_memory_check: bool = flag(
        False, "start even if parameters, gradients and optimizer states may not fit into memory", hf_only=True
    )

    @property
    def order_seed(self) -> int:
        """The seed of the sample order: `data_seed`, by default `seed`."""
        return self.seed if self.data_seed is None else self.data_seed

    @property
    def trains(self) -> bool:
        """Whether `ds-harness train` trains (otherwise it only evaluates). A program reads `do_train` itself."""
        return self.do_train if "do_train" in self.given else not self.do_eval

    def check(self) -> None:
        """Refuse an empty output_dir, and make paths absolute."""
        if not self.output_dir.strip():
            raise UserError("--output_dir is empty: give a directory")
        # The run may change its working directory.
        self.output_dir = str(Path(self.output_dir).absolute())
        # As in HuggingFace.
        if str(self.resume_from_checkpoint).lower() in ("true", "false"):
            self.resume_from_checkpoint = "auto" if str(self.resume_from_checkpoint).lower() == "true" else None
        if self.resume_from_checkpoint is not None and self.resume_from_checkpoint != "auto":
            self.resume_from_checkpoint = str(Path(self.resume_from_checkpoint).absolute())
