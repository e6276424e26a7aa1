"""What a run calls to have its ranks watched."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.arguments import TrainingArguments
    from harness.console import Console
    from harness.topology.env import LaunchEnv
    from harness.topology.groups import Groups


class Watch:
    """Ends a run of which a rank fails, hangs or is stopped; this class watches nothing, its subclass does."""

    def for_stopped_ranks(self, hang_seconds: float, console: Console) -> AbstractContextManager[None]:  # noqa: ARG002
        """End the run if another process of this launch is stopped for longer than `hang_seconds` (0: never).

        For the time before the ranks have met.
        """
        return nullcontext()

    def telling_of_a_failure(self, env: LaunchEnv) -> AbstractContextManager[None]:  # noqa: ARG002
        """Tell the other ranks, when this process exits, if the block has failed before they met."""
        return nullcontext()

    def ranks(self, args: TrainingArguments, groups: Groups, console: Console, *, on_accelerator: bool) -> None:
        """Watch the ranks from now on, until `ACTIVITY.stop_watching`. A collective."""
