"""What the control plane costs a rank as ranks grow: start, steps, saves and the end, simulated without machines.

    python scripts/bench/scale.py --ranks 64 1024 16384            one process, no network
    python scripts/bench/scale.py --real 8 16 32 64                tiny ranks that are processes: a start and a save

Simulated are the parts that one rank, or the agent of one host of 8 ranks, does by itself: their time and the bytes of
what they send and receive, as the code that runs makes it. Not in it: the network, and what gloo and NCCL do in a
collective. Growth is the exponent of the number of ranks between the last two columns: 0 is constant, 1 linear.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import watching_hosts
from pydantic import TypeAdapter
from report import RESULTS, write_report
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousSettings,
    RendezvousTimeout,
    _DistributedRendezvousOpExecutor,
    _NodeDesc,
    _RendezvousJoinOp,
    _RendezvousState,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from harness.batches.order import batch_indices
from harness.checkpoint.directories import write_manifest
from harness.checkpoint.tensors.tensor_writer import Entry, file_regions
from harness.resilience.judging import History
from harness.resilience.on_host.ranks import Exit
from harness.resilience.process.records import Position
from harness.resilience.rendezvous import JOIN_S, JsonBackend, StateHolder
from harness.resilience.reports import Report, cause_of
from harness.resilience.script import Script
from harness.resilience.team import Offer, team_of
from harness.resilience.watch import hosts as watching
from harness.topology import agreement
from harness.topology.groups import build_groups
from harness.topology.layout import Layout
from harness.topology.signed_store import SignedStore

PER_HOST = 8
REASONS = {
    "start: process groups of a rank, s": "torch requires every rank to create every group",
    "start: agents meet, bytes a host": "the engine keeps all agents in one value, which each reads and writes",
    "start: agents meet, s in all (one after another)": "the same, once for each agent",
    "start: ranks find those of their host, bytes of rank 0": "rank 0 distributes what the ranks report",
    "step: a rank finds the samples of the global batch, s": "the global batch grows with the ranks here",
}
"""Why something grows faster than the logarithm of the ranks, or in all faster than the ranks."""
SUBJECTS = 7  # whose digests the ranks compare at the start
KNOWN = ("scripts/train.py", "--deepspeed_config", "zero3", "--max_steps", "9")
FILE_BYTES = 5e9  # of a checkpoint's file
LAYERS = 80
LOG = 0.3  # more than the exponent of a logarithm between 1,024 and 16,384 ranks
SAMPLE = 8  # agents whose joining is measured
BENCH = Path(__file__).parent


class CountingStore(dist.Store):
    """A store of the agents that counts the bytes of the values that go through it."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[str, bytes] = {}
        self.moved = 0

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        before = self.held.get(key, b"")
        if before == expected.encode():
            self.held[key] = desired.encode()
        self.moved += len(expected) + len(desired) + len(self.held[key])
        return self.held[key]

    def get(self, key: str) -> bytes:
        self.moved += len(self.held[key])
        return self.held[key]


def timed(action: Callable[[], object]) -> float:
    """Return the processor seconds of an action."""
    begun = time.process_time()
    action()
    return time.process_time() - begun


def layout_of(ranks: int) -> Layout:
    """Return 8 tensor-parallel ranks, 8 stages where they fit, and data parallelism over the rest."""
    stages = min(8, ranks // PER_HOST)
    return Layout(pp_size=stages, tp_size=PER_HOST, dp_size=ranks // PER_HOST // stages)


def agree() -> None:
    """Compare what all ranks must hold alike."""
    agreement.require_alike({f"subject {number}": "of many words" for number in range(SUBJECTS)})


def groups(ranks: int) -> float:
    """Return the seconds in which a rank makes the process groups of its layout, without DeepSpeed's own."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        return timed(lambda: build_groups(layout_of(ranks)))
    finally:
        dist.destroy_process_group()


def meeting(agents: int) -> tuple[float, float]:
    """Return bytes through the store and seconds of all agents until they have met, one after another.

    Both grow in proportion to the agents that are there already, so a sample of those that join gives their mean.
    Agents that come at once write over each other and try again: that costs more.
    """
    store = CountingStore()
    settings = RendezvousSettings(
        "run", agents, agents, RendezvousTimeout(join=timedelta(seconds=1e6)), timedelta(seconds=JOIN_S), 1
    )
    backend = JsonBackend(SignedStore(store, ""), "run")
    state, token, joined, spent = _RendezvousState(), None, 0, 0.0
    for number in range(agents):
        node = _NodeDesc(f"10.0.{number // 256}.{number % 256}", 4_000_000_000 + number, 0)
        if number % max(agents // SAMPLE, 1) == 0:
            found = backend.set_state(pickle.dumps(state), token)
            assert found is not None
            before, begun = store.moved, time.process_time()
            _join(StateHolder(backend, settings, node, lambda: None), node, settings)
            joined, spent = joined + store.moved - before, spent + time.process_time() - begun
            state_and_token = backend.get_state()
            assert state_and_token is not None
            token = state_and_token[1]
        state.participants[node] = 0
        state.last_heartbeats[node] = datetime.now(UTC)
    share = agents / min(agents, SAMPLE)
    return joined * share, spent * share


def _join(holder: StateHolder, node: _NodeDesc, settings: RendezvousSettings) -> None:
    """Have an agent take part, without the wait for others."""

    def once(context: object, deadline: float) -> object:
        action = _RendezvousJoinOp()(context, deadline)
        return type(action).FINISH if action.name in ("SYNC", "KEEP_ALIVE") else action

    executor = _DistributedRendezvousOpExecutor(node, holder, settings)
    executor._record = lambda *_, **__: None  # noqa: SLF001  # it looks through the whole stack for a log that nobody keeps
    executor.run(once, time.monotonic() + 1e6)
    assert node in holder.state.participants


def as_json(value: object) -> bytes:
    """Return a value as agents write it into their store, without the signature."""
    return TypeAdapter(type(value)).dump_json(value)


def starting(agents: int) -> tuple[int, float, int, float]:
    """Return bytes and leader's seconds of planning a start, then of judging it, over all agents."""
    offers = [
        Offer(
            node=f"10.0.{number // 256}.{number % 256}_4000000000_0",
            host=f"host-{number:04d}.cluster",
            address=f"10.0.{number // 256}.{number % 256}",
            position=number,
            devices=tuple(range(PER_HOST)),
            port=20000,
        )
        for number in range(agents)
    ]
    begun = time.process_time()
    team = team_of(offers, (), Script(KNOWN), agents * PER_HOST, 1)
    text = as_json(team)
    plan = as_json({"start": 0, "words": KNOWN, "ranks": agents * PER_HOST, "hosts": agents, "address": "a" * 20})
    parts = [
        as_json({"index": index, "first": index * PER_HOST, "devices": offer.devices})
        for index, offer in enumerate(team.offers)
    ]
    planned = time.process_time() - begun
    # each agent writes its offer and reads plan and part; the leader reads the offers, and writes the rest
    bytes_of_plan = 2 * (len(text)) + agents * (len(plan) + 2 * len(parts[-1])) + len(as_json(History()))
    reports = [
        Report(
            exits=[Exit(index * PER_HOST + local, 1, 0.1) for local in range(PER_HOST)],
            failures=[],
            positions=[
                Position(rank=index * PER_HOST + local, host=offer.host, stage=1, step=9, doing="training")
                for local in range(PER_HOST)
            ],
            success=False,
            kills=0,
            received=0,
        )
        for index, offer in enumerate(offers)
    ]
    sizes = sum(len(as_json(report)) for report in reports)
    judged = timed(lambda: cause_of(team, dict(enumerate(reports)), set(), "", 9))
    return bytes_of_plan, planned, 2 * sizes, judged


def checkpoint_plan() -> tuple[float, int]:
    """Return the seconds in which a rank plans the files of a 70B model, and the bytes of their manifest."""
    entries = [
        Entry(name=f"model.layers.{layer}.{name}", shape=(8192, 8192), dtype=torch.float32, trained=True)
        for layer in range(LAYERS)
        for name in ("q", "k", "v", "o", "gate", "up", "down", "norm1", "norm2")
    ]
    spent = timed(lambda: file_regions(Path("model.safetensors"), entries))
    files = {f"model-{number:05d}-of-00168.safetensors": (int(FILE_BYTES), "0" * 32) for number in range(168)}
    with tempfile.TemporaryDirectory() as folder:
        write_manifest(Path(folder), 1, files)
        return 3 * spent, next(Path(folder).iterdir()).stat().st_size


def of_all(value: object, ranks: int) -> int:
    """Return the bytes that a rank receives when each rank tells all others a value, as torch sends objects."""
    return ranks * (len(pickle.dumps(value)) + 8)


def said(action: Callable[[], object]) -> int:
    """Return the bytes that a rank hands to the collectives of an action, in which all ranks agree."""
    counted: list[int] = []
    before = dist.all_reduce, agreement.host_group
    dist.all_reduce = lambda tensor, **_: counted.append(tensor.nbytes)
    agreement.host_group = lambda: None
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=64)
    try:
        action()
    finally:
        dist.destroy_process_group()
        dist.all_reduce, agreement.host_group = before
    return sum(counted)


def simulated(ranks: int) -> dict[str, float]:
    """Return what is measured for this number of ranks: seconds and bytes."""
    agents = ranks // PER_HOST
    joined, joining_s = meeting(agents)
    plan_bytes, plan_s, report_bytes, judge_s = starting(agents)
    host = "host-0000.cluster 0b5a3f7e-5c8e-4f0e-9d3b-0c1d2e3f4a5b"
    told = [(f"host-{rank // PER_HOST:04d}.cluster 0b5a3f7e", rank) for rank in range(ranks)]
    beside = agreement.group_by_host(told[:PER_HOST])[0]
    plan_files_s, manifest = checkpoint_plan()
    watched = watching_hosts.measure(agents, PER_HOST)
    samples = ranks * 4  # of a global batch
    sampling_s = timed(lambda: batch_indices(samples * 1000, samples, 10**9, 0))
    return {
        "start: process groups of a rank, s": groups(ranks),
        "start: agents meet, bytes a host": joined / agents,
        "start: agents meet, s in all (one after another)": joining_s,
        "start: a start is planned, bytes a host": plan_bytes / agents,
        "start: a start is planned, s of the leader": plan_s,
        "start: agreement on config, code and data, bytes a rank": said(agree),
        "start: ranks find those of their host, bytes a rank": of_all((host, 0), 1) + of_all(beside, 1),
        "start: ranks find those of their host, bytes of rank 0": of_all((host, 0), ranks) + of_all(beside, ranks),
        "start: ranks find those of their host, s of rank 0": timed(lambda: agreement.group_by_host(told)),
        "start: a yes or no of all ranks, bytes a rank": said(lambda: agreement.all_or_none(lambda: None)),
        "start: plan of a checkpoint's files, s of a rank": plan_files_s,
        "step: a rank finds the samples of the global batch, s": sampling_s,
        "step: watch, bytes a second and host": watched["store_megabytes_per_second"] * 1e6 / agents,
        "step: watch, share of a core of the first host": watched["first_host_share_of_a_core"],
        "save: manifest, bytes": manifest,
        "end: reports of all ranks, bytes a host": report_bytes / agents,
        "end: reports of all ranks, s of the leader": judge_s,
    }


def growth(values: list[float], ranks: list[int]) -> float | None:
    """Return the exponent of the ranks between the last two; None where it cannot be told."""
    if len(values) < 2 or min(values[-2:]) <= 0:
        return None
    return math.log(values[-1] / values[-2]) / math.log(ranks[-1] / ranks[-2])


def real(ranks: int) -> dict[str, float]:
    """Return what a run of this number of tiny ranks on this machine needs for its start and one save."""
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        text.write_text("The quick brown fox jumps over the lazy dog; 0123456789. " * 2000)
        run = Path(folder) / "run"
        flags = ["--deepspeed_config", "zero2", "--train_file", text, "--block_size", 32, "--max_steps", 2]
        flags += ["--per_device_train_batch_size", 1, "--save_steps", 1, "--output_dir", run]
        command = [
            sys.executable,
            "-m",
            "harness.cli",
            "launch",
            "--num_accelerators",
            ranks,
            "scripts/train.py",
            *flags,
        ]
        begun = time.monotonic()
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            list(map(str, command)), cwd=BENCH.parents[1], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        spent, content = time.monotonic() - begun, json.loads((run / "run.json").read_text())
        clock = content["wall_clock"]
        return {
            "ranks": ranks,
            "whole run, s": spent,
            "rank 0 prepares, s": clock.get("preparing", 0.0),
            "longest save, s": content["longest_save_s"],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 1024, 16384])
    parser.add_argument("--real", type=int, nargs="*", default=[])
    flags = parser.parse_args()
    watching.EVERY_S = 1e6  # no thread exchanges by itself
    watching_hosts.store_seconds = lambda *_: 0.0  # a store with a thread for each host: watching_hosts.py has it
    content: dict[str, object] = {"flags": vars(flags)}
    if flags.real:
        content["real"] = [real(ranks) for ranks in flags.real]
        for row in content["real"]:
            print(", ".join(f"{name} {value:.3g}" for name, value in row.items()), flush=True)
    else:
        columns = [simulated(ranks) for ranks in flags.ranks]
        rows = {name: [column[name] for column in columns] for name in columns[0]}
        content["rows"] = {name: [*values, growth(values, flags.ranks)] for name, values in rows.items()}
        print(f"| what | {' | '.join(f'{ranks:,} ranks' for ranks in flags.ranks)} | growth | because |")
        print(f"|---|{'---|' * len(flags.ranks)}---|---|")
        for name, values in rows.items():
            exponent = growth(values, flags.ranks)
            shown = " | ".join(f"{value:.2g}" if value < 1 else f"{value:,.0f}" for value in values)
            reason = REASONS.get(name, "the leader, or the first host, looks at all" if (exponent or 0) > LOG else "")
            print(f"| {name} | {shown} | {'' if exponent is None else f'{exponent:.1f}'} | {reason} |")
    name = "scale_real.json" if flags.real else "scale.json"
    print(write_report(RESULTS / name, content, what=__doc__))


if __name__ == "__main__":
    main()
