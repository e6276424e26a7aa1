"""Copy finished checkpoints and the exported model to a second place beside training, and read checkpoints back."""

from __future__ import annotations

from pathlib import Path

from harness.arguments import TrainingArguments
from harness.console import Console
from harness.extras.pushing.callback import PushCallback
from harness.extras.pushing.read_back import read_back
from harness.extras.pushing.store import Store
from harness.topology.env import LaunchEnv


def pushing(args: TrainingArguments, env: LaunchEnv, console: Console) -> PushCallback:
    """Return the callback of `--push_checkpoints_to`.

    Rank 0 finds out first whether it may write there, and reads back the newest checkpoint if `output_dir` has lost it
    and the run resumes `auto`. Raises UserError if the store cannot be used.
    """
    assert args.push_checkpoints_to is not None
    store = Store.at(args.push_checkpoints_to)
    if env.rank == 0:
        store.require_writable()
        if args.resume_from_checkpoint == "auto":
            read_back(store, Path(args.output_dir), console)
    return PushCallback(store, console)
