"""Describe a run as a batch file for sbatch."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from harness.cluster.job import Job

BATCH = """#!/bin/bash
# Written by `ds-harness cluster slurm`; add --partition, --account, --time as your cluster asks for them.
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
{devices}#SBATCH --no-kill
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@{seconds}
cd {folder}

# It runs `srun` once for each host, and starts that again on a host that was lost.
{command} &
launch=$!
saved=
trap 'saved=yes; kill -USR1 $launch' USR1
trap 'kill -TERM $launch' TERM
wait $launch
code=$?
while kill -0 $launch 2>/dev/null; do
    wait $launch
    code=$?
done
if [ -n "$saved" ] && [ $code -ne 0 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
"""


def batch(job: Job) -> str:
    """Return the batch file.

    Slurm sends SIGUSR1 to the batch shell `grace_s` seconds before the time limit. The shell passes it on to the
    launch, the ranks save, and the shell requeues the job. Slurm itself requeues a job that is preempted or loses a
    node.

    The launch runs in the background, because bash handles a signal only after a foreground command has ended. A signal
    also ends `wait`, so the shell waits again until the launch is gone.
    """
    program = str(Path(sys.executable).with_name("ds-harness"))
    flags = ["--max_restarts", str(job.restarts), "--num_nodes", str(job.nodes), "--nproc_per_node", str(job.ranks)]
    if job.least < job.nodes:
        flags += ["--min_ranks", str(job.least * job.ranks)]
    return BATCH.format(
        name=job.name,
        nodes=job.nodes,
        devices=f"#SBATCH --gpus-per-node={job.ranks}\n" if job.gpus else f"#SBATCH --cpus-per-task={job.ranks}\n",
        seconds=job.grace_s,
        folder=shlex.quote(str(Path.cwd())),
        command=shlex.join([program, "launch", *flags, *job.words]),
    )
