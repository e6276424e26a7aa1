"""React to a non-finite loss, gradient or weight: `--nonfinite stop`, `skip`, `warn` or `rollback`.

Except with `warn`, the engine has already skipped the update, on all ranks, as they have the same norm: see
`harness/deepspeed/update.py`.

A step that fp16's dynamic loss scaling skips while the loss is finite is normal and always allowed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite

from torch import Tensor

from harness.checkpoint.tensors.not_saved import NotSaved
from harness.console import Console
from harness.deepspeed.engine import scales_loss_dynamically
from harness.deepspeed.zero3_parameters import held_values
from harness.errors import UserError
from harness.parallel.host import numbers
from harness.topology.agreement import all_gather_object, any_rank, spell_ranks
from harness.training.engine.engine import Engine, Evidence, StepOutcome
from harness.wording import counted


class NonFiniteStep(UserError):
    """A step or its new weights are not finite, and the run must roll back (`--nonfinite rollback`)."""


class NonFinite:
    """Applies the policy to non-finite steps; all ranks reach the same decision.

    Attributes:
        skipped: number of steps that changed no weight because they were not finite.
    """

    def __init__(self, policy: str, console: Console) -> None:
        self.policy = policy
        self.console = console
        self.skipped = 0

    def judge(self, step: int, outcome: StepOutcome, engine: Engine) -> None:
        """Check a step's outcome; all ranks call it. Raises UserError with `stop`, NonFiniteStep with `rollback`."""
        lost = not isfinite(outcome.loss)
        # With dynamic loss scaling (fp16), gradients overflow by design: DeepSpeed skips the step and lowers the scale.
        overflow = not outcome.finite_gradient and not scales_loss_dynamically(engine.deepspeed.optimizer)
        if not lost and not overflow:
            return
        # Loss and gradient norm are equal on all ranks, so all ranks come here: else the gather would hang.
        seen = all_gather_object(engine.evidence())
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
        """Report how many of the run's steps were skipped."""
        if self.skipped:
            self.console.warn(f"skipped {self.skipped} of {counted(steps, 'step')}: loss or gradient was not finite")

    def judge_evaluation(self, loss: float) -> None:
        if not isfinite(loss):
            self.console.warn(f"the evaluation loss is {loss}")

    def judge_weights(self, engine: Engine, target: str) -> None:
        """Check the weights before they are written to `target`; all ranks call it.

        Raises:
            UserError: with `stop`.
            NonFiniteStep: with `rollback`.
            NotSaved: with `skip` and `warn`.
        """
        engine.settle()
        bad = _not_finite({n: p for n, p in engine.deepspeed.module.named_parameters() if p.requires_grad})
        if not any_rank(bad is not None):
            return
        rank, name = next((rank, name) for rank, name in enumerate(all_gather_object(bad)) if name is not None)
        text = f"{name} is not finite (rank {rank})"
        # Never written, as a new checkpoint may cause an older good one to be deleted.
        if self.policy == "stop":
            raise UserError(f"{text}: {target} is not written; resume from an older checkpoint")
        if self.policy == "rollback":
            raise NonFiniteStep(f"{text} after the last step")
        raise NotSaved(f"{text}: {target} is not written")


def _not_finite(parameters: Mapping[str, Tensor]) -> str | None:
    """Return the name of a parameter with a non-finite value on this rank (under ZeRO-3, in its partition), or None."""
    held = {name: held_values(parameter) for name, parameter in parameters.items()}
    held = {name: values for name, values in held.items() if not values.is_meta and values.device.type != "meta"}
    # First check the sums, with one wait for the device, in a tenth of the time of isfinite(). A sum of finite values
    # can overflow, so check suspects exactly.
    sums = numbers([values.sum() for values in held.values()])
    suspects = (values for values, total in zip(held.items(), sums, strict=True) if not isfinite(total))
    return next((name for name, values in suspects if not values.isfinite().all()), None)


def origin(seen: Sequence[Evidence], *, loss: bool) -> str:
    """Name the stage where values first became non-finite, and its ranks."""
    last = max(each.stage for each in seen)
    if loss:
        # The first stage that sent non-finite activations, or the last stage if none did.
        stage = min((each.stage for each in seen if not each.outputs), default=last)
        ranks = [each.rank for each in seen if each.stage == stage and not (each.outputs and each.loss)]
    else:
        # The lowest stage that received finite gradients, as backward passes go from the last stage to the first.
        got = {each.stage for each in seen if not each.gradients}
        stage = min(set(range(last + 1)) - got, default=last)
        ranks = []
    ranks = ranks or [each.rank for each in seen if each.stage == stage]
    return f"first on stage {stage}, {spell_ranks(ranks)}"
