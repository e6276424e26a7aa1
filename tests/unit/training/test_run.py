"""A run opens what it needs, and lets go of all of it: groups, memory, the lock on its directory."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from torch import nn

from harness import Trainer, TrainingArguments, UserError
from harness.arguments.themes.flags import Help
from harness.checking.rules.rule import Finding
from harness.checkpoint.run_lock import HELD
from harness.console import plain_console
from harness.data.tokenizer import ByteTokenizer
from harness.device.process_group import open_groups
from harness.extras.rebalancing.rebalancer import Rebalancer
from harness.topology.env import LaunchEnv
from harness.training.callbacks import StepRecord, TrainerState
from harness.training.parts.data import UserData
from harness.training.prepare.plan import RunInputs, plan_run
from harness.training.prepare.preparation import release

POINTS = [(torch.tensor([i / 8, 1.0]), torch.tensor([i / 4])) for i in range(8)]
CONFIG = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2}


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Trainer]:
    def trainer(name: str = "run", data: object = POINTS, **arguments: object) -> Trainer:
        args = TrainingArguments(
            str(tmp_path / name), **{"deepspeed_config": CONFIG, "max_steps": 1, "save_steps": 0, **arguments}
        )
        return Trainer([nn.Linear(2, 1)], args, data, loss_fn=nn.functional.mse_loss)

    return trainer


def test_a_run_leaves_the_groups_that_were_there_and_no_lock(make: Callable[..., Trainer]) -> None:
    make().close()  # the world itself stays, as others of the process may use it
    before = open_groups()
    trainer = make()
    assert open_groups() > before and trainer.run.foreign_groups == before
    assert trainer.run.spec.output_dir in HELD
    trainer.close()
    assert open_groups() == before and trainer.run.spec.output_dir not in HELD


def test_the_rules_run_once_in_a_whole_run(make: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch) -> None:
    passes = []

    def count(view: object) -> Iterator[Finding]:
        passes.append(view)
        return iter(())

    check = sys.modules["harness.checking.check"]
    monkeypatch.setattr(check, "RULES", (*check.RULES, replace(check.RULES[0], check=count)))
    trainer = make(max_steps=-1, num_train_epochs=1, warmup_ratio=0.5)
    trainer.train()
    trainer.close()
    assert len(passes) == 1


def test_an_evaluation_set_later_is_used_during_training_too(make: Callable[..., Trainer]) -> None:
    trainer = make(max_steps=2, logging_steps=1)
    trainer.eval_dataset = POINTS
    trainer.args.eval_strategy, trainer.args.eval_steps = "steps", 1
    trainer.train()
    losses = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
    assert len(losses) == 2 and losses[1] < losses[0]
    with pytest.raises(AttributeError):
        trainer.state = TrainerState()  # type: ignore[misc]
    trainer.close()


def test_layers_are_not_moved_after_the_last_step(
    make: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, after_step = [], Rebalancer.after_step

    def noted(rebalancer: Rebalancer, record: StepRecord) -> bool:
        seen.append(record.step)
        return after_step(rebalancer, record)

    monkeypatch.setattr(Rebalancer, "after_step", noted)
    make(max_steps=3, rebalance_steps=1).train()
    assert seen == [1, 2]


def test_a_run_says_which_parameters_the_jsons_weight_decay_leaves_out(
    make: Callable[..., Trainer], capsys: pytest.CaptureFixture[str]
) -> None:
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True, "weight_decay": 0.1}}
    make(deepspeed_config={**CONFIG, "optimizer": optimizer})
    assert "the JSON's weight_decay: not of biases and norms" in capsys.readouterr().out
    make("other")
    assert "weight_decay" not in capsys.readouterr().out


def test_a_step_without_a_label_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    hidden, shown = ({"input_ids": [1, 2, 3], "labels": [label] * 3} for label in (-100, 1))
    for name, rows in (("hidden", [hidden] * 4), ("shown", [hidden, hidden, hidden, shown])):
        args = TrainingArguments(str(tmp_path / name), deepspeed_config=CONFIG, max_steps=1, save_steps=0)
        Trainer("tiny-llama", args, rows).train()
        out = capfd.readouterr()
        assert ("step 1: the global batch has no label in the loss" in out.out + out.err) is (name == "hidden")


def test_to_let_go_of_a_run_again_leaves_the_next_one_alone(make: Callable[..., Trainer]) -> None:
    first = make("first")
    first.close()
    second = make("second")
    release(first.run)
    second.train()
    assert second.state.global_step == 1 and second.run.spec.output_dir in HELD
    second.close()


def test_the_memory_of_a_run_is_free_though_the_trainer_lives(make: Callable[..., Trainer]) -> None:
    trainer = make()
    trainer.train()
    held = [weakref.ref(parameter) for parameter in trainer.run.module.parameters()]
    assert all(reference() is not None for reference in held)
    trainer.close()
    gc.collect()
    assert all(reference() is None or not vars(reference()) for reference in held)
    assert vars(trainer.run.engine.deepspeed) == {}


def test_samples_are_read_by_the_plan_of_the_run_and_without_data_there_are_none(make: Callable[..., Trainer]) -> None:
    with closing(make()) as trainer:
        stream = trainer.run.stream
        assert stream is not None and (stream.micro_batch, stream.accumulation, stream.global_batch) == (2, 2, 4)
        assert [inputs.shape for inputs, _ in stream.next_step()] == [(2, 2), (2, 2)]
    with closing(make("evaluates", None)) as trainer:
        assert trainer.run.stream is None


HF_ONLY = {
    "attn_implementation": "eager",
    "block_size": 4,
    "context_parallel_size": 1,
    "expert_parallel_size": 1,
    "fp8": "emulate",
    "fused_kernels": False,
    "label_smoothing_factor": 0.1,
    "neftune_noise_alpha": 5.0,
    "output_router_logits": True,
    "packing": True,
    "router_aux_loss_coef": 0.1,
    "sample_prompts": "prompts.txt",
    "sample_tokens": 8,
    "sdpa_backend": "math",
    "skip_memory_check": True,
    "use_liger_kernel": True,
    "verify_plan": "on",
}


@pytest.mark.parametrize("name", HF_ONLY)
def test_an_argument_for_huggingface_models_is_refused_for_a_list_of_layers(
    name: str, make: Callable[..., Trainer]
) -> None:
    with pytest.raises(UserError, match=rf"^--{name} needs a HuggingFace model, not a list of layers$"):
        make(**{name: HF_ONLY[name]})


def test_every_argument_that_a_list_of_layers_never_asks_for_is_refused_there(
    make: Callable[..., Trainer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is read while a decoder trains and not while layers do has no effect on layers."""
    names, asked = {item.name for item in fields(TrainingArguments)}, set()
    plain = TrainingArguments.__getattribute__

    def noting(self: TrainingArguments, name: str) -> object:
        frame = sys._getframe(1)
        if name in names:
            asked.add((name, frame.f_code.co_filename, frame.f_lineno))
        return plain(self, name)

    def of_run(run: Callable[[], Trainer]) -> set[tuple[str, str, int]]:
        asked.clear()
        with closing(run()) as trainer:
            trainer.train()
            trainer.save_model()
        return set(asked)

    arguments = {"deepspeed_config": CONFIG, "max_steps": 1, "save_steps": 0, "eval_steps": 1}
    (tmp_path / "prompts.txt").write_text("a")
    more = {"block_size": 8, "sample_prompts": str(tmp_path / "prompts.txt"), "sample_tokens": 1, **arguments}
    text = [{"text": "some words of text"}] * 8
    monkeypatch.setattr(TrainingArguments, "__getattribute__", noting)
    of_decoder = of_run(
        lambda: Trainer(
            "tiny-llama", TrainingArguments(str(tmp_path / "hf"), **more), text, text, processing_class=ByteTokenizer()
        )
    )
    of_layers = of_run(
        lambda: Trainer(
            [nn.Linear(2, 1)],
            TrainingArguments(str(tmp_path / "own"), **arguments),
            POINTS,
            POINTS,
            loss_fn=nn.functional.mse_loss,
        )
    )
    read_for_both = {name for name, *_ in of_decoder & of_layers}
    of_both_kinds = {"seed"}  # of dropout and of the order of samples too
    alone = {name for name, *_ in of_decoder - of_layers} - of_both_kinds
    marked = {item.name for item in fields(TrainingArguments) if Help.of(item).hf_only}
    assert alone <= marked == set(HF_ONLY), alone - marked
    assert read_for_both


@pytest.mark.parametrize(
    "section",
    [
        {"tensor_parallel": {"autotp_size": 2, "sequence_parallel": True}},
        {"tensor_parallel": {"autotp_size": 2}, "expert_parallel": {"enabled": True, "autoep_size": 2}},
        {"context_parallel": {"size": 2}},
        {"tensor_parallel": {"autotp_size": 2}, "tiling": {"loss": 8}},
        {"tensor_parallel": {"autotp_size": 2}, "tiling": {"feed_forward": 8}},
    ],
    ids=["sequence_parallel", "experts", "context", "loss-in-tiles", "blocks-in-tiles"],
)
def test_a_key_for_huggingface_models_is_refused_for_a_list_of_layers(
    section: dict[str, object], tmp_path: Path
) -> None:
    config = {**CONFIG, "train_batch_size": 2, "gradient_accumulation_steps": 1, **section}
    args = TrainingArguments(str(tmp_path), deepspeed_config=config, max_steps=1)
    inputs = RunInputs(
        model=[nn.Linear(2, 1)],
        console=plain_console(0),
        env=LaunchEnv(world_size=2, local_world_size=2),
        loss_fn=nn.functional.mse_loss,
    )
    with pytest.raises(
        UserError, match=r"(sequence_parallel|autoep_size|size|loss|feed_forward) needs a HuggingFace model"
    ):
        plan_run(args, inputs, UserData(train_dataset=POINTS))
