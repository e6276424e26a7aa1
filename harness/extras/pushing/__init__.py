"""Copy finished checkpoints and the exported model to a second place beside training, and read checkpoints back."""

from __future__ import annotations

from harness.arguments import TrainingArguments
from harness.console import Console
from harness.extras.pushing.callback import PushCallback
from harness.extras.pushing.store import Store
from harness.topology.env import LaunchEnv


def pushing(args: TrainingArguments, env: LaunchEnv, console: Console) -> PushCallback:
    """Return the callback of `--push_checkpoints_to`. UserError if rank 0 cannot write there."""
    assert args.push_checkpoints_to is not None
    store = Store.at(args.push_checkpoints_to)
    if env.rank == 0:
        store.require_writable()
    return PushCallback(store, args.output_dir, console, copies=env.rank == 0)
