"""The watch of a run, as the core calls it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from harness.console import Console
from harness.resilience.process.watching import Watch
from harness.resilience.watch.meeting import telling_of_a_failure, watching_for_stopped_ranks
from harness.topology.env import LaunchEnv

if TYPE_CHECKING:
    from harness.arguments import TrainingArguments
    from harness.topology.groups import Groups


class RankWatch(Watch):
    """Watches the ranks: before they meet by the states of their processes, then by a thread on each rank."""

    def for_stopped_ranks(self, hang_seconds: float, console: Console) -> AbstractContextManager[None]:
        """See `watching_for_stopped_ranks`."""
        return watching_for_stopped_ranks(hang_seconds, console)

    def telling_of_a_failure(self, env: LaunchEnv) -> AbstractContextManager[None]:
        """See `meeting.telling_of_a_failure`."""
        return telling_of_a_failure(env)

    def ranks(self, args: TrainingArguments, groups: Groups, console: Console, *, on_accelerator: bool) -> None:
        """See `watch_run`."""
        from harness.resilience.watch.watcher import watch_run  # imports torch, which the script does not wait for

        watch_run(args, groups, console, on_accelerator=on_accelerator)
