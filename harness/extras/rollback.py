"""Roll back to the newest checkpoint after a step that is not finite (`--nonfinite rollback`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.checkpoint import training_state
from harness.checkpoint.integrity import newest_whole
from harness.checkpoint.resumption import chosen_by_rank_0
from harness.errors import UserError
from harness.resilience.process.activity import inside
from harness.training.engine.nonfinite import NonFiniteStep
from harness.training.prepare.run import Run
from harness.training.saving.resume import load

AT_MOST = 3
"""The run stops after this many consecutive rollbacks without progress."""


class Rollback:
    """Rolls a run back to its newest checkpoint after a non-finite step, and skips that step's samples."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._in_a_row = 0
        self._failed_at = 0

    def begin(self, save: Callable[[], object]) -> None:
        """Save the initial state if no checkpoint exists; all ranks call it."""
        if self._newest() is None:
            save()

    @contextmanager
    def guarding(self, rewind: Callable[[int], None], settle: Callable[[], None]) -> Iterator[None]:
        """Roll back if the block raises NonFiniteStep, which all ranks raise together.

        Args:
            rewind: drops what is recorded of the steps after one.
            settle: completes a pending save.
        """
        try:
            yield
        except NonFiniteStep as error:
            with inside("rolling back"):
                settle()
                self._go_back(str(error), rewind)
        else:
            if self.run.state.global_step > self._failed_at:
                self._in_a_row = 0

    def _go_back(self, reason: str, rewind: Callable[[int], None]) -> None:
        run = self.run
        state = self.run.state
        stream = self.run.stream
        assert stream is not None
        first = stream.consumed - stream.global_batch
        stop = stream.consumed
        self._in_a_row += 1
        self._failed_at = max(self._failed_at, state.global_step + 1)
        # The same samples again: skipping them has not helped.
        if self._in_a_row > AT_MOST or [first, stop] in state.skipped_samples:
            raise UserError(
                f"{reason}: training stops after {self._in_a_row - 1} rollbacks that did not help; "
                "resume with a lower learning rate or other data"
            )
        checkpoint = self._checkpoint(reason)
        state.skipped_samples.append([first, stop])
        load(run, checkpoint)
        rewind(state.global_step)
        run.console.warn(
            f"{reason}: back to {checkpoint}, step {state.global_step}; samples {first} to {stop - 1} of the training "
            "order are skipped"
        )

    def _checkpoint(self, reason: str) -> Path:
        """Return the newest checkpoint with unchanged files; all ranks call it. Raises UserError without one."""
        newest = self._newest() or self.run.checkpoint
        found, changed = training_state.first_unchanged(newest, self.run.spec.output_dir, auto=True)
        for line in changed:
            self.run.console.warn(f"{line}: ignored")
        if found is None:
            raise UserError(f"{reason}: training stops, as there is no checkpoint to go back to")
        return found

    def _newest(self) -> Path | None:
        return chosen_by_rank_0(lambda: newest_whole(self.run.spec.output_dir))
