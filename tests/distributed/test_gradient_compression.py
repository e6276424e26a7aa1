"""Gradients in 8 and 4 bits between data-parallel ranks: nearly the same losses, every copy of a weight alike.

A resumed run has the numbers of one that never stopped.
"""

from __future__ import annotations

import hashlib
import shutil
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import harness.extras.compression.reduction
from harness import Trainer
from harness.dry_run.ledger import Ledger
from harness.extras.compression.quantization import wire_share
from harness.extras.compression.reduction import ALIGNED, EXACT, PACKED, CompressedReduction
from harness.extras.compression.trial import measure
from harness.parallel.tensor.shard import shard_of
from tests.support.ranks import DEVICE, here, on_device, run_ranks
from tests.support.training import Job, arguments_of, logged, rows, tiny_model, without_shared_memory, worst

pytestmark = pytest.mark.ranks

SIZES, KINDS = [1000, 37, 300, 7000], [PACKED, PACKED, EXACT, ALIGNED]
STEPS = 3
TIMES = {"all_reduce": 2, "all_to_all": 1, "all_gather": 1}
"""How often a rank sends (n - 1) / n of what is exchanged."""


ADAPTED = {"peft_config": LoraConfig(r=4, target_modules="all-linear")}


def compressed(job: Job, bits: int | str) -> Job:
    return replace(job, config={**job.config, "gradient_compression": {"bits": bits}})


def reduction(bits: int) -> CompressedReduction:
    return CompressedReduction(bits=bits, group=dist.group.WORLD, device=here(), sizes=SIZES, kinds=KINDS)


def gradients(step: int) -> list[Tensor]:
    torch.manual_seed(100 * step + dist.get_rank())
    return [torch.randn(size) for size in SIZES]


def mean(step: int) -> list[Tensor]:
    values = gradients(step)
    for value in values:
        dist.all_reduce(value)
    return [value / dist.get_world_size() for value in values]


@on_device
def reduce_alone() -> dict[str, Any]:
    """What a reduction does to gradients without a model: errors of a step and of the sum of 30, and the rest."""
    found: dict[str, Any] = {}
    for bits in (8, 4):
        tried, total = reduction(bits), [torch.zeros(size) for size in SIZES]
        for step in range(30):
            values = gradients(step)
            tried.average(values)
            total = [a + value - exact for a, value, exact in zip(total, values, mean(step), strict=True)]
            if step == 0:
                found[f"first {bits}"] = [float(error.abs().max()) for error in total]
        found[f"all {bits}"] = [float(error.abs().max()) for error in total]
        found[f"digest {bits}"] = [digest(value) for value in values]
    scaled, plain = reduction(8), reduction(8)
    for step, scale in enumerate((1.0, 1.0, 1024.0, 512.0)):
        values, same = [value * scale for value in gradients(step)], gradients(step)
        scaled.average(values, scale)
        plain.average(same)
    found["scaled"] = all(torch.equal(a / scale, b) for a, b in zip(values, same, strict=True))
    spoiled = gradients(9)
    if dist.get_rank() == 1:
        spoiled[0][5], spoiled[3][300] = torch.inf, torch.nan
    plain.average(spoiled)
    found["not finite"] = [int((~value.isfinite()).sum()) for value in spoiled]
    found["residue"] = all(tensor.isfinite().all() for tensor in plain.state().values())
    found["largest"], in_parts = of_small_buckets(gradients(0))
    whole = gradients(0)
    reduction(8).average(whole)
    found["in parts"] = [torch.equal(a, b) for a, b in zip(in_parts, whole, strict=True)]
    found["choice"] = measure(dist.group.WORLD, here()).bits
    return found


class Largest(TorchDispatchMode):
    """Notes the numbers in the largest tensor that is made."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        held = {value.untyped_storage().data_ptr() for value in args if isinstance(value, Tensor)}
        if isinstance(found, Tensor) and found.untyped_storage().data_ptr() not in held:
            self.numbers = max(self.numbers, found.numel())
        return found


def of_small_buckets(values: list[Tensor]) -> tuple[int, list[Tensor]]:
    """What is made of gradients that are larger than a bucket, and the numbers of the largest tensor meanwhile."""
    with patch.object(harness.extras.compression.reduction, "BUCKET", 1024):
        copied = [value.clone() for value in values]
        tried = reduction(8)
        with Largest() as largest:
            tried.average(copied)
        wide = torch.zeros(70, 101)
        wide[:, :100] = values[3].view(70, 100)
        reduction(8).average([*values[:3], wide[:, :100]])  # the last one is not contiguous
    return largest.numbers, [*values[:3], wide[:, :100].reshape(-1)]


def digest(value: Tensor) -> str:
    return hashlib.sha256(value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:12]


def copies(module: nn.Module) -> dict[str, str]:
    """Digests of this rank's weights, by what other ranks with the same weight call it."""
    named = {name: digest(p) for name, p in module.named_parameters()}
    whole = {f"whole {name}": named[name] for name, p in module.named_parameters() if shard_of(p) is None}
    tied = {f"tied {key}": digest(p) for key, weights in module.tied_modules.items() for p in weights.parameters()}
    return {**named, **whole, **tied}


def train(job: Job, output_dir: str) -> dict[str, Any]:
    """Train some steps; return the curve, this rank's weights and place, and the bytes that the last step sent."""
    own = replace(job, arguments={})
    with without_shared_memory():
        trainer = Trainer(job.model, arguments_of(own, output_dir), train_dataset=rows(), **job.arguments)
    curve = []
    for step in range(STEPS):
        with Ledger(trainer.run.spec.layout, dist.get_rank()) if step == STEPS - 1 else nullcontext() as ledger:
            record = trainer.training_step()
        curve.append((record.loss, record.grad_norm or 0.0))
    sent = sum(TIMES.get(message.operation, 0) * traffic.size for message, traffic in ledger.messages({}).items())
    place, weights = trainer.run.groups.coordinate, copies(trainer.engine.deepspeed.module)
    trainer.close()
    return {"curve": curve, "weights": weights, "place": (place.stage, place.tp_rank), "sent": sent}


def stop_and_go_on(job: Job, folder: Path, then: Job) -> dict[str, list[float]]:
    """Losses of steps 3 and 4 of a run, of one that resumes after step 2, and of one that resumes as `then` does."""
    losses = {}
    for name, each in (("whole", job), ("resumed", job), ("other", then)):
        place = folder / name
        if name != "whole" and dist.get_rank() == 0:
            shutil.copytree(folder / "whole" / "checkpoint-2", place / "checkpoint-2")
        dist.barrier()
        more = {"max_steps": 4, "save_steps": 2, "resume_from_checkpoint": None if name == "whole" else "auto"}
        trainer = Trainer(each.model, arguments_of(each, str(place), **more), rows())
        trainer.train()
        trainer.close()
        losses[name] = [row["loss"] for row in logged(place)][-2:] if dist.get_rank() == 0 else []
    return losses


def work(jobs: list[Job], folder: str, then: Job) -> dict[str, Any]:
    found = {"runs": [train(job, f"{folder}/{number}") for number, job in enumerate(jobs)]}
    found["resumed"] = stop_and_go_on(jobs[-1], Path(folder), then)
    found["alone"] = reduce_alone()
    return found


def copies_agree(ranks: list[dict[str, Any]], run: int) -> None:
    """Every weight that several ranks hold is the same on all of them."""
    held: dict[tuple[object, ...], set[str]] = defaultdict(set)
    for rank in ranks:
        stage, tp_rank = rank["runs"][run]["place"]
        for name, value in rank["runs"][run]["weights"].items():
            kind = name.split()[0]
            held[name, *{"tied": (tp_rank,), "whole": (stage,)}.get(kind, (stage, tp_rank))].add(value)
    assert all(len(values) == 1 for values in held.values()), [key for key, values in held.items() if len(values) > 1]


@pytest.mark.thorough
def test_two_ranks_train_with_few_bits_and_resume_to_the_bit(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "llama", "llama", tied=False)
    plain = Job(model, "dp2z0")
    bf16 = {"bf16": {"enabled": True}}
    layouts = [("dp2z0", 8), ("dp2z0", 4), ("dp2z1", 8)]
    jobs = [plain, *(compressed(replace(plain, layout=layout), bits) for layout, bits in layouts)]
    jobs.append(compressed(Job(model, "dp2z1", config=bf16), 8))
    jobs += [replace(plain, arguments=ADAPTED), compressed(replace(plain, arguments=ADAPTED), 8)]
    jobs.append(compressed(Job(model, "dp2z1"), 4))
    ranks = run_ranks(2, work, jobs, str(tmp_path / "runs"), plain, timeout_s=200)
    runs = ranks[0]["runs"]
    wanted, adapted = runs[0]["curve"], runs[-3]["curve"]
    for run, job in zip(runs, jobs, strict=True):
        bits = job.config.get("gradient_compression", {}).get("bits", 0)
        exact = adapted if job.arguments else wanted
        most = {0: 0.0, 8: 3e-4, 4: 1e-2}[bits] if "bf16" not in job.config else 1e-2
        assert worst(run["curve"], exact)[0] <= most, (job, run["curve"], exact)
        if bits:
            assert run["curve"] != exact, job
    if DEVICE[0] == "cpu":  # the ledger sees no group that is written in Python
        assert runs[1]["sent"] <= 0.27 * runs[0]["sent"] and runs[2]["sent"] <= 0.15 * runs[0]["sent"]
    assert max(worst(runs[1]["curve"], runs[3]["curve"])) < 1e-5  # ZeRO-0 and ZeRO-1
    for number in range(len(jobs)):
        copies_agree(ranks, number)
    assert ranks[0]["resumed"]["resumed"] == ranks[0]["resumed"]["whole"] != ranks[0]["resumed"]["other"]

    alone, other = (rank["alone"] for rank in ranks)
    for bits, half_step in ((8, 4.5 / 254), (4, 4.5 / 14)):
        for when in ("first", "all"):  # an error is not carried further than to the next step
            errors = alone[f"{when} {bits}"]
            assert max(errors) <= 2.2 * half_step and errors[2] < 1e-5 < errors[0], (when, errors)
        assert alone[f"digest {bits}"] == other[f"digest {bits}"]
    assert alone["scaled"] and alone["residue"] and alone["not finite"] == other["not finite"] == [128, 0, 0, 128]
    assert alone["choice"] == other["choice"] == 0  # one host
    # blocks that begin with a weight have the same mean wherever it is cut; nothing of a weight's size is made
    assert alone["in parts"][2:] == [True, True] and alone["largest"] <= 1024 * 132 // 128


@pytest.mark.thorough
def test_four_ranks_hold_the_same_weights_and_resume_to_the_bit(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "llama", "llama", tied=True)
    repeated = tiny_model(tmp_path / "phi3", "phi3", tied=False, num_key_value_heads=1)  # parts of a weight have copies
    jobs = [Job(model, "dp4z0"), compressed(Job(model, "dp4z0"), 8), compressed(Job(model, "tp2dp2z0"), 8)]
    jobs += [Job(repeated, "tp2dp2z1"), compressed(Job(repeated, "tp2dp2z1"), 8), compressed(Job(model, "pp2dp2z1"), 8)]
    ranks = run_ranks(4, work, jobs, str(tmp_path / "runs"), compressed(Job(model, "dp4z1"), 8), timeout_s=200)
    runs = ranks[0]["runs"]
    for number, of in enumerate((0, 0, 0, 3, 3, 0)):
        assert worst(runs[number]["curve"], runs[of]["curve"])[0] < 5e-4
        copies_agree(ranks, number)
    assert DEVICE[0] != "cpu" or runs[1]["sent"] <= 0.27 * runs[0]["sent"]
    assert ranks[0]["resumed"]["resumed"] == ranks[0]["resumed"]["whole"]
    assert ranks[0]["resumed"]["other"] == pytest.approx(ranks[0]["resumed"]["whole"], rel=5e-4)
    assert wire_share(8) < 0.27 and wire_share(4) < 0.15
