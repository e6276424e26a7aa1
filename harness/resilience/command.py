"""The verb `ds-harness launch`."""

from __future__ import annotations

from collections.abc import Sequence

from harness.resilience.hosts import find_hosts
from harness.resilience.options import USAGE, read_options


def launch(argv: Sequence[str]) -> int:
    """Run a training script on the ranks that the flags ask for; return its exit code, or 128 + a signal's number."""
    if not argv:
        print(USAGE)
        return 2
    options = read_options(argv)
    if options.slurm:
        from harness.resilience.slurm import write_batch

        print(f"written: {write_batch(options)}; start it with `sbatch {options.slurm}`")
        return 0
    if options.deepspeed_only:
        from harness.resilience.deepspeed_command import run_deepspeed

        return run_deepspeed(options.for_deepspeed)
    from harness.resilience.supervisor import Supervisor

    return Supervisor(options, find_hosts(options)).run()
