"""Shares that are not equal: heads, widths and experts that the ranks do not divide, read, trained, resumed, written.

Four ranks are launched once. What they give is held to plain torch in one process, on the whole model.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from harness import Trainer, UserError
from harness.console import Console
from harness.parallel.plans.experts import run_where_aligned
from tests.support.ranks import run_ranks
from tests.support.training import STEPS, Curve, Job, arguments_of, rows, tiny_model, trained, worst

pytestmark = pytest.mark.ranks

LOSS, NORM, LOGITS = 2e-6, 2e-5, 1e-4  # fp32 sums in another order; as for equal shares
VERIFIED = "verified: the sharded model matches the whole one"
# as Qwen2-0.5B: seven query heads to each of two key/value heads, which four ranks share as 4, 3, 4 and 3
QWEN = {"hidden_size": 56, "num_attention_heads": 14, "num_key_value_heads": 2, "head_dim": 4, "intermediate_size": 37}
# two ranks share three key/value heads as 2 and 1; four hold one each, of which two are the same
LLAMA = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8, "intermediate_size": 37}
# 19 columns of an expert are no multiple of the 16 bytes that grouped products take, nor are the whole 37
MIXTRAL = {"intermediate_size": 37, "num_local_experts": 3}
SPREAD = {"expert_parallel": {"enabled": True, "autoep_size": 2}}
BF16 = {"bf16": {"enabled": True}}


@dataclass(frozen=True)
class Outcome:
    """What one rank brings back: curves and what was said at the start, by job; refusals."""

    curves: list[Curve]
    said: list[str]
    refusals: list[str]


def start(job: Job, folder: str, **more: Any) -> tuple[Trainer, str]:
    """A trainer, and what it says of the tiny copy."""
    arguments = arguments_of(job, folder, **more)
    said = io.StringIO()
    console = Console(out=said, error=said, speaks=True)
    trainer = Trainer(job.model, arguments, train_dataset=rows(), console=console)
    return trainer, next((line for line in said.getvalue().splitlines() if "tiny copy" in line), "")


def run(job: Job, folder: str) -> tuple[Curve, str]:
    """Write the model as it was read, train, break off and resume on the way, write it again."""
    trainer, said = start(job, folder)
    trainer.save_model(f"{folder}/untrained")
    curve = []
    for step in range(STEPS):
        if step == 2:
            trainer.save_checkpoint()
            trainer.close()
            trainer, _ = start(job, folder, resume_from_checkpoint="auto", verify_plan="off")
        record = trainer.training_step()
        curve.append((record.loss, record.grad_norm or 0.0))
    trainer.save_model()
    trainer.close()
    return curve, said


def run_all(jobs: list[Job], refused: list[Job], folder: str) -> Outcome:
    """What every rank does."""
    runs = [run(job, place(folder, index)) for index, job in enumerate(jobs)]
    refusals = []
    for job in refused:
        with pytest.raises(UserError) as error:
            start(job, f"{folder}/refused")
        refusals.append(str(error.value))
    return Outcome([curve for curve, _ in runs], [said for _, said in runs], refusals)


def place(folder: str | Path, index: int) -> str:
    return f"{folder}/run-{index}"


@pytest.fixture(scope="module", params=["first", pytest.param("others", marks=pytest.mark.thorough)])
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("unequal")
    qwen = tiny_model(folder / "qwen2", "qwen2", True, **QWEN)
    llama = tiny_model(folder / "llama", "llama", False, **LLAMA, vocab_size=319)
    mixtral = tiny_model(folder / "mixtral", "mixtral", False, **MIXTRAL)
    verified = {"verify_plan": "auto"}
    first = [Job(mixtral, "tp2dp2z3", arguments=verified)]
    others = [
        Job(qwen, "tp4z1", arguments=verified),
        Job(llama, "pp2tp2z0", arguments=verified),
        Job(mixtral, "pp2tp2z1", SPREAD, arguments=verified),
        Job(mixtral, "tp4z1", BF16),
        Job(qwen, "tp4z3"),
        Job(llama, "tp4z1"),
    ]
    jobs = first if request.param == "first" else others
    heads = tiny_model(folder / "heads", "llama", True, num_attention_heads=3, num_key_value_heads=3, hidden_size=48)
    width = tiny_model(folder / "width", "llama", True, intermediate_size=3)
    results = run_ranks(4, run_all, jobs, [Job(heads, "tp4z1"), Job(width, "tp4z1")], str(folder), timeout_s=400)
    return folder, jobs, results, {model: trained(model) for model in {job.model for job in jobs}}


def test_the_curve_is_that_of_one_process_also_after_a_resume(outcome: Any) -> None:
    _, jobs, results, wholes = outcome
    for job, curve in zip(jobs, results[0].curves, strict=True):
        loss, norm = worst(curve, wholes[job.model][0])
        within = (1e-2, 5e-2) if job.config == BF16 else (LOSS, NORM)
        assert loss < within[0] and norm < within[1], (Path(job.model).name, job.layout, job.config, loss, norm)


def test_what_is_read_is_written_to_the_bit(outcome: Any) -> None:
    folder, jobs, *_ = outcome
    for index, job in enumerate(jobs):
        given = load_file(f"{job.model}/model.safetensors")
        written = load_file(f"{place(folder, index)}/untrained/model.safetensors")
        assert given.keys() == written.keys()
        kind = torch.bfloat16 if job.config == BF16 else torch.float32
        assert all(torch.equal(given[name].to(kind), written[name]) for name in given), (job.model, job.layout)


def test_what_is_written_in_the_end_is_the_trained_model(outcome: Any) -> None:
    folder, jobs, _, wholes = outcome
    ids = torch.tensor([row["input_ids"] for row in rows()])
    for index, job in enumerate(jobs):
        if job.config == BF16:
            continue
        written = AutoModelForCausalLM.from_pretrained(place(folder, index))
        run_where_aligned(written, torch.float32)
        with torch.no_grad():
            wanted, got = (model.eval()(ids).logits for model in (wholes[job.model][1], written))
        assert (got - wanted).abs().max() < LOGITS * wanted.abs().max(), (Path(job.model).name, job.layout)


def test_unequal_shares_are_tried_on_a_tiny_copy_though_the_family_is_known(outcome: Any) -> None:
    _, jobs, results, _ = outcome
    for job, said in zip(jobs, results[0].said, strict=True):
        assert said.startswith(VERIFIED if job.arguments else "") and bool(said) == bool(job.arguments), job


def test_ranks_without_a_share_are_refused_in_one_line(outcome: Any) -> None:
    _, _, results, _ = outcome
    for result in results:
        heads, width = result.refusals
        assert "DS902 4 tensor-parallel ranks, but the model has only 3 attention heads" in heads
        assert width == (
            "tensor_parallel.autotp_size 4 does not fit the width 3 of model.layers.0.mlp.gate_proj: use at most 3"
        )
