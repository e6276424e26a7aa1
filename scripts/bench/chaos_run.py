"""One run under `ds-harness launch`, the faults that can be done to it, and what must hold in the end."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

TITLE = "ds-harness: ready for a start"  # of the process that stands by
LAYOUTS: dict[str, tuple[int, list[object]]] = {
    "pp2": (2, ["--deepspeed_config", "pipeline_checkpointing"]),
    "tp2": (2, ["--deepspeed_config", "tensor_parallel"]),
    "zero3": (2, ["--deepspeed_config", "zero3"]),
    "pp2 x tp2": (4, ["--deepspeed_config", "pipeline_3d"]),
}
SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "SIGSTOP": signal.SIGSTOP}
MOMENTS = ("step", "step", "save", "export", "restart")
DAMAGE = ("truncated", "flipped", "swapped", "stale")
MACHINE = ("full disk", "link down")  # need root: a disk and a network of the run's own
STEPS, SAVE_STEPS, LIMIT_S, STOPPED_S, FULL_S, DOWN_S = 40, 8, 900.0, 3.0, 20.0, 45.0
DISK = "64m"
NUMBERS = itertools.count()
IS_ROOT = os.geteuid() == 0 and shutil.which("ip") is not None


class Run:
    """One run and its faults, in a folder of its own; as root with a disk and a network of its own."""

    def __init__(self, layout: str, folder: Path, draw: random.Random) -> None:
        self.ranks, flags = LAYOUTS[layout]
        self.disk, self.log, self.draw = folder / "disk", folder / "log", draw
        self.output, self.network = self.disk / "run", f"chaos-{os.getpid()}-{next(NUMBERS)}" if IS_ROOT else None
        self.disk.mkdir()
        if self.network:
            _do("mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", self.disk)
            _do("ip", "netns", "add", self.network)
            _do("ip", "-n", self.network, "link", "set", "lo", "up")
        (folder / "text.txt").write_text("The quick brown fox jumps over the lazy dog; 0123456789. " * 60)
        data = ["--train_file", folder / "text.txt", "--block_size", 32, "--per_device_train_batch_size", 2]
        steps = ["--max_steps", STEPS, "--save_steps", SAVE_STEPS, "--save_total_limit", 4]
        inside = ["ip", "netns", "exec", self.network] if self.network else []
        launcher = [sys.executable, "-m", "harness.cli", "launch", "--max_restarts", 50]
        script = ["--num_accelerators", self.ranks, "scripts/train.py", *flags, *data, *steps]
        words = [*inside, *launcher, *script, "--output_dir", self.output]
        self.command = [*map(str, words), "--resume_from_checkpoint", "auto"]
        self.until = time.monotonic() + LIMIT_S
        self.start()

    def start(self) -> None:
        """Start the supervisor."""
        with self.log.open("a") as log:
            self.supervisor = subprocess.Popen(self.command, stdout=log, stderr=log, start_new_session=True)

    def rows(self) -> list[dict[str, float]]:
        """Return the lines of metrics."""
        metrics = self.output / "metrics.jsonl"
        lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def processes(self) -> dict[str, int]:
        """Return the processes of the run by their place in it."""
        found = {}
        for path in sorted(Path("/proc").glob("[0-9]*/cmdline"), key=lambda path: int(path.parent.name)):
            with suppress(OSError):
                process, text = int(path.parent.name), path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
                state, parent = (path.parent / "stat").read_text().rpartition(")")[2].split()[:2]
                if state in "ZX":
                    continue
                if "harness.resilience.on_host.keeper" in text and int(parent) == self.supervisor.pid:
                    found["keeper"] = process
                elif TITLE in text and int(parent) == self.supervisor.pid:
                    found["standby"] = process
                elif str(self.output) in text:
                    rank = re.search(r"--local_rank=(\d+)", text)
                    other = "supervisor" if process == self.supervisor.pid else "other"
                    found[f"rank {rank[1]}" if rank else other] = process
        return found

    def wait_for(self, moment: str) -> None:
        """Wait for the moment of a fault, or for the end of the run."""
        begun = len(self.rows())
        step = self.draw.randint(begun + 1, max(begun + 1, min(begun + 6, STEPS - 2)))
        starts = self.log.read_text().count("preparing ")
        reached = {
            "step": lambda: len(self.rows()) >= step,
            "save": lambda: len(self.rows()) > begun and any(self.output.glob("writing-*")),
            "export": lambda: len(self.rows()) >= STEPS and any(self.output.glob("unfinished-*")),
            "restart": lambda: self.log.read_text().count("preparing ") > starts,
        }[moment]
        while not reached() and self.supervisor.poll() is None and time.monotonic() < self.until:
            time.sleep(0.002)
        time.sleep(self.draw.random() * (8.0 if moment == "restart" else 0.1))

    def fault(self, moment: str, kinds: list[str]) -> str | None:
        """Make one fault; return what it was, None if the run had ended before."""
        kind = self.draw.choice(kinds)
        if moment == "restart":
            self.wait_for("step")
            with suppress(ProcessLookupError, KeyError):
                os.kill(self.processes()["rank 0"], signal.SIGKILL)
        self.wait_for(moment)
        if self.supervisor.poll() is not None or not self.processes():
            return None
        if kind in MACHINE:
            return f"{self.fill_disk() if kind == 'full disk' else self.cut_link()}, {moment}"
        if kind == "damage":
            self.supervisor.kill()
            self.end()
            return f"{self.damage()}, {moment}"
        processes = self.processes()
        who = self.draw.choice([*sorted(processes), "all ranks"])
        for name, process in processes.items():
            if name == who or (who == "all ranks" and name.startswith("rank")):
                with suppress(ProcessLookupError):
                    os.kill(process, SIGNALS[kind])
        if who == "supervisor" and kind == "SIGSTOP":
            time.sleep(STOPPED_S)
            self.supervisor.send_signal(signal.SIGCONT)
        return f"{kind} to {'a rank' if who.startswith('rank') else who}, {moment}"

    def fill_disk(self) -> str:
        """Leave no room until a checkpoint could not be written."""
        told, until = self.log.read_text().count("no checkpoint of step"), time.monotonic() + FULL_S
        with (self.disk / "filler").open("wb", buffering=0) as filler, suppress(OSError):
            while True:
                filler.write(bytes(4096))
        while self.log.read_text().count("no checkpoint of step") == told and time.monotonic() < until:
            time.sleep(0.1)
        (self.disk / "filler").unlink()
        return "full disk"

    def cut_link(self) -> str:
        """Let no packet through for some seconds."""
        for state, seconds in (("down", self.draw.random() * DOWN_S), ("up", 0.0)):
            _do("ip", "-n", self.network, "link", "set", "lo", state)
            time.sleep(seconds)
        return "link down"

    def damage(self) -> str:
        """Damage the newest checkpoint."""
        checkpoints = sorted(self.output.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
        files = [path for path in checkpoints[-1].rglob("*") if path.is_file()] if checkpoints else []
        if not files:
            return "nothing to damage"
        kind, file = self.draw.choice(DAMAGE), self.draw.choice(sorted(files))
        content = bytearray(file.read_bytes())
        older = checkpoints[0] / file.relative_to(checkpoints[-1])
        if kind == "truncated":
            file.write_bytes(content[: len(content) // 2])
        elif kind == "flipped":
            content[self.draw.randrange(len(content))] ^= 1 << self.draw.randrange(8)
            file.write_bytes(content)
        elif kind == "swapped":
            other = self.draw.choice([path for path in files if path != file])
            file.write_bytes(other.read_bytes())
            other.write_bytes(content)
        elif len(checkpoints) > 1 and older.exists():
            shutil.copy(older, file)
        return f"a checkpoint's file {kind}"

    def end(self) -> dict[str, int]:
        """Wait for the end of the supervisor and of all processes; return those that are left."""
        with suppress(subprocess.TimeoutExpired):
            self.supervisor.wait(max(1.0, self.until - time.monotonic()))
        for _ in range(250):
            if not (left := self.processes()):
                break
            time.sleep(0.1)
        return left

    def wrong(self, loss: float) -> list[str]:
        """Return what is not as in the undisturbed run."""
        while True:
            left = self.end()
            if self.supervisor.returncode == 0 or time.monotonic() > self.until:
                break
            self.start()  # it was killed, or told to stop: the user starts it again
        rows = self.rows()
        batch = rows[0]["consumed_samples"] if rows else 0
        damaged = len(re.findall("is damaged|differs from what was saved", self.log.read_text(errors="replace")))
        unsaved = self.log.read_text(errors="replace").count("no checkpoint of step")
        checks = {
            f"exit code {self.supervisor.returncode}": self.supervisor.returncode == 0,
            f"left: {left}": not left,
            f"{len(rows)} rows": [row["step"] for row in rows] == list(range(1, STEPS + 1)),
            "samples": all(row["consumed_samples"] == batch * row["step"] for row in rows),
            f"loss {rows[-1]['loss'] if rows else None}, not {loss}": bool(rows) and rows[-1]["loss"] == loss,
            f"{self.repeated()} steps repeated": self.repeated() <= SAVE_STEPS * (1 + damaged + unsaved),
        }
        return [what for what, holds in checks.items() if not holds]

    def repeated(self) -> int:
        """Return the most steps that were made once more after a fault that the supervisor has seen."""
        found, step = 0, 0
        for line in self.log.read_text(errors="replace").splitlines():
            if match := re.search(r"ds-harness launch: .* (?:in|after) step (\d+)", line):
                step = max(step, int(match[1]) - 1)
            elif match := re.search(r"resumed from .* at step (\d+)", line):
                found, step = max(found, step - int(match[1])), int(match[1])
        return found

    def close(self, *, keep: bool) -> None:
        """Remove the disk, the network and, unless they are to be looked at, the files."""
        if keep:
            shutil.copytree(self.disk, self.disk.with_name("kept"))
        if self.network:
            _do("umount", "-l", self.disk)
            _do("ip", "netns", "delete", self.network)
        if not keep:
            shutil.rmtree(self.disk.parent)


def _do(*words: object) -> None:
    subprocess.run([*map(str, words)], check=True)
