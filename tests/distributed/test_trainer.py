"""The Trainer as a library: a user's own layers, callbacks, evaluation that never hangs, export in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from deepspeed.runtime.activation_checkpointing import checkpointing
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from harness import Trainer, TrainerCallback, TrainingArguments, UserError
from tests.support.ranks import DEVICE, run_ranks
from tests.support.training import Job, rows, tiny_model
from tests.support.workers import for_each, refusal_of

pytestmark = pytest.mark.ranks

SAVED_AT = 8  # of 12 steps


def arguments(folder: Path, config: dict[str, Any], **changes: Any) -> TrainingArguments:
    settings = {"max_steps": 4, "learning_rate": 1e-2, "save_steps": 0, "lr_scheduler_type": "constant", **changes}
    return TrainingArguments(deepspeed_config=config, output_dir=str(folder), **settings)


# -- a model that is no language model ---------------------------------------------------------------------


def points(n: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Points of the plane, labelled by a smooth function of them."""
    return [(x, (x[:1] * x[1:]).sin()) for x in torch.randn(n, 2, generator=torch.Generator().manual_seed(3))]


def layers() -> list[Any]:
    return [
        LayerSpec(nn.Linear, 2, 32),
        torch.tanh,
        TiedLayerSpec("middle", nn.Linear, 32, 32, tied_weight_attr=["weight", "bias"]),
        LayerSpec(nn.Tanh),
        TiedLayerSpec("middle", nn.Linear, 32, 32, tied_weight_attr=["weight", "bias"]),
        TiedLayerSpec("late", nn.Linear, 32, 32),  # the first of two stages has none of it
        TiedLayerSpec("late", nn.Linear, 32, 32),
        LayerSpec(nn.Linear, 32, 1),
    ]


def own_trainer(config: dict[str, Any], folder: str, **changes: Any) -> Trainer:
    return Trainer(
        layers(),
        arguments(Path(folder), config, per_device_eval_batch_size=2, **changes),
        train_dataset=points(64),
        eval_dataset=points(13),
        loss_fn=nn.functional.mse_loss,
    )


def trained(config: dict[str, Any], folder: str) -> tuple[list[float], list[float]]:
    """Losses of the steps, and of evaluations over 13, 1 and 13 samples; a checkpoint lies in between."""
    trainer = own_trainer(config, folder)
    losses = [trainer.training_step().loss for _ in range(SAVED_AT)]
    trainer.save_checkpoint()
    losses += [trainer.training_step().loss for _ in range(SAVED_AT, 12)]
    evaluated = [trainer.evaluate()["eval_loss"], trainer.evaluate(points(1))["eval_loss"]]
    evaluated.append(trainer.evaluate()["eval_loss"])
    trainer.close()
    return losses, evaluated


def resumed(configs: list[dict[str, Any]], folder: str) -> list[list[float]]:
    """Of each config the steps that follow the checkpoint of the config before it."""
    losses = []
    for index, config in enumerate(configs):
        saved = f"{folder}/{(index or len(configs)) - 1}/checkpoint-{SAVED_AT}"
        trainer = own_trainer(config, f"{folder}/resumed-{index}", resume_from_checkpoint=saved)
        losses.append([trainer.training_step().loss for _ in range(SAVED_AT, 12)])
        trainer.close()
    return losses


def trained_and_resumed(configs: list[dict[str, Any]], folder: str) -> tuple[list[Any], list[list[float]]]:
    return for_each(trained, configs, folder), resumed(configs, folder)


def test_a_users_own_layers_train_evaluate_and_resume_alike_in_every_layout(tmp_path: Path) -> None:
    base = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2}
    configs = [
        {**base, "pipeline": {"stages": 2, "partition": "uniform"}, "zero_optimization": {"stage": 1}},
        {**base, "zero_optimization": {"stage": 1}},
        {**base, "zero_optimization": {"stage": 3}},
    ]
    alone = run_ranks(1, trained, configs[1], str(tmp_path))[0]
    assert sum(alone[0][-4:]) < 0.9 * sum(alone[0][:4])  # the four steps of an epoch
    assert alone[1][0] == alone[1][2]  # an evaluation changes nothing
    for whole, gone_on in run_ranks(2, trained_and_resumed, configs, str(tmp_path / "two")):
        for (losses, evaluated), rest in zip(whole, gone_on, strict=True):
            assert losses == pytest.approx(alone[0], rel=1e-5)
            assert evaluated == pytest.approx(alone[1], rel=1e-5)
            assert rest == pytest.approx(alone[0][SAVED_AT:], rel=1e-5)


# -- evaluation, callbacks, export -------------------------------------------------------------------------


class StopAtTwo(TrainerCallback):
    """Asks on one rank alone, in whatever method, which must be enough and must not hang."""

    def __init__(self, asks: bool) -> None:
        self.asks = asks
        self.moments: list[str] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.moments.append("begin")
        control.should_training_stop = self.asks and state.global_step == 2

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.moments.append(f"step {kwargs['record'].step}")
        control.should_training_stop = self.asks and state.global_step == 2
        control.should_log = state.global_step == 1

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_evaluate = self.asks and state.global_step == 1 and "loss" in kwargs["logs"]

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.moments.append("evaluate")

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.moments.append("save")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.moments.append("end")


def stop_and_export(job: Job, folder: str) -> tuple[list[str], float]:
    callback = StopAtTwo(asks=dist.get_rank() == 1)
    settings = arguments(Path(folder), job.deepspeed_config(), logging_steps=100)
    trainer = Trainer(job.model, settings, rows(), rows()[:6], callbacks=[callback])
    trainer.train()
    trainer.train()
    trainer.eval_dataset = rows()[: 2 if dist.get_rank() else 1]
    with pytest.raises(UserError, match="rank 0 has another evaluation data than the other 3 ranks"):
        trainer.evaluate()
    trainer.eval_dataset = rows()[:5]
    if dist.get_rank():  # nobody has to set what is set already
        trainer.run.evaluation_is_new = False
    loss = trainer.evaluate()["eval_loss"]
    trainer.save_model()
    trainer.close()
    return callback.moments, loss


@pytest.mark.parametrize(
    ("layout", "family"), [("pp2tp2z1", "gemma2"), pytest.param("tp2dp2z3", "gpt2", marks=pytest.mark.thorough)]
)
def test_one_ranks_wish_is_done_by_all_and_the_export_holds_what_was_trained(
    layout: str, family: str, tmp_path: Path
) -> None:
    model, folder = tiny_model(tmp_path / family, family, True, vocab_size=301), tmp_path / layout
    results = run_ranks(4, stop_and_export, Job(model, layout), str(folder))
    moments = ["begin", "step 1", "evaluate", "step 2", "end", "begin", "end", "evaluate"]
    assert [each for each, _ in results] == [moments] * 4
    trained = AutoModelForCausalLM.from_pretrained(folder)
    assert trained.get_input_embeddings().weight.shape[0] == 301
    ids = torch.tensor([row["input_ids"] for row in rows()[:5]])
    with torch.no_grad():
        loss = trained(ids, labels=ids).loss.item()
    assert loss == pytest.approx(results[0][1], rel=1e-5)


def export_untrained(jobs: list[Job], folder: str) -> None:
    for job in jobs:
        trainer = Trainer(job.model, arguments(Path(folder), job.deepspeed_config()), rows())
        trainer.save_model(Path(folder) / f"{Path(job.model).name}-{job.layout}")
        trainer.close()


@pytest.mark.parametrize(
    "layouts",
    [{"qwen3": "pp2tp2z1"}, pytest.param({"bloom": "tp4z0", "olmo2": "tp2dp2z3"}, marks=pytest.mark.thorough)],
    ids=["first", "others"],
)
def test_weights_come_out_as_they_went_in_to_the_bit(layouts: dict[str, str], tmp_path: Path) -> None:
    """`layouts`: by family."""
    made = {family: tiny_model(tmp_path / family, family, family == "bloom") for family in layouts}
    jobs = [Job(made[family], layout) for family, layout in layouts.items()]
    run_ranks(4, export_untrained, jobs, str(tmp_path))
    for job in jobs:
        given = load_file(Path(job.model) / "model.safetensors")
        folder = tmp_path / f"{Path(job.model).name}-{job.layout}"
        written = {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}
        assert written.keys() == given.keys()
        assert all(torch.equal(written[name], tensor) for name, tensor in given.items()), job


def checkpointing_state(config: dict[str, Any], model: str, folder: str) -> tuple[bool, bool, int, list[int]]:
    """DeepSpeed's switches for stored activations, the size of the group that shares them, and what it stores."""
    trainer = Trainer(model, arguments(Path(folder), config), train_dataset=rows())
    stored: list[int] = []
    keep = checkpointing.get_partitioned_activations_for_backward

    def count(args: Any, inputs: Any, contiguous: bool) -> Any:
        stored.append(max(part.numel() for part in inputs if isinstance(part, torch.Tensor)))
        return keep(args, inputs, contiguous)

    checkpointing.get_partitioned_activations_for_backward = count
    trainer.training_step()
    checkpointing.get_partitioned_activations_for_backward = keep
    switches = (checkpointing.PARTITION_ACTIVATIONS, checkpointing.CPU_CHECKPOINT, checkpointing.mp_size)
    trainer.close()
    return (*switches, stored)


def test_tensor_parallel_ranks_share_stored_activations_if_the_config_says_so(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "m", "llama", False)
    config = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "pipeline": {"activation_checkpoint_interval": 1},
        "tensor_parallel": {"autotp_size": 2},
        "zero_optimization": {"stage": 1},
        "activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": True},
    }
    for partitioned, on_cpu, size, stored in run_ranks(2, checkpointing_state, config, model, str(tmp_path)):
        # on a CPU they lie in the host's memory anyway
        assert (partitioned, on_cpu, size) == (True, DEVICE[0] != "cpu", 2)
        assert stored == [2 * 32 * 64 // 2] * 2 * 4  # half the hidden state, 2 layers, 4 micro-batches


def refused(config: dict[str, Any], model: str, folder: Path) -> str:
    return refusal_of(lambda: Trainer(model, arguments(folder, config), train_dataset=rows()))


def test_fewer_heads_than_ranks_are_refused_by_every_rank(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "m", "llama", False, num_attention_heads=2, hidden_size=32)
    config = {"train_batch_size": 8, "tensor_parallel": {"autotp_size": 3}}
    for text in run_ranks(3, refused, config, model, tmp_path):
        assert "3 tensor-parallel ranks, but the model has only 2 attention heads" in text
