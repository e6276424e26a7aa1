"""Runs on network namespaces, each with a `ds-harness launch` of its own and no ssh, with faults drawn at random.

    python scripts/bench/chaos_hosts.py [--runs 6] [--seed 1] [--faults 3] [--seconds S] [--layouts pp2 tp2]

A fault is a signal to a rank, to a launch (which is started again, as Kubernetes does), to its standby or its keeper,
or a cable that is cut for some seconds. A run passes if each launch ends with exit code 0, with every step once in
metrics.jsonl, with the samples and all losses of an undisturbed run to the bit, and if each restart has a line of its
cause. The results file is read again, so that runs can be made in parts. Needs root and ip.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from chaos_run import LAYOUTS, SIGNALS, TITLE
from report import RESULTS, write_report

from tests.e2e.hosts import Host, some_hosts
from tests.e2e.launching import ROOT, SCRIPT, environment
from tests.support.training import logged

STEPS, SAVE_STEPS, LIMIT_S, STOPPED_S, CUT_S = 60, 8, 150.0, 30.0, 30.0
KEEPER = "harness.resilience.on_host.keeper"


def script(layout: str, folder: Path) -> list[object]:
    """Return the words of the training script."""
    (folder / "text.txt").write_text("The quick brown fox jumps over the lazy dog; 0123456789. " * 60)
    data = ["--train_file", folder / "text.txt", "--block_size", 32, "--per_device_train_batch_size", 2]
    steps = ["--max_steps", STEPS, "--save_steps", SAVE_STEPS, "--save_total_limit", 4, "--hang_seconds", 10]
    words = [SCRIPT, *LAYOUTS[layout][1], *data, *steps, "--output_dir", folder / "run"]
    return [*words, "--resume_from_checkpoint", "auto"]


def launch(flags: list[object], words: list[object]) -> list[str]:
    """Return the command of a launch."""
    return list(map(str, [sys.executable, "-m", "harness.cli", "launch", "--max_restarts", 20, *flags, *words]))


def undisturbed(layout: str) -> list[float]:
    """Return the losses of a run without faults, on one host."""
    with tempfile.TemporaryDirectory() as folder:
        flags: list[object] = ["--num_accelerators", LAYOUTS[layout][0]]
        command = launch(flags, script(layout, Path(folder)))
        subprocess.run(command, cwd=ROOT, env=environment(), check=True, capture_output=True)
        return [row["loss"] for row in logged(Path(folder) / "run")]


class Run:
    """A run on some hosts."""

    def __init__(self, layout: str, hosts: list[Host], folder: Path, draw: random.Random) -> None:
        self.hosts, self.folder, self.draw = hosts, folder, draw
        self.until = time.monotonic() + LIMIT_S
        ranks = LAYOUTS[layout][0] // len(hosts)
        flags = ["--nnodes", len(hosts), "--nproc_per_node", ranks, "--rdzv_endpoint", f"{hosts[0].address}:29400"]
        self.command = launch(list(flags), script(layout, folder))
        self.launches = [self.start(index) for index in range(len(hosts))]

    def start(self, index: int) -> subprocess.Popen[bytes]:
        """Start the launch of a host."""
        with (self.folder / f"log-{index}").open("a") as log:
            command = self.hosts[index].command(*self.command)
            return subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=log, stderr=log)

    def steps(self) -> int:
        """Return the last step in the metrics."""
        with suppress(OSError, ValueError, IndexError):
            return int(logged(self.folder / "run")[-1]["step"])
        return 0

    def is_over(self) -> bool:
        """Whether a launch has ended, or the time is over."""
        return any(each.poll() is not None for each in self.launches) or time.monotonic() > self.until

    def fault(self, after: int) -> str:
        """Do one thing to a host, once the run has made this step; return what it was."""
        while self.steps() < after and not self.is_over():
            time.sleep(0.01)
        if self.is_over():
            return "none"
        index = self.draw.randrange(len(self.hosts))
        host, kind = self.hosts[index], self.draw.choice([*SIGNALS, "SIGKILL", "cable"])
        if kind == "cable":
            seconds = self.draw.random() * CUT_S
            host.cut_cable()
            time.sleep(seconds)
            host.join_cable()
            return f"cable of host {index} cut for {seconds:.0f} s"
        found: dict[str, int] = {"launch": self.launches[index].pid}
        for process in host.processes():
            with suppress(OSError):
                words = Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                name = "standby" if TITLE in words else "keeper" if KEEPER in words else ""
                name = "rank" if "--local_rank=" in words else name
                found.update({name: process} if name else {})
        who = self.draw.choice(sorted(found))
        if who == "launch" and kind == "SIGTERM":
            kind = "SIGKILL"  # all hosts are needed here, so it would end the run
        with suppress(ProcessLookupError):
            os.kill(found[who], SIGNALS[kind])
        if who == "launch" and kind == "SIGSTOP":
            time.sleep(self.draw.random() * STOPPED_S)
            os.kill(found[who], signal.SIGCONT)
        elif who == "launch":
            self.launches[index].wait()
            time.sleep(self.draw.random() * 5)
            self.launches[index] = self.start(index)
        return f"{kind} to the {who} of host {index}"

    def wrong(self, losses: list[float]) -> tuple[list[str], list[str]]:
        """Return what is not as in the undisturbed run, and the causes of the restarts."""
        for each in self.launches:
            with suppress(subprocess.TimeoutExpired):
                each.wait(max(1.0, self.until - time.monotonic()))
        codes = [each.returncode for each in self.launches]
        left = [host.processes() for host in self.hosts]
        rows = logged(self.folder / "run")
        batch = rows[0]["consumed_samples"]
        logs = [path.read_text(errors="replace") for path in sorted(self.folder.glob("log-*"))]
        numbers = [re.findall(r"ds-harness launch: (.*)\nds-harness launch: restart (\d+) of", text) for text in logs]
        causes = [cause for cause, _ in max(numbers, key=len)]
        restarts = max(len(re.findall(r"ds-harness launch: restart \d+ of", text)) for text in logs)
        checks = {
            f"exit codes {codes}": set(codes) == {0},
            f"left: {left}": not any(left),
            f"{len(rows)} rows": [row["step"] for row in rows] == list(range(1, STEPS + 1)),
            "samples": all(row["consumed_samples"] == batch * row["step"] for row in rows),
            "losses": [row["loss"] for row in rows] == losses,
            f"{len(causes)} causes of {restarts} restarts": len(causes) == restarts,
        }
        return [what for what, holds in checks.items() if not holds], causes

    def close(self) -> None:
        """End what is left."""
        for each in self.launches:
            each.kill()
            each.wait()


def disturbed(layout: str, losses: list[float], seed: int, most: int) -> dict[str, object]:
    """Make a run with some faults; return what they were and what was wrong."""
    draw, folder = random.Random(seed), Path(tempfile.mkdtemp())
    count = 4 if layout == "pp2 x tp2" and draw.random() < 0.5 else 2
    with some_hosts(count, folder / "hosts", ssh=False) as hosts:
        run = Run(layout, hosts.hosts, folder, draw)
        marks = sorted(draw.randint(3, STEPS - 10) for _ in range(most))
        faults = [fault for mark in marks if (fault := run.fault(mark)) != "none"]
        wrong, causes = run.wrong(losses)
        run.close()
    found = {"layout": layout, "hosts": count, "seed": seed, "faults": faults, "causes": causes, "wrong": wrong}
    print(json.dumps(found), f"kept: {folder}" if wrong else "", flush=True)
    return found


def main() -> int:
    """Make runs, and write the table after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", type=int, default=3, help="faults per run")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no new run after this many seconds")
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--output", type=Path, default=RESULTS / "chaos-hosts.json")
    args = parser.parse_args()
    result = json.loads(args.output.read_text()) if args.output.exists() else {"losses": {}, "runs": []}
    until = time.monotonic() + args.seconds
    for number in range(args.runs):
        if time.monotonic() > until:
            break
        layout = args.layouts[number % len(args.layouts)]
        if layout not in result["losses"]:
            result["losses"][layout] = undisturbed(layout)
        made = len(result["runs"])
        result["runs"].append(disturbed(layout, result["losses"][layout], args.seed * 10_000 + made, args.faults))
        result["failed_runs"] = sum(bool(run["wrong"]) for run in result["runs"])
        write_report(args.output, result, what=__doc__)
    return bool(result["failed_runs"])


if __name__ == "__main__":
    sys.exit(main())
