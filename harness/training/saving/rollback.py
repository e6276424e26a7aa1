"""`--nonfinite rollback`: go back to the last good checkpoint, in the same processes, and leave out the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from harness.checkpoint import training_state
from harness.checkpoint.integrity import newest_whole
from harness.data.batches.stream import BatchStream
from harness.errors import UserError
from harness.resilience.process.activity import inside
from harness.topology.agreement import values_of_all
from harness.training.callbacks import TrainerState
from harness.training.nonfinite import NonFiniteStep
from harness.training.recording.recorder import Recorder
from harness.training.run import Run
from harness.training.saving.resume import load

AT_MOST = 3
"""Rollbacks in a row after which the run is not a step further."""


class Rollback:
    """Takes a run back."""

    def __init__(self, run: Run, state: TrainerState, stream: BatchStream | None) -> None:
        self.run, self.state, self.stream = run, state, stream
        self._in_a_row, self._failed_at = 0, 0
        if stream is not None:
            stream.skipped = state.skipped_samples

    def begin(self, save: Callable[[], object]) -> None:
        """Save what the training begins with, if that is what there would be to go back to; all ranks call it."""
        if self.run.args.nonfinite == "rollback" and self._newest() is None:
            save()

    @contextmanager
    def guarding(self, recorder: Recorder, settle: Callable[[], None]) -> Iterator[None]:
        """Go back if the block finds what is not finite; all ranks do.

        `settle` ends a save that goes on beside the training.
        """
        try:
            yield
        except NonFiniteStep as error:
            with inside("rolling back"):
                settle()
                self._go_back(str(error), recorder)
        else:
            if self.state.global_step > self._failed_at:
                self._in_a_row = 0

    def _go_back(self, reason: str, recorder: Recorder) -> None:
        assert self.stream is not None
        run, state = self.run, self.state
        first, stop = self.stream.consumed - self.stream.global_batch, self.stream.consumed
        self._in_a_row += 1
        self._failed_at = max(self._failed_at, state.global_step + 1)
        if self._in_a_row > AT_MOST or [first, stop] in state.skipped_samples:
            raise UserError(
                f"{reason}: training stops after {self._in_a_row - 1} rollbacks that did not help; "
                "resume with a lower learning rate or other data"
            )
        checkpoint = self._checkpoint(reason)
        state.skipped_samples.append([first, stop])
        load(run, checkpoint, state, self.stream)
        recorder.rewind(state.global_step)
        run.console.warn(
            f"{reason}: back to {checkpoint}, step {state.global_step}; samples {first} to {stop - 1} of the order "
            "are left out from now on"
        )

    def _checkpoint(self, reason: str) -> Path:
        """Return the newest checkpoint whose files are what was saved; all ranks call it."""
        newest = self._newest() or self.run.checkpoint
        found, changed = training_state.first_unchanged(newest, self.run.output_dir, auto=True)
        for line in changed:
            self.run.console.warn(f"{line}: ignored")
        if found is None:
            raise UserError(f"{reason}: training stops, as there is no checkpoint to go back to")
        return found

    def _newest(self) -> Path | None:
        """Return the newest checkpoint as rank 0 sees it, as a shared folder may look different from each host."""
        return values_of_all(newest_whole(self.run.output_dir) if dist.get_rank() == 0 else None)[0]
