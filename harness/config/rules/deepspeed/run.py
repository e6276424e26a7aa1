"""Rules that hold a config against the arguments of a run. `resolve` raises them, since only it knows both."""

from __future__ import annotations

from collections.abc import Iterator

from harness.config.diagnostic import Severity
from harness.config.rules.rule import Finding, rule
from harness.config.view import RunView


@rule(
    "DS951",
    "argument-in-conflict",
    Severity.ERROR,
    claim="elsewhere",
    wrong='{"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0}',
    right='{"train_micro_batch_size_per_gpu": 1, "gradient_clipping": "auto"}',
    arguments={"max_grad_norm": 0.5},
)
def argument_in_conflict(view: RunView) -> Iterator[Finding]:
    """The file and an argument of the run give different values.

    Neither wins: the run is refused, and the message names both. `"auto"` in the file takes the argument.
    The layout (`--pipeline_parallel_size`, `--tensor_parallel_size`, `--expert_parallel_size`) is the
    exception: there the argument overrides the file.
    """
    yield from ()
