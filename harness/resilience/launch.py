"""`ds-harness launch`: where a run starts. Who starts whom, from the top:

    ds-harness launch            this file: reads the flags
      Supervisor                 supervisor.py, in the same process: attempt after attempt until one succeeds
        agent, one on each host  on_host/agent.py: started directly, by ssh or by srun; starts the ranks of its host
          rank                   harness/train.py or the user's script
        standby, one on each host  on_host/standby.py: has imported torch, and becomes the ranks of the next attempt

With a flag that only the `deepspeed` command can follow, there is no supervisor: `run_deepspeed` starts that command,
and DeepSpeed's own launcher starts the ranks. With --slurm nothing starts: a batch file is written, in which Slurm runs
`ds-harness launch`.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from harness.errors import UserError
from harness.resilience.hosts import find_hosts
from harness.resilience.options import USAGE, Options, read_options
from harness.resilience.process.launcher import RESUME, with_resume
from harness.resilience.process.signals import SIGNALS
from harness.resilience.script import without
from harness.resilience.supervisor import Supervisor
from harness.topology.processes import DEEPSPEED_LAUNCH, children_of, command_of

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


def launch(argv: Sequence[str]) -> int:
    """Run a training script on the ranks that the flags ask for; return its exit code, or 128 + a signal's number."""
    if not argv:
        print(USAGE)
        return 2
    options = read_options(argv)
    if options.slurm:
        print(f"written: {write_batch(options)}; start it with `sbatch {options.slurm}`")
        return 0
    if options.deepspeed_only:
        return run_deepspeed(options.for_deepspeed)
    return Supervisor(options, find_hosts(options)).run()


def run_deepspeed(argv: Sequence[str]) -> int:
    """Run the `deepspeed` command with these arguments.

    Returns its exit code, or 128 + the number of the signal that ended it.
    """
    program = _program()
    received: list[int] = []

    def pass_on(number: int, _frame: object) -> None:
        received.append(number)
        _signal(process.pid, number)

    ignored = [number for number in SIGNALS if signal.getsignal(number) is signal.SIG_IGN]  # as under nohup
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # until there is a process to pass them on to
    # The `deepspeed` command has no handler for Ctrl-C, and its child exits with 1 when it gets a signal. In a process
    # group of their own the terminal does not signal them; `pass_on` signals the ranks, which save and stop.
    process = subprocess.Popen([program, *argv], process_group=0, preexec_fn=_unblock)
    for number in set(SIGNALS) - set(ignored):
        signal.signal(number, pass_on)
    _unblock()
    code = process.wait()
    if code and received:
        return 128 + received[0]
    return code if code >= 0 else 128 - code


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _signal(runner: int, number: int) -> None:
    """Send a signal to the ranks; end the `deepspeed` command if it has no ranks yet, or has them on other hosts."""
    children = children_of(runner)
    launches = [child for child in children if DEEPSPEED_LAUNCH in command_of(child)]
    ranks = [rank for launch in launches for rank in children_of(launch)]
    if ranks:
        for rank in ranks:
            _send(rank, number)
    elif launches or not children:
        with suppress(ProcessLookupError):
            os.killpg(runner, signal.SIGTERM)
    else:
        _send(runner, signal.SIGTERM)  # pdsh: it ends what it has started on the hosts


def _send(process: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, number)


def _program() -> str:
    """Return the `deepspeed` command of this Python's installation, else of $PATH."""
    beside = Path(sys.executable).with_name("deepspeed")
    found = str(beside) if beside.exists() else shutil.which("deepspeed")
    if found is None:
        raise UserError("no `deepspeed` command found: install deepspeed, or add its folder to PATH")
    return found


def write_batch(options: Options) -> str:
    """Write the batch file for sbatch, and return its path.

    Slurm sends SIGUSR1 to the batch shell some time before the time limit. The shell passes it on to the supervisor,
    the ranks save, and the job goes back into the queue. Slurm itself requeues a job that is preempted or loses a node.

    Raises:
        UserError: flags choose the hosts, or do not say how many ranks each has; the file cannot be written.
    """
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
