"""The norm that is reported and clipped by, held to float64: with tensors large enough that float32 sums go wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from tests.support.ranks import run_ranks
from tests.support.training import Job, rows, tiny_model, train_all

pytestmark = pytest.mark.ranks

LARGE = {"hidden_size": 512, "vocab_size": 10_000, "num_hidden_layers": 2}  # an embedding of 5 million elements
ONE_STEP = {"max_steps": 1}
NORM = 2e-6  # of gradients that are themselves rounded to fp32; a sum of squares in fp32 is off by 1e-5 and more


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model(tmp_path_factory.mktemp("large") / "model", "llama", True, **LARGE)


def exact_norm(model_dir: str) -> float:
    """The gradient norm of the first step, in float64 throughout."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64).train()
    ids = torch.tensor([row["input_ids"] for row in rows()])
    logits = model(ids).logits
    cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1)).backward()
    squares = [parameter.grad.square().sum() for parameter in model.parameters() if parameter.grad is not None]
    return float(torch.stack(squares).sum().sqrt())


FIRST, OTHERS = ("pp2z1", "tp2z2", "dp2z3"), ("pp2z0", "tp2z0", "dp2z0", "dp2z1")


@pytest.mark.parametrize("layouts", [FIRST, pytest.param(OTHERS, marks=pytest.mark.thorough)], ids=["first", "others"])
def test_the_norm_of_a_large_tensor_is_exact_in_every_stage_and_layout(
    layouts: tuple[str, ...], large: str, tmp_path: Path
) -> None:
    wanted = exact_norm(large)
    jobs = [Job(large, layout, arguments=ONE_STEP) for layout in layouts]
    if layouts is OTHERS:
        offloaded = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
        jobs.append(Job(large, "dp2z2", offloaded, ONE_STEP))
    curves = run_ranks(2, train_all, jobs, str(tmp_path), timeout_s=300)[0]
    off = {f"{job.layout} {job.config}": curve[0][1] / wanted - 1 for job, curve in zip(jobs, curves, strict=True)}
    assert max(map(abs, off.values())) < NORM, off
