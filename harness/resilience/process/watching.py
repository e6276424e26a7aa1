"""The interface through which a run has its ranks watched."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.arguments import TrainingArguments
    from harness.console import Console
    from harness.topology.env import LaunchEnv
    from harness.topology.groups import Groups


class Watch:
    """Ends a run if a rank fails, hangs or is stopped. This base class does nothing."""

    def for_stopped_ranks(self, hang_seconds: float, console: Console) -> AbstractContextManager[None]:  # noqa: ARG002
        """Until the ranks have met, end the run if another process is stopped for over `hang_seconds` (0: never)."""
        return nullcontext()

    def telling_of_a_failure(self, env: LaunchEnv) -> AbstractContextManager[None]:  # noqa: ARG002
        """If the block fails before the ranks have met, tell the other ranks when this process exits."""
        return nullcontext()

    def ranks(self, args: TrainingArguments, groups: Groups, console: Console, *, on_accelerator: bool) -> None:
        """Watch the ranks from now on, until `ACTIVITY.stop_watching`; all ranks call it."""
