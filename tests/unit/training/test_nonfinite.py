"""What follows where something is not finite: each policy, each case, and weights that are looked at before a save."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from harness import Trainer, TrainingArguments, UserError
from harness.arguments.themes.run import NONFINITE
from harness.checkpoint.tensors.not_saved import NotSaved
from harness.console import plain_console
from harness.training.engine.engine import Engine, StepOutcome
from harness.training.engine.nonfinite import NonFinite, NonFiniteStep, _not_finite

NAN, INF = float("nan"), float("inf")
POINTS = [(torch.tensor([i / 8, 1.0]), torch.tensor([i / 4])) for i in range(8)]


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    config = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 4}
    args = TrainingArguments(str(tmp_path_factory.mktemp("run")), deepspeed_config=config, max_steps=1)
    layers = [nn.Linear(2, 2), nn.Linear(2, 1).requires_grad_(False), nn.Linear(1, 1)]
    made = Trainer(layers, args, POINTS, loss_fn=nn.functional.mse_loss)
    yield made
    made.close()


@pytest.fixture
def engine(trainer: Trainer) -> Iterator[Engine]:
    """An engine whose weights are as they were afterwards."""
    before = {name: value.clone() for name, value in trainer.run.module.state_dict().items()}
    yield trainer.run.engine
    trainer.run.module.load_state_dict(before)


def outcome(**changes: Any) -> StepOutcome:
    usual = {"loss": 1.5, "grad_norm": 2.5, "finite_gradient": True, "applied": True, "parts": {}}
    return StepOutcome(**{**usual, **changes})


LOST = {"loss": NAN, "grad_norm": None, "finite_gradient": False, "applied": False}


@pytest.mark.parametrize("policy", NONFINITE)
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        pytest.param({}, None, id="all-is-well"),
        pytest.param({"loss": 1e38, "grad_norm": 1e38}, None, id="large"),
        pytest.param({"grad_norm": None}, None, id="no-norm-is-known"),
        pytest.param(LOST, "step 3: the loss is nan (first on stage 0, rank 0)", id="loss"),
        pytest.param({**LOST, "loss": -INF}, "step 3: the loss is -inf (first on", id="loss-without-end"),
        pytest.param(
            {"grad_norm": None, "finite_gradient": False, "applied": False},
            "step 3: the gradient is not finite, although the loss is (first on",
            id="gradient",
        ),
    ],
)
def test_each_policy_acts_on_a_step_and_only_where_something_is_wrong(
    policy: str, changes: dict[str, Any], words: str | None, engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    judge = NonFinite(policy, plain_console(0))
    raises = {"stop": UserError, "rollback": NonFiniteStep}.get(policy)
    with pytest.raises(raises) if words and raises else nullcontext() as caught:
        judge.judge(3, outcome(**changes), engine)
    said = capsys.readouterr().out
    assert judge.skipped == (words is not None and raises is None)
    if words is None:
        assert said == ""
    elif raises is None:
        assert said.startswith(f"warning: {words}") and said.endswith(": the step is skipped\n")
    else:
        assert caught is not None and str(caught.value).startswith(words)
        assert ("training stops" in str(caught.value)) is (policy == "stop")


def test_a_step_that_changed_weights_all_the_same_is_said_to_and_not_counted(
    engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    judge = NonFinite("warn", plain_console(0))
    judge.judge(3, outcome(loss=NAN), engine)
    assert "the weights were updated" in capsys.readouterr().out and judge.skipped == 0
    judge.summary(10)
    assert capsys.readouterr().out == ""
    for step in (4, 5):
        judge.judge(step, outcome(**LOST), engine)
    capsys.readouterr()
    judge.summary(1)
    assert capsys.readouterr().out == "warning: skipped 2 of 1 step: loss or gradient was not finite\n"


@pytest.mark.parametrize(("loss", "said"), [(1.0, ""), (NAN, "nan"), (INF, "inf")])
def test_an_evaluation_that_is_not_finite_is_said(loss: float, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    NonFinite("stop", plain_console(0)).judge_evaluation(loss)
    assert capsys.readouterr().out == (f"warning: the evaluation loss is {said}\n" if said else "")


@pytest.mark.parametrize(
    ("policy", "raised", "words"),
    [
        ("stop", UserError, r"weight is not finite \(rank 0\): model is not written; resume from an older checkpoint"),
        ("skip", NotSaved, r"weight is not finite \(rank 0\): model is not written$"),
        ("warn", NotSaved, r"weight is not finite \(rank 0\): model is not written$"),
        ("rollback", NonFiniteStep, r"weight is not finite \(rank 0\) after the last step$"),
    ],
)
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_weights_that_are_not_finite_are_not_written(
    policy: str, raised: type[UserError], words: str, bad: float, engine: Engine
) -> None:
    judge = NonFinite(policy, plain_console(0))
    judge.judge_weights(engine, "model")
    trained = [p for p in engine.deepspeed.module.parameters() if p.requires_grad and p.dim() == 2]
    trained[0].data[1, 0] = bad
    with pytest.raises(raised, match=words) as caught:
        judge.judge_weights(engine, "model")
    assert type(caught.value) is raised


def test_what_is_not_trained_is_not_looked_at(engine: Engine) -> None:
    frozen = [p for p in engine.deepspeed.module.parameters() if not p.requires_grad]
    assert frozen
    for parameter in frozen:
        parameter.data.fill_(NAN)
    NonFinite("stop", plain_console(0)).judge_weights(engine, "model")


@pytest.mark.parametrize(
    ("tensor", "finite"),
    [
        pytest.param(torch.tensor([3e38, 3e38]), True, id="a-sum-that-overflows"),
        pytest.param(torch.tensor([6e4, 6e4, -6e4]).half(), True, id="a-sum-that-overflows-in-half"),
        pytest.param(torch.tensor([INF, -INF]), False, id="a-sum-that-is-none"),
        pytest.param(torch.tensor([1.0, NAN]).bfloat16(), False, id="nan-in-bf16"),
        pytest.param(torch.empty(0), True, id="nothing"),
        pytest.param(torch.tensor(INF), False, id="a-number"),
        pytest.param(torch.empty(3, device="meta"), True, id="without-values"),
    ],
)
def test_every_value_of_a_weight_counts(tensor: torch.Tensor, finite: bool) -> None:
    others = {"first": nn.Parameter(torch.ones(2)), "last": nn.Parameter(torch.zeros(3))}
    found = _not_finite({"first": others["first"], "this": nn.Parameter(tensor), "last": others["last"]})
    assert found == (None if finite else "this")
