"""The flags of scripts/train.py alone; the Trainer gets model and data as objects instead."""

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import ClassVar

from harness.arguments.themes.flags import Flags, flag
from harness.errors import UserError
from harness.hf.locate import DEFAULT_MODEL

PYTHON_STDLIB = "python-stdlib"
HELD_OUT_PERCENT = 5  # of train_file, if nothing else is said


@dataclass(kw_only=True)
class ScriptArguments(Flags):
    """The model and the data, as in run_clm.py."""

    TITLE: ClassVar[str] = "Model and data"

    model_name_or_path: str = flag(
        DEFAULT_MODEL,
        "a preset's name, a directory with HuggingFace's config.json, or an id of the hub",
        paths=True,
    )
    model_revision: str | None = flag(None, "branch, tag or commit of a model of the hub (default: main)")
    tokenizer_name: str | None = flag(
        None,
        "bytes, a directory, or an id of the hub (default: the model directory's tokenizer; bytes for a model without "
        "weights)",
        paths=True,
    )
    train_file: list[str] = flag(
        [PYTHON_STDLIB],
        "plain text, or rows (text; messages; prompt and completion; ShareGPT; Alpaca) in files such as .jsonl, .csv, "
        ".parquet; directories or globs of them; Megatron's or nanotron's token files; several with weights as "
        "a.jsonl:0.7 b/:0.3",
        paths=True,
    )
    validation_file: list[str] | None = flag(
        None,
        "evaluation data, in the same formats (default: with eval_steps, a part of train_file is held out)",
        paths=True,
    )
    validation_split_percentage: float | None = flag(
        None,
        "percentage of train_file to hold out for evaluation; below 1: a fraction "
        f"(default: {HELD_OUT_PERCENT} with eval_steps)",
    )
    preview_samples: int = flag(
        0, "print this many samples of train_file, with the tokens in the loss between [[ and ]], and do not train"
    )

    def holds_out(self, *, evaluates: bool) -> bool:
        """Return whether a part of train_file is held out if there is no validation_file.

        Args:
            evaluates: whether there are evaluations, during training or alone.
        """
        return evaluates or self.validation_split_percentage is not None

    streaming: bool = flag(
        False, "read and tokenise train_file while training, shuffled by shuffle_buffer_size; needs max_steps"
    )

    def check(self) -> None:
        """Refuse a revision of a local model, a run that does nothing, and a split without effect."""
        if self.model_revision and (Path(self.model_name_or_path).exists() or "/" not in self.model_name_or_path):
            raise UserError(
                f"--model_revision {self.model_revision}: only models of the hub have revisions, but "
                f"--model_name_or_path is {self.model_name_or_path}"
            )
        if self.preview_samples < 0:
            raise UserError(f"--preview_samples {self.preview_samples}: must be 0 or more")
        percentage = self.validation_split_percentage
        if percentage is None:
            return
        if not 0 < percentage < 100:
            raise UserError(f"--validation_split_percentage {percentage}: must be above 0 and below 100")
        if self.validation_file is not None:
            raise UserError("--validation_split_percentage and --validation_file are both given: give only one")

    @property
    def held_out(self) -> Fraction:
        """The fraction of train_file that is held out, if any is."""
        given = Fraction(str(self.validation_split_percentage or HELD_OUT_PERCENT))
        return given if given < 1 else given / 100

    @property
    def model(self) -> str:
        """The model's name for the Trainer: NAME, or ID@REVISION."""
        return self.model_name_or_path + (f"@{self.model_revision}" if self.model_revision else "")
