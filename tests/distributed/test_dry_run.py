"""A dry run says what the ranks of a real run hold and send: each is counted by the same ledger, on gloo and alone."""

from __future__ import annotations

import contextlib
import gc
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from harness import Trainer
from harness.cli import main
from harness.deepspeed import collectives
from harness.deepspeed.no_peers import announce_halves
from harness.deepspeed.schedule import announcer
from harness.dry_run.ledger import Ledger
from harness.dry_run.memory import Step
from harness.topology.layout import Layout
from harness.training.prepare.preparation import release
from tests.support.ranks import run_ranks
from tests.support.training import BLOCK, Job, arguments_of, rows, without_shared_memory

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.on_host("a group in Python passes no operator of torch, which the ledger counts"),
]


def by_schedule(name: str, schedule: str, **sections: Any) -> Job:
    """A run by a schedule with several model chunks a stage, with more micro-batches than it keeps at once."""
    sizes = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 8}
    return Job("tiny-llama", name, config={"pipeline": {"stages": 2, "schedule": schedule}, **sizes, **sections})


TWO = [Job("tiny-llama", "pp1dp2tp1z3")]
STAGES = [Job("tiny-llama", "pp2dp1tp1z0"), by_schedule("pp2dp1tp1z0", "dualpipe-v")]
FOUR = [
    by_schedule("pp2dp1tp2z1", "zero-bubble-v", bf16={"enabled": True}),
    Job("tiny-gpt2", "pp2dp2tp1z1", config={"bf16": {"enabled": True}, "pipeline": {"stages": 2}}),
]


def counted(job: Job, output_dir: str) -> dict[str, Any]:
    """What this rank holds and sends in the second step of a real run, with collectives as on GPUs.

    Over gloo an all-to-all of as many bytes takes the place of a reduce-scatter.
    """
    layout = Layout(pp_size=job.size("pp"), dp_size=job.size("dp"), tp_size=job.size("tp"))
    as_on_gpus = patch.object(collectives, "_is_gloo", lambda _x, _group: False)
    with Ledger(layout, dist.get_rank()) as ledger, without_shared_memory(), as_on_gpus:
        trainer = Trainer(job.model, arguments_of(job, output_dir), rows())
        engine, stream = trainer.engine, trainer.stream
        count = Step(ledger, engine.deepspeed)
        if trainer.run.spec.is_pipeline:
            engine.deepspeed.observe(announcer(count.begin))
        else:
            announce_halves(engine.deepspeed, count.begin)
        for _ in range(2):
            batches = stream.next_step(read=engine.reads_data)
            gc.collect()
            ledger.begin_step()
            engine.train_step(batches, 0, stream.length)
        memory, messages = asdict(count.memory(1)), ledger.messages({})
    release(trainer.run)
    return {
        "memory": {name: memory[name] for name in ("parameters", "gradients", "optimizer")},
        "activations": memory["activations"],
        "messages": {f"{m.group} {m.ranks} {m.operation}": (t.count, t.size) for m, t in messages.items()},
    }


def both(jobs: list[Job], folder: str) -> list[dict[str, Any]]:
    return [counted(job, f"{folder}/{index}") for index, job in enumerate(jobs)]


def predicted(job: Job, rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    """What the dry run of this rank says, by the command."""
    config = folder / "config.json"
    config.write_text(json.dumps(job.deepspeed_config()))
    words = ["dry-run", "--rank", str(rank), "--world_size", str(ranks), "--json", "--device", "cpu"]
    words += ["--model", job.model, "--tokenizer_name", "bytes", "--block_size", str(BLOCK)]
    words += ["--deepspeed_config", str(config)]
    with (folder / "report.json").open("w+") as out:
        with contextlib.redirect_stdout(out):
            assert main(words) == 0
        out.seek(0)
        return json.load(out)


@pytest.mark.thorough
@pytest.mark.filterwarnings("error:.*autograd kernel")  # a backward through what was sent
@pytest.mark.parametrize(("ranks", "jobs"), [(2, TWO), (2, STAGES), (4, FOUR)], ids=["two", "stages", "four"])
def test_it_counts_what_a_run_counts(ranks: int, jobs: list[Job], tmp_path: Path) -> None:
    real, linear = run_ranks(ranks, both, jobs, str(tmp_path)), torch.nn.functional.linear
    for index, job in enumerate(jobs):
        for rank in (0, ranks - 1) if job.size("pp") > 1 else (ranks - 1,):  # replicas are alike
            dry, wet = predicted(job, rank, ranks, tmp_path), real[rank][index]
            memory = dry["memory_bytes"]
            assert {name: memory[name] for name in wet["memory"]} == wet["memory"], (job, rank)
            kept = memory["activations"] * memory["in_flight"]
            assert wet["activations"] == pytest.approx(kept, rel=0.3), (job, rank)  # a run still has its last inputs
            messages = {
                f"{m['group']} {m['ranks']} {m['operation']}": (m["count"], m["bytes"]) for m in dry["messages"]
            }
            assert messages == wet["messages"], (job, rank)
    assert torch.nn.functional.linear is linear  # what follows in this process computes as before
