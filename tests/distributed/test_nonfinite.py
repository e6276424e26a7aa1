"""A loss or gradient that is not finite: stopped, skipped or reported by all ranks alike, in every kind of engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from harness import Trainer, TrainingArguments, UserError
from harness.checkpoint.exporting.weights import gather_zero3
from harness.deepspeed.zero3_parameters import Partition
from tests.support.ranks import run_ranks, script_on_ranks
from tests.support.training import Job, arguments_of, rows, tiny_model
from tests.support.workers import for_each

pytestmark = pytest.mark.ranks

STEPS, BATCH, WIDTH = 4, 8, 4


class BadGradient(torch.autograd.Function):
    """Gives back what it gets; its gradient is infinite where a value is above 50."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.where(ctx.saved_tensors[0].abs() > 50, float("inf"), gradient)


class Fragile(nn.Module):
    """A linear layer that hands on the infinite gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(BadGradient.apply(x)).tanh()


@dataclass(frozen=True)
class Case:
    """A layout, what is in the data, and what the arguments say about it."""

    stages: int
    zero: int
    value: float
    policy: str
    precision: str = "fp32"
    clipping: float = 1.0


def weights(trainer: Trainer) -> list[Tensor]:
    parameters = list(trainer.engine.deepspeed.module.parameters())
    with gather_zero3(parameters):
        return [p.detach().clone() for p in parameters]


def outcome(case: Case, folder: str) -> dict[str, Any]:
    """What a run of `case` ends in: its message, the steps that moved no weight, those that were counted as skipped."""
    config = {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": case.clipping,
        "pipeline": {"stages": case.stages, "partition": "uniform"},
        "zero_optimization": {"stage": case.zero},
        "bf16": {"enabled": case.precision == "bf16"},
    }
    arguments = TrainingArguments(
        deepspeed_config=config,
        output_dir=folder,
        max_steps=STEPS,
        learning_rate=1e-2,
        max_grad_norm=case.clipping,
        save_steps=0,
        nonfinite=case.policy,
    )
    inputs = torch.randn(STEPS * BATCH, WIDTH, generator=torch.Generator().manual_seed(1))
    inputs[5] = case.value  # in one step of the first epoch
    data = [(x, x.nan_to_num().clamp(-1, 1)[:1]) for x in inputs]
    layers = [LayerSpec(nn.Linear, WIDTH, WIDTH), LayerSpec(Fragile), LayerSpec(nn.Linear, WIDTH, 1), torch.tanh]
    trainer = Trainer(layers, arguments, train_dataset=data, loss_fn=nn.functional.mse_loss)
    message, still = "", []
    held = weights(trainer)
    for _ in range(STEPS):
        try:
            trainer.training_step()
        except UserError as error:
            message = str(error)
            break
        now = weights(trainer)
        still.append(all(torch.equal(a, b) for a, b in zip(held, now, strict=True)))
        held = now
    finite = all(bool(each.isfinite().all()) for each in held)
    unmoved = all(torch.equal(a, b) for a, b in zip(held, weights(trainer), strict=True))
    skipped = trainer.nonfinite.skipped
    trainer.close()
    return {"message": message, "still": still, "finite": finite, "unmoved": unmoved, "skipped": skipped}


KINDS = [(1, 0, "fp32", 1.0), (2, 0, "fp32", 1.0), (2, 1, "bf16", 0.0), (1, 2, "bf16", 1.0), (1, 3, "fp32", 1.0)]
HOW = ((float("nan"), "stop"), (1e3, "skip"))  # what is in the data, and what is said about it
STOP, SKIP = ([Case(*kind[:2], value, policy, *kind[2:]) for kind in KINDS] for value, policy in HOW)
FIRST = [*STOP[1:3], *SKIP[2:], Case(2, 0, 1e3, "stop"), Case(1, 3, float("nan"), "skip")]
OTHERS = [case for case in (*STOP, *SKIP, Case(2, 0, float("nan"), "skip")) if case not in FIRST]
GOES_ON = Case(stages=2, zero=0, value=float("nan"), policy="warn")


@pytest.mark.parametrize("cases", [FIRST, pytest.param(OTHERS, marks=pytest.mark.thorough)], ids=["first", "others"])
def test_a_step_that_is_not_finite_moves_no_weight_and_every_rank_decides_alike(
    cases: list[Case], tmp_path: Path
) -> None:
    ranks = run_ranks(2, for_each, outcome, [*cases, GOES_ON], tmp_path, timeout_s=300)
    assert ranks[0] == ranks[1]
    *results, goes_on = ranks[0]
    assert not goes_on["finite"] and not goes_on["message"] and not goes_on["skipped"]
    for case, found in zip(cases, results, strict=True):
        assert found["finite"], case
        if case.policy == "skip":
            assert found["still"].count(True) == found["skipped"] == 1, (case, found)
            assert not found["message"]
        else:
            what = "the loss is nan" if case.value != case.value else "the gradient is not finite"
            assert what in found["message"] and "(first on stage 0, rank" in found["message"], (case, found)
            assert found["unmoved"] and not any(found["still"])


def save_with_padding(model: str, folder: str) -> tuple[int, bool]:
    """Save weights of which a part is padded with NaN; return how many are, and whether there is a checkpoint."""
    trainer = Trainer(model, arguments_of(Job(model, "dp2z3"), folder), rows())
    padded = 0
    for parameter in trainer.engine.deepspeed.module.parameters():
        divided = Partition.of(parameter)
        padding = parameter.ds_tensor.view(-1)[divided.total - divided.start :]
        padding.fill_(float("nan"))
        padded += len(padding) > 0
    path = trainer.save_checkpoint()
    trainer.close()
    return padded, Path(path).is_dir()


def test_what_pads_a_part_of_a_weight_is_not_looked_at(tmp_path: Path) -> None:
    """DeepSpeed leaves in it what was in the memory."""
    model = tiny_model(tmp_path / "m", "llama", False, mlp_bias=True, intermediate_size=37)
    assert run_ranks(2, save_with_padding, model, str(tmp_path)) == [(0, True), (4, True)]


def test_the_script_stops_before_it_exports_what_is_not_finite(tmp_path: Path) -> None:
    """The only update makes infinite weights of finite gradients, which no later loss would show."""
    model = tiny_model(tmp_path / "m", "llama", False)
    words = ["--model_name_or_path", model, "--tokenizer_name", "bytes", "--block_size", 16]
    words += ["--max_steps", 2, "--learning_rate", 1e38]
    done = script_on_ranks(1, "scripts/train.py", *words, "--save_steps", 1, "--output_dir", tmp_path / "run")
    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    assert "is not finite" in line and "rank 0" in line
    assert not (tmp_path / "run" / "model.safetensors").exists()
    assert not (tmp_path / "run" / "checkpoint-1").exists()
