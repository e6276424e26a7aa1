"""What happens after a step, what a user's own metrics become, and the outputs that are kept for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harness import Trainer, TrainerCallback, TrainingArguments, UserError
from harness.training.engine.losses import targets
from harness.training.engine.outputs import KeptOutputs
from harness.training.evaluate import computed_metrics
from harness.training.prepare.run import NOTHING_DUE, Run, StepEvents

POINTS = [(torch.tensor([float(i), 1.0]), torch.tensor([float(i)])) for i in range(20)]


def arguments(folder: object = "unused", **changes: Any) -> TrainingArguments:
    config = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4}
    return TrainingArguments(deepspeed_config=config, output_dir=str(folder), max_steps=9, **changes)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    args = arguments(tmp_path_factory.mktemp("due"))
    made = Trainer([torch.nn.Linear(2, 1)], args, POINTS, POINTS[:5], loss_fn=torch.nn.functional.mse_loss)
    yield made
    made.close()


def run_with(trainer: Trainer, args: TrainingArguments, **changes: Any) -> Run:
    spec = replace(trainer.run.spec, args=args, **changes)
    return replace(trainer.run, spec=spec)


def events_after(trainer: Trainer, step: int, **changes: Any) -> StepEvents:
    """What the arguments ask for after this step of 8 samples, 20 of which are an epoch."""
    args = arguments(**{"logging_steps": 3, "save_steps": 4, "eval_steps": 5, **changes})
    run, epoch_ends = run_with(trainer, args), 8 * step // 20 > 8 * (step - 1) // 20
    found = run.events_after(step, epoch_ends=epoch_ends)
    if not epoch_ends and 1 < step < min(run.next_event(step - 1), run.spec.max_steps):  # then the Trainer does not ask
        assert found == NOTHING_DUE
    return found


STEPS = range(1, 10)


@pytest.mark.parametrize(
    ("changes", "log", "evaluate", "save"),
    [
        ({}, [3, 6, 9], [5, 9], [4, 8, 9]),
        ({"logging_strategy": "no", "save_strategy": "no", "eval_strategy": "no"}, [], [], []),
        (
            {"logging_strategy": "epoch", "save_strategy": "epoch", "eval_strategy": "epoch"},
            *([3, 5, 8, 9],) * 3,  # steps in which an epoch ends, and the last
        ),
        ({"save_strategy": "best"}, [3, 6, 9], [5, 9], []),  # an evaluation asks for these
        ({"save_steps": 0}, [3, 6, 9], [5, 9], []),
        ({"logging_steps": 0.3, "eval_steps": 0.5, "save_steps": 0.99}, [3, 6, 9], [5, 9], [9]),  # of 9, rounded up
        ({"logging_first_step": True, "logging_strategy": "no"}, [1], [5, 9], [4, 8, 9]),
        ({"eval_steps": None, "eval_strategy": "steps"}, [3, 6, 9], [3, 6, 9], [4, 8, 9]),  # as often as logs
    ],
)
def test_the_arguments_say_after_which_steps(
    changes: dict[str, Any], log: list[int], evaluate: list[int], save: list[int], trainer: Trainer
) -> None:
    found = {step: events_after(trainer, step, **changes) for step in STEPS}
    assert [step for step in STEPS if found[step].log] == log
    assert [step for step in STEPS if found[step].evaluate] == evaluate
    assert [step for step in STEPS if found[step].save] == save


def test_an_epoch_ends_in_the_step_that_uses_its_last_sample(trainer: Trainer) -> None:
    both, end = ("on_epoch_end", "on_epoch_begin"), ("on_epoch_end",)
    assert [events_after(trainer, step).epoch_events for step in (2, 3, 5, 8)] == [(), both, both, both]
    last = run_with(trainer, arguments(), max_steps=5)
    assert last.events_after(5, epoch_ends=True).epoch_events == end


def test_a_callback_may_change_the_intervals_of_a_run(tmp_path: Path) -> None:
    logged = []

    class Impatient(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                args.logging_steps = 2

        def on_log(self, args: Any, state: Any, control: Any, logs: Any, **kwargs: Any) -> None:
            logged.append(state.global_step)

    args = arguments(tmp_path, logging_steps=100, save_steps=0)
    made = Trainer(
        [torch.nn.Linear(2, 1)], args, POINTS * 8, loss_fn=torch.nn.functional.mse_loss, callbacks=[Impatient]
    )
    made.train()
    made.close()
    assert logged == [4, 6, 8, 9, 9]


def test_a_users_metrics_are_plain_numbers_under_the_prefix(trainer: Trainer) -> None:
    def compute(given: Any) -> dict[str, Any]:
        error = np.abs(given.predictions - given.label_ids)
        return {"error": error.mean(), "eval_worst": torch.tensor(error.max()), "n": len(error)}

    found = computed_metrics(compute, np.array([1.0, 4.0]), np.array([1.0, 2.0]), "eval")
    assert found == {"eval_error": 1.0, "eval_worst": 2.0, "eval_n": 2}
    assert {type(value) for value in found.values()} == {float, int}


def test_metrics_that_are_no_dict_or_fail_are_named(trainer: Trainer) -> None:
    with pytest.raises(UserError, match="compute_metrics returned float: it must return a dict"):
        computed_metrics(lambda given: 1.0, None, None, "eval")  # type: ignore[arg-type,return-value]
    with pytest.raises(ZeroDivisionError):
        computed_metrics(lambda given: {"a": 1 / 0}, None, None, "eval")


def kept(trainer: Trainer, *micro_batches: tuple[Any, Any, int], **given: Any) -> tuple[Any, Any]:
    """What is joined of (outputs, labels, rows that count) of micro-batches."""
    keeper = KeptOutputs(trainer.run.engine, **given)
    with keeper, torch.no_grad():
        for outputs, labels, rows in micro_batches:
            trainer.run.engine.loss.observer(outputs, targets(labels, 1.0, rows))  # type: ignore[misc]
        keeper.gather()
    assert trainer.run.engine.loss.observer is None
    return keeper.joined()


def test_outputs_are_joined_and_shorter_ones_are_filled(trainer: Trainer) -> None:
    one, two = torch.ones(2, 3), torch.full((3, 2), 2.0, dtype=torch.bfloat16).float()
    outputs, labels = kept(trainer, (one, one.long(), 2), (two, two.long(), 2))
    assert outputs.tolist() == [[1, 1, 1], [1, 1, 1], [2, 2, -100], [2, 2, -100]]  # the last row does not count
    assert labels.dtype == np.int64 and labels.tolist() == outputs.tolist()


def test_bf16_is_kept_as_float32_and_numbers_of_a_batch_as_one_each(trainer: Trainer) -> None:
    half = torch.tensor([[0.5], [1.5]], dtype=torch.bfloat16)
    outputs, _ = kept(trainer, (half, torch.zeros(2), 2))
    assert outputs.dtype == np.float32 and outputs.tolist() == [[0.5], [1.5]]
    losses, _ = kept(
        trainer, (half, torch.zeros(2), 2), (half, torch.zeros(2), 2), preprocess=lambda outputs, labels: outputs.sum()
    )
    assert losses.tolist() == [2.0, 2.0]


def test_what_is_preprocessed_gets_the_labels_and_several_outputs_stay_apart(trainer: Trainer) -> None:
    outputs, labels = (torch.ones(2, 1), torch.zeros(2, 4)), (torch.ones(2), torch.zeros(2))
    found, wanted = kept(trainer, (outputs, labels, 1), everywhere=True)
    assert [array.shape for array in found] == [(1, 1), (1, 4)] and [len(array) for array in wanted] == [1, 1]
    best, _ = kept(
        trainer,
        (torch.tensor([[0.1, 0.9]]), torch.tensor([1]), 1),
        preprocess=lambda out, given: out.argmax(-1) == given,
    )
    assert best.tolist() == [True]
    assert kept(trainer) == (None, None)


@pytest.mark.parametrize("kind", [torch.uint8, torch.bool, torch.int8, torch.float16])
def test_outputs_of_any_kind_are_joined(kind: torch.dtype, trainer: Trainer) -> None:
    mask = torch.tensor([[1, 0], [0, 1]]).to(kind)
    outputs, labels = kept(trainer, (mask, torch.zeros(2), 2), (mask, torch.zeros(2), 1))
    assert outputs.tolist() == [[1, 0], [0, 1], [1, 0]] and outputs.dtype == mask.numpy().dtype
    assert labels.tolist() == [0, 0, 0]


def test_an_evaluation_hands_all_outputs_to_the_metrics(trainer: Trainer, tmp_path: Path) -> None:
    seen: list[Any] = []
    args = arguments(tmp_path)
    other = Trainer(
        [torch.nn.Linear(2, 1)], args, POINTS, POINTS[:5], loss_fn=torch.nn.functional.mse_loss,
        compute_metrics=lambda given: seen.append(given) or {"rows": len(given.predictions)},
    )  # fmt: skip
    metrics = other.evaluate()
    other.close()
    assert metrics["eval_rows"] == 5 and seen[0].label_ids.reshape(-1).tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert metrics["eval_loss"] == pytest.approx(
        float(((seen[0].predictions - seen[0].label_ids) ** 2).mean()), rel=1e-5
    )
