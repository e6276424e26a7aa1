"""A GPU's kernels in the layers of a model, in every layout: the numbers of plain torch on the whole model.

Torch's operations stand in for the kernels: `tests/unit/extras/test_kernels.py` holds them equal.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from harness import Trainer
from harness.extras.fusing.residual_norms import NormOfSum
from tests.support.ranks import run_ranks
from tests.support.torch_kernels import use_torch
from tests.support.training import Curve, Job, arguments_of, reference, rows, steps_of, tiny_model, worst

pytestmark = pytest.mark.ranks

LOSS, NORM = 5e-6, 1e-5  # fp32 sums in another order
SHARED = {"tensor_parallel": {"autotp_size": 2, "sequence_parallel": True}}
STORED = {"pipeline": {"stages": 2, "schedule": "zero-bubble", "activation_checkpoint_interval": 0}}
FIRST = [("llama", "tp2z1", SHARED), ("llama", "dp2z3", {})]
OTHERS = [
    ("llama", "tp2z0", {}),
    ("qwen3", "pp2z1", {}),
    ("qwen3", "pp2z0", STORED),
    ("gemma3_text", "dp2z2", {}),
    ("gemma3_text", "tp2z1", SHARED),
    ("llama", "cp2z1", {"context_parallel": {"size": 2}}),
]


def train_with_kernels(jobs: list[Job], folder: str) -> list[tuple[Curve, int]]:
    """Of each job its curve, and how many norms of this rank take a sum."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        use_torch(patch)
        for index, job in enumerate(jobs):
            trainer = Trainer(job.model, arguments_of(job, f"{folder}/{index}"), rows())
            forwards = [getattr(module.forward, "__func__", None) for module in trainer.run.module.modules()]
            found.append((steps_of(trainer), sum(isinstance(each, NormOfSum) for each in forwards)))
            trainer.close()
    return found


@pytest.mark.parametrize("cases", [FIRST, pytest.param(OTHERS, marks=pytest.mark.thorough)], ids=["first", "others"])
def test_layers_with_kernels_train_as_those_of_transformers(
    cases: list[tuple[str, str, dict[str, object]]], tmp_path: Path
) -> None:
    models = {family: tiny_model(tmp_path / family, family, False) for family, *_ in cases}
    wanted = {model: reference(model) for model in models.values()}
    jobs = [Job(models[family], layout, config) for family, layout, config in cases]
    for job, (curve, joined) in zip(jobs, run_ranks(2, train_with_kernels, jobs, str(tmp_path))[0], strict=True):
        loss, norm = worst(curve, wanted[job.model])
        assert loss < LOSS and norm < NORM, (Path(job.model).name, job.layout, job.config, loss, norm)
        assert joined > 0, (Path(job.model).name, job.layout)
