"""The flags of evaluation and checkpoints."""

from dataclasses import dataclass
from typing import ClassVar

from harness.arguments.themes.flags import Flags, flag
from harness.arguments.themes.intervals import checked_interval
from harness.errors import UserError

STRATEGIES = ("no", "steps", "epoch")


@dataclass(kw_only=True)
class CheckpointArguments(Flags):
    """When to evaluate, when to save, and which model counts as the best."""

    TITLE: ClassVar[str] = "Evaluation and checkpoints"

    eval_strategy: str | None = flag(
        None,
        "evaluate every eval_steps steps, at the end of each epoch, or not at all (default: steps with eval_steps, "
        "else only at the end of the run)",
        choices=STRATEGIES,
        aliases=["evaluation_strategy"],
    )
    eval_steps: float | None = flag(
        None, "steps between evaluations; below 1: the fraction of all steps (default: logging_steps)"
    )
    save_strategy: str = flag(
        "steps",
        "save every save_steps steps, at the end of each epoch, at each best evaluation, or not at all",
        choices=(*STRATEGIES, "best"),
    )
    save_steps: float = flag(
        500, "steps between checkpoints; below 1: the fraction of all steps; the last step also saves one; 0: none"
    )
    save_seconds: float | None = flag(None, "also save when this many seconds have passed since the last checkpoint")
    save_total_limit: int | None = flag(
        None, "number of newest checkpoints to keep, the best one included and always kept (default: all)", least=1
    )
    save_only_model: bool = flag(False, "save only the model: smaller, but no run can resume such a checkpoint")
    push_checkpoints_to: str | None = flag(
        None, "URL (s3://, gs://, file:// and others of fsspec) to which finished checkpoints and the model are copied"
    )
    load_best_model_at_end: bool = flag(False, "save each best evaluation, and end with the weights of the best one")
    metric_for_best_model: str | None = flag(
        None, "evaluation metric that decides which model is the best (default: loss)"
    )
    greater_is_better: bool | None = flag(
        None, "whether a higher metric is better (default: unless its name is perplexity or ends with loss)"
    )
    early_stopping_patience: int | None = flag(
        None, "stop after this many evaluations in a row without a new best", least=1
    )

    @property
    def saves(self) -> bool:
        """Whether there are checkpoints."""
        if self.save_strategy == "steps":
            return self.save_steps > 0 or self.save_seconds is not None
        return self.save_strategy != "no"

    @property
    def evaluates(self) -> bool:
        """Whether there are evaluations before the end of the run."""
        return self.evaluation_strategy != "no"

    @property
    def evaluation_strategy(self) -> str:
        """When to evaluate during training: no, steps or epoch."""
        # In HuggingFace's Trainer, eval_steps alone has no effect.
        return self.eval_strategy or ("steps" if self.eval_steps else "no")

    @property
    def best_metric_name(self) -> str:
        """The metric that decides which model is the best, without the prefix `eval_`."""
        return (self.metric_for_best_model or "loss").removeprefix("eval_")

    @property
    def higher_is_better(self) -> bool:
        """Whether a higher value of that metric is better."""
        name = self.best_metric_name
        return not name.endswith(("loss", "perplexity")) if self.greater_is_better is None else self.greater_is_better

    def check(self) -> None:
        """Refuse contradictory flags and invalid intervals."""
        if self.eval_steps is not None:
            self.eval_steps = checked_interval("eval_steps", self.eval_steps)
        self.save_steps = checked_interval("save_steps", self.save_steps, least=0)
        if self.save_seconds is not None and not self.save_seconds > 0:
            raise UserError(f"--save_seconds {self.save_seconds}: must be above 0")
        if self.save_seconds is not None and self.save_strategy == "no":
            raise UserError("--save_seconds and --save_strategy no contradict each other: give only one of them")
        needs_evaluation = {
            "--early_stopping_patience": self.early_stopping_patience,
            "--load_best_model_at_end": self.load_best_model_at_end,
            "--save_strategy best": self.save_strategy == "best",
        }
        for name, wanted in needs_evaluation.items():
            if wanted and not self.evaluates:
                raise UserError(f"{name} needs evaluations during training: set --eval_strategy or --eval_steps")
        # The best weights are read back from their checkpoint: memory holds only the last ones.
        if self.load_best_model_at_end and not self.saves:
            raise UserError("--load_best_model_at_end needs checkpoints: set --save_steps, or --save_strategy best")
