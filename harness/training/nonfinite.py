"""What follows where a loss, a gradient or a weight is not finite: `--nonfinite stop`, `skip`, `warn` or `rollback`.

What fp16's dynamic loss scaling skips while the loss is finite is its way of working, and always allowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

from torch import Tensor

from harness.checkpoint.background_save import NotSaved
from harness.console import Console
from harness.deepspeed.zero3_parameters import held_tensor
from harness.errors import UserError
from harness.resilience.process.distributed import any_rank
from harness.topology.agreement import spell_ranks, values_of_all
from harness.training.engine.engine import Engine, Evidence, StepOutcome
from harness.wording import counted


class NonFiniteStep(UserError):
    """A step, or the weights after it, are not finite, and the run is to go back (`--nonfinite rollback`)."""


class NonFinite:
    """Decides, alike on all ranks, what follows from a step whose loss or gradient is not finite.

    Attributes:
        skipped: steps that changed nothing for that reason.
    """

    def __init__(self, policy: str, console: Console) -> None:
        self.policy = policy
        self.console = console
        self.skipped = 0

    def judge(self, step: int, outcome: StepOutcome, engine: Engine) -> None:
        """Judge what came out of a step; all ranks call it. UserError with `stop`, NonFiniteStep with `rollback`."""
        lost = not isfinite(outcome.loss)
        overflow = not outcome.finite_gradient and not engine.scales_loss
        if not lost and not overflow:
            return
        seen = values_of_all(engine.evidence())
        what = f"the loss is {outcome.loss}" if lost else "the gradient is not finite, although the loss is"
        text = f"step {step}: {what} ({origin(seen, loss=lost)})"
        if self.policy == "stop":
            raise UserError(
                f"{text}: training stops, the step changed no weight and no model is exported; resume from the last "
                "checkpoint with a lower learning rate or other data, or set --nonfinite skip"
            )
        if self.policy == "rollback":
            raise NonFiniteStep(text)
        self.skipped += not outcome.applied
        self.console.warn(f"{text}: {'the weights were updated' if outcome.applied else 'the step is skipped'}")

    def summary(self, steps: int) -> None:
        """Report at the end how many of the run's steps were skipped."""
        if self.skipped:
            self.console.warn(f"skipped {self.skipped} of {counted(steps, 'step')}: loss or gradient was not finite")

    def judge_evaluation(self, loss: float) -> None:
        """Report an evaluation whose loss is not finite."""
        if not isfinite(loss):
            self.console.warn(f"the evaluation loss is {loss}")

    def judge_weights(self, engine: Engine, target: str) -> None:
        """Look at the weights before they are written to `target`; all ranks call it.

        Where one is not finite they are not written, as good ones might have to make room: UserError with `stop`,
        NonFiniteStep with `rollback`, else NotSaved.
        """
        parameters = engine.deepspeed.module.named_parameters()
        bad = next((name for name, p in parameters if p.requires_grad and not _finite(p)), None)
        if not any_rank(bad is not None, engine.device):
            return
        rank, name = next((rank, name) for rank, name in enumerate(values_of_all(bad)) if name is not None)
        text = f"{name} is not finite (rank {rank})"
        if self.policy == "stop":
            raise UserError(f"{text}: {target} is not written; resume from an older checkpoint")
        if self.policy == "rollback":
            raise NonFiniteStep(f"{text} after the last step")
        raise NotSaved(f"{text}: {target} is not written")


def _finite(parameter: Tensor) -> bool:
    """Whether what this rank holds of a parameter is finite; under ZeRO-3 that is its part."""
    held = held_tensor(parameter).detach()
    if held.is_meta or held.device.type == "meta":
        return True
    if held.sum().isfinite():  # takes a tenth of the time, but a sum of finite values may overflow
        return True
    return bool(held.isfinite().all())


def origin(seen: Sequence[Evidence], *, loss: bool) -> str:
    """Return the stage where something first was not finite, with its ranks, in words.

    Forward, that is the first stage that handed on such values, or the last one if none did. Backward, it is the last
    stage that passed on other gradients than it got: the lowest one that got finite ones.
    """
    last = max(each.stage for each in seen)
    if loss:
        stage = min((each.stage for each in seen if not each.outputs), default=last)
        ranks = [each.rank for each in seen if each.stage == stage and not (each.outputs and each.loss)]
    else:
        got = {each.stage for each in seen if not each.gradients}
        stage = min(set(range(last + 1)) - got, default=last)
        ranks = []
    ranks = ranks or [each.rank for each in seen if each.stage == stage]
    return f"first on stage {stage}, {spell_ranks(ranks)}"
