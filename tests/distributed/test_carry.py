"""What travels besides the hidden state: gradients of every floating tensor, whatever lies between its two layers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import nn
from transformers import AutoModelForCausalLM

from harness import Trainer, TrainingArguments
from harness.verify.tiny_copy import tiny_config
from harness.verify.tiny_copy import tiny_model as tiny_copy
from tests.support.ranks import DEVICE, run_ranks
from tests.support.training import (
    BATCH,
    STEPS,
    Curve,
    Job,
    by_torch,
    reference,
    rows,
    steps_of,
    tiny_model,
    train_all,
    worst,
)
from tests.support.workers import for_each

pytestmark = pytest.mark.ranks

WIDTH = 8
LOSS, NORM = 2e-6, 4e-5  # of the norm: processors round the sums of four ranks' states otherwise


def points(n: int) -> list[Any]:
    """Points of the plane with a number of their own, labelled by a smooth function of both."""
    drawn = torch.randn(n, 2, generator=torch.Generator().manual_seed(3))
    return [((x, torch.tensor(i)), x[:1].sin() * (i % 3)) for i, x in enumerate(drawn)]


class First(nn.Module):
    """Gives a hidden state, a state that needs a gradient, a mask, a state in double precision and the numbers."""

    recompute = False

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.side = nn.Linear(2, WIDTH), nn.Linear(2, WIDTH)

    def forward(self, value: Any) -> Any:
        x, number = value
        side = self.side(x)
        return self.inner(x), side, number % 2 == 0, side.double().exp(), number


class Middle(nn.Module):
    """Uses all of it, changes the hidden state, and lets the first state grow."""

    recompute = True

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Any) -> Any:
        hidden, side, mask, double, number = value
        new = torch.tanh(self.inner(hidden)) + mask[:, None] * double.float()[:, :1] * side.mean(-1, keepdim=True)
        grown = torch.cat([side, new[:, :2]], -1)
        return new, grown, mask.view_as(mask), double.view_as(double), number.view_as(number)


class Last(nn.Module):
    """Makes one number of it."""

    recompute = False

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 1)

    def forward(self, value: Any) -> torch.Tensor:
        hidden, side, _, double, number = value
        rest = side.sum(-1, keepdim=True) + double.float().sum(-1, keepdim=True)
        return self.inner(hidden) * (number % 3)[:, None] + rest * 0.1


def config(stages: int, tensor: int, stage: int, **sections: Any) -> dict[str, Any]:
    return {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": 2,  # four micro-batches for the four stages
        "zero_optimization": {"stage": stage},
        "pipeline": {"stages": stages, "partition": "uniform", "activation_checkpoint_interval": 1},
        "tensor_parallel": {"autotp_size": tensor},
        **sections,
    }


PLAIN = config(1, 1, 0, pipeline={"activation_checkpoint_interval": 0})
FIRST = [config(2, 2, 1, activation_checkpointing={"partition_activations": True})]
OTHERS = [
    config(2, 2, 1),
    config(4, 1, 0),
    config(1, 1, 3),
    config(2, 1, 1, pipeline={"stages": 2, "activation_checkpoint_interval": 0}),
    config(1, 2, 2),
]


def arguments(section: dict[str, Any], folder: str) -> TrainingArguments:
    like_by_torch: Any = {"learning_rate": 1e-2, "lr_scheduler_type": "constant", "adam_beta2": 0.95}
    return TrainingArguments(deepspeed_config=section, output_dir=folder, max_steps=STEPS, **like_by_torch)


def own_layers(section: dict[str, Any], folder: str) -> Curve:
    layers = [LayerSpec(First), *[LayerSpec(Middle) for _ in range(3)], LayerSpec(Last)]
    data, loss = (points(STEPS * BATCH), points(13)), nn.functional.mse_loss
    trainer = Trainer(layers, arguments(section, folder), *data, loss_fn=loss)
    curve = [(trainer.evaluate()["eval_loss"], 1.0), *steps_of(trainer)]
    trainer.close()
    return curve


def packed(samples: list[dict[str, list[int]]]) -> Any:
    """Two documents of unequal length in every sample: position ids begin anew at the second."""
    ids = torch.tensor([sample["input_ids"] for sample in samples])
    positions = torch.arange(ids.shape[1]).repeat(len(ids), 1)
    starts = 5 + ids[:, :1] % 7
    return (ids, torch.where(positions < starts, positions, positions - starts)), ids.clone()


def documents(model: str, section: dict[str, Any], folder: str) -> Curve:
    trainer = Trainer(model, arguments(section, folder), train_dataset=rows(), data_collator=packed)
    curve = steps_of(trainer)
    trainer.close()
    return curve


def everywhere(sections: list[dict[str, Any]], model: str, folder: str) -> tuple[list[Curve], list[Curve]]:
    own = for_each(own_layers, sections, f"{folder}/own")
    # the compositions have packed documents in other layouts
    return own, for_each(partial(documents, model), sections[:1], f"{folder}/ids")


@pytest.mark.thorough
@pytest.mark.parametrize("layouts", [FIRST, OTHERS], ids=["first", "others"])
def test_what_travels_keeps_its_value_and_its_gradient_in_every_layout(
    layouts: list[dict[str, Any]], tmp_path: Path
) -> None:
    model = tiny_model(tmp_path / "model", "llama", True, num_hidden_layers=4)  # for four stages
    own, packed_ids = run_ranks(4, everywhere, layouts, model, str(tmp_path), timeout_s=300)[0]
    ((alone,), _) = run_ranks(1, everywhere, [PLAIN], model, str(tmp_path / "alone"))[0]
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).train()
    (ids, positions), labels = packed(rows())
    by_position: Any = {"input_ids": ids, "position_ids": positions, "labels": labels}
    # with a cache transformers would not keep the documents apart
    plain = by_torch(whole, lambda: whole(**by_position, use_cache=False).loss, rate=1e-2)
    for curves, wanted in ((own, alone), (packed_ids, plain)):
        for section, curve in zip(layouts, curves, strict=False):
            loss, norm = worst(curve, wanted)
            assert loss < LOSS and norm < NORM, (section, loss, norm)


# -- models whose layers hand on more than a hidden state --------------------------------------------------

STATES = {
    "gemma3n_text": "dp2z3",  # keys and values shared, inputs of every layer embedded
    # the embeddings go to every layer, a block is shared by several, of which each uses a part of its own
    "zamba2": "pp4z0",
    "inkling2_text": "pp2z1",  # earlier hidden states
    "hy_v4": "pp2z1",  # chosen indices, which are integers
    "deepseek_v4": "pp2z0",  # routed by token id
}

INTERLEAVED = {"stages": 2, "schedule": "interleaved"}


@pytest.mark.thorough
def test_models_that_hand_on_more_than_a_hidden_state(tmp_path: Path) -> None:
    two, four = [], []
    for family, layout in STATES.items():
        path = str(tmp_path / family)
        tiny_copy(tiny_config(family, tensor=2)).save_pretrained(path)
        job = Job(path, layout, arguments={"max_steps": 3})
        if family == "zamba2":
            four += [job, replace(job, layout="pp2dp2z0", config={"pipeline": INTERLEAVED})]
        else:
            two.append(job)
    curves = run_ranks(2, train_all, two, str(tmp_path), timeout_s=400)[0]
    curves += run_ranks(4, train_all, four, str(tmp_path), timeout_s=400)[0]
    for job, curve in zip([*two, *four], curves, strict=True):
        loss, norm = worst(curve, reference(job.model, steps=3))
        more = 1 if DEVICE[0] == "cpu" else 4  # the sums of four ranks, rounded otherwise
        assert loss < more * LOSS and norm < more * NORM, (Path(job.model).name, job.layout, loss, norm)
