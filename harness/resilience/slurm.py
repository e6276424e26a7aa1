"""`ds-harness launch --slurm FILE`: a batch file in which Slurm runs the supervisor, and starts the job again.

Slurm sends SIGUSR1 to the batch shell some time before the time limit; the shell passes it on to the supervisor, the
ranks save, and the job goes back into the queue. A job that is preempted or loses its node is put back by Slurm itself.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from harness.errors import UserError
from harness.resilience.options import Options
from harness.resilience.process.launcher import RESUME, with_resume
from harness.resilience.script import without

BATCH = """#!/bin/bash
# Written by `ds-harness launch --slurm`; add --partition, --account, --time as your cluster asks for them.
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={ranks}
{devices}#SBATCH --no-kill
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@{seconds}
cd {folder}

{command} &
supervisor=$!
saved=
trap 'saved=yes; kill -USR1 $supervisor' USR1
trap 'kill -TERM $supervisor' TERM
wait $supervisor
code=$?
while kill -0 $supervisor 2>/dev/null; do
    wait $supervisor
    code=$?
done
if [ -n "$saved" ] && [ $code -ne 0 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
"""


def write_batch(options: Options) -> str:
    """Write the batch file; return its path. UserError where the number of hosts or ranks is not given."""
    assert options.slurm is not None
    if options.hostfile or options.include or options.exclude:
        raise UserError("--slurm: Slurm chooses the hosts: leave out --hostfile, --include and --exclude")
    if not options.num_accelerators:
        raise UserError("--slurm: give --num_accelerators, the ranks on each host")
    if any(word.partition("=")[0] == RESUME for word in options.script):
        raise UserError(f"--slurm: the job goes on from its newest checkpoint: leave out {RESUME}")
    command = [
        str(Path(sys.executable).with_name("ds-harness")),
        "launch",
        *without(options.flags, {"--slurm", "--slurm_seconds"}),
        *options.script,
    ]
    path = Path(options.slurm)
    text = BATCH.format(
        nodes=options.num_nodes or 1,
        ranks=options.num_accelerators,
        devices=f"#SBATCH --gpus-per-node={options.num_accelerators}\n" if _has_gpus() else "",
        seconds=options.slurm_seconds,
        folder=shlex.quote(str(Path.cwd())),
        command=shlex.join(with_resume(command)),
    )
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--slurm {path}: cannot be written: {error.strerror}") from error
    return str(path)


def _has_gpus() -> bool:
    """Whether jobs may ask Slurm for GPUs; taken for granted where Slurm cannot be asked."""
    if shutil.which("sinfo") is None:
        return True
    try:
        shown = subprocess.run(["sinfo", "-h", "-o", "%G"], capture_output=True, text=True, timeout=30, check=False)
    except (subprocess.TimeoutExpired, OSError):
        return True
    return shown.returncode != 0 or "gpu" in shown.stdout
