"""An optimizer of the user's: by which values it updates a weight, what is refused, and how its scheduler goes on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from bitsandbytes.optim import AdamW8bit
from deepspeed.pipe import LayerSpec
from peft import LoraConfig
from torch import nn, optim
from torch.optim import lr_scheduler as schedules
from transformers import AutoConfig

from harness import Trainer, TrainingArguments, UserError
from harness.extras.given_optimizer.update_scope import Scope
from harness.extras.given_optimizer.user_optimizer import UserOptimizer, remade, user_optimizer
from harness.hf.locate import model_directory
from harness.installed import is_installed
from tests.support.training import rows


class Lion(optim.Optimizer):
    """A user's own class, with a setting that is an attribute."""

    def __init__(self, params: Any, lr: float, *, sharpness: float) -> None:
        super().__init__(params, {"lr": lr, "beta": 0.9})
        self.sharpness = sharpness

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                mean = self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))
                mean.lerp_(parameter.grad, 1 - group["beta"])
                parameter.add_((mean * self.sharpness).tanh(), alpha=-group["lr"])


class Counting(Lion):
    """Counts its steps on the instance: ZeRO calls it once for each of its parts."""

    steps = 0

    def step(self, closure: Any = None) -> None:
        self.steps += 1
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.mul_(1 - 1e-3 * self.steps)


class Scaled(optim.SGD):
    """Scales its step by the norm of all gradients."""

    def step(self, closure: Any = None) -> None:
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1.0)
        super().step()


class Noisy(optim.SGD):
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad += torch.randn_like(parameter)
        super().step()


class Idle(optim.SGD):
    def step(self, closure: Any = None) -> None:
        pass


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))


Make = Callable[[list[nn.Parameter]], optim.Optimizer]
ADAMW: Make = lambda p: optim.AdamW(p, lr=1e-3)  # noqa: E731
SGD: Make = lambda p: optim.SGD(p, lr=0.1, momentum=0.9)  # noqa: E731


def given(
    make: Make, schedule: Callable[[Any], Any] = lambda _: None, layers: nn.Module | None = None
) -> UserOptimizer:
    layers = layers or model()
    named = dict(layers.named_parameters())
    optimizer = make(list(layers.parameters()))
    return user_optimizer((optimizer, schedule(optimizer)), named, {n: p for n, p in named.items() if p.requires_grad})


@pytest.mark.parametrize(
    ("make", "scope"),
    [
        *((lambda p, kind=kind: kind(p, lr=1e-3), Scope.ELEMENT) for kind in (optim.AdamW, optim.NAdam, optim.Adagrad)),
        *(
            (lambda p, kind=kind: kind(p, lr=1e-3), Scope.ELEMENT)
            for kind in (optim.RMSprop, optim.Adamax, optim.Rprop)
        ),
        (SGD, Scope.ELEMENT),
        (lambda p: Lion(p, 1e-3, sharpness=9.0), Scope.ELEMENT),
        (lambda p: optim.Adafactor(p, lr=1e-3), Scope.TENSOR),
        (lambda p: transformers.Adafactor(p, lr=1e-3, relative_step=False), Scope.TENSOR),
        (lambda p: optim.Muon([each for each in p if each.dim() == 2], lr=1e-3), Scope.TENSOR),
        (lambda p: Scaled(p, lr=0.1), Scope.MODEL),
        (lambda p: Counting(p, 1e-3, sharpness=9.0), Scope.TENSOR),
    ],
    ids=[
        *("AdamW", "NAdam", "Adagrad", "RMSprop", "Adamax", "Rprop", "SGD", "Lion", "Adafactor", "of transformers"),
        *("Muon", "by the global norm", "by calls"),
    ],
)
def test_by_which_values_an_optimizer_updates_a_weight(make: Make, scope: Scope) -> None:
    layers = nn.Linear(3, 4, bias=False)
    assert given(make, layers=layers).scope is scope


@pytest.mark.parametrize(
    ("make", "schedule", "said"),
    [
        (optim.LBFGS, None, "LBFGS cannot make a step here: .*closure"),
        (lambda p: optim.SparseAdam(p), None, "SparseAdam cannot make a step here: .*dense gradients"),
        (lambda p: Idle(p, lr=0.1), None, "Idle does not change the parameters"),
        (lambda p: Noisy(p, lr=0.1), None, "Noisy draws random numbers"),
        (lambda p: optim.AdamW(p[:2], lr=0.1), None, "no group has 1.weight and 3 more: add them to a group, or set"),
        (lambda p: optim.AdamW([*p, nn.Parameter(torch.ones(7))], lr=0.1), None, r".* of shape \[7\] that is not the"),
        (lambda p: optim.AdamW(p, lr=torch.tensor(0.1)), None, "lr of group 0 is a tensor: give a number"),
        (lambda p: optim.AdamW(p, lr=0.1, differentiable=True), None, "group 0 is differentiable"),
        (lambda p: AdamW8bit(p), None, "AdamW8bit of bitsandbytes has states in blocks, .* give --optim"),
        (lambda p: optim.AdamW, None, "a AdamW is not a torch.optim.Optimizer: give an instance"),
        (SGD, lambda o: schedules.ReduceLROnPlateau(o), "ReduceLROnPlateau waits for a metric"),
        (SGD, lambda o: schedules.StepLR, "a StepLR is not a torch.optim.lr_scheduler.LRScheduler: give an instance"),
        (SGD, lambda o: schedules.StepLR(SGD(o.param_groups[0]["params"]), 3), "StepLR was made for another optimizer"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_what_a_run_could_not_continue_is_refused_by_name(make: Make, schedule: Any, said: str) -> None:
    with pytest.raises(UserError, match=f"^optimizers: {said}"):
        given(make, schedule or (lambda _: None))


def test_an_optimizer_or_a_scheduler_that_has_made_steps_is_refused() -> None:
    layers = model()
    optimizer = SGD(list(layers.parameters()))
    scheduler = schedules.StepLR(optimizer, 3)
    layers(torch.ones(1, 3)).sum().backward()
    named = dict(layers.named_parameters())
    optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(UserError, match="SGD has hooks"):
        user_optimizer((optimizer, None), named, named)
    optimizer.step()
    scheduler.step()
    with pytest.raises(UserError, match="SGD has made steps before"):
        user_optimizer((optimizer, None), named, named)
    optimizer.state.clear()
    optimizer._optimizer_step_post_hooks.clear()
    with pytest.raises(UserError, match="StepLR has made 1 steps before"):
        user_optimizer((optimizer, scheduler), named, named)
    with pytest.raises(UserError, match=r"optimizers=\(None, scheduler\): .*scheduler.optimizer"):
        user_optimizer((None, scheduler), named, named)
    with pytest.raises(UserError, match="optimizers is not a pair"):
        user_optimizer(optimizer, named, named)


def trainer_of(folder: Path, config: dict[str, Any], **options: Any) -> Trainer:
    decoder = transformers.AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_directory("tiny-llama")))
    optimizer = options.pop("kind", optim.SGD)(decoder.parameters(), lr=0.1)
    schedule = schedules.ConstantLR(optimizer) if "scheduler" in config else None
    args = TrainingArguments(deepspeed_config={"train_batch_size": 4, **config}, max_steps=1, output_dir=str(folder))
    model = options.pop("model", decoder)
    return Trainer(model, args, rows(), optimizers=(optimizer, schedule), **options)


@pytest.mark.parametrize(
    ("config", "options", "said"),
    [
        ({"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}, {}, "optimizers and the section optimizer of the Deep"),
        ({"scheduler": {"type": "WarmupLR", "params": {}}}, {}, "optimizers and the section scheduler of the Deep"),
        pytest.param(
            *({}, {"peft_config": LoraConfig(r=2)}, "optimizers and peft_config exclude each other.*get_peft_model"),
            marks=pytest.mark.skipif(not is_installed("harness.extras"), reason="adapters are an extra"),
        ),
        ({}, {"model": "tiny-llama"}, "optimizers needs the model in memory that the optimizer was made for"),
        ({}, {"model": [LayerSpec(nn.Linear, 2, 2), nn.Linear(2, 2)], "loss_fn": max}, "a LayerSpec has none yet"),
        ({"zero_optimization": {"stage": 1}}, {"kind": optim.Adafactor}, "Adafactor updates a weight by the other wei"),
    ],
    ids=["optimizer in the JSON", "schedule in the JSON", "peft_config", "a name", "layers not built", "ZeRO"],
)
def test_what_an_optimizer_excludes_is_one_line(tmp_path: Path, config: Any, options: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        trainer_of(tmp_path, config, **options)


def test_frozen_parameters_may_be_in_a_group_or_in_none() -> None:
    layers = model()
    layers[0].requires_grad_(False)
    assert given(ADAMW, layers=layers).group_of["0.weight"] == 0
    assert "0.weight" not in given(lambda p: optim.AdamW(p[2:]), layers=layers).group_of


@pytest.mark.parametrize("make", [ADAMW, lambda p: Lion(p, 1e-3, sharpness=7.0), lambda p: optim.Adagrad(p, lr=0.1)])
def test_an_optimizer_of_the_same_class_makes_the_same_steps_on_other_parameters(make: Make) -> None:
    layers, other = model(), model()
    optimizer = make(list(layers.parameters()))
    groups = [{**group, "params": list(other.parameters())} for group in optimizer.param_groups]
    schedules.StepLR(optimizer, 3)  # it puts a step() on the instance
    again = remade(optimizer, groups)
    for _ in range(3):
        for each, stepped in ((layers, optimizer), (other, again)):
            each(torch.arange(3.0)[None]).square().sum().backward()
            stepped.step()
            stepped.zero_grad()
    pairs = list(zip(layers.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(one, two) for one, two in pairs) and again.state.keys() <= set(other.parameters())


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "cosine": lambda o: transformers.get_cosine_schedule_with_warmup(o, 2, 9),
    "one cycle, momentum too": lambda o: schedules.OneCycleLR(o, max_lr=[1.0, 0.3], total_steps=9),
    "several": lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o, 0.1, total_iters=3), schedules.CosineAnnealingLR(o, 5)], milestones=[3]
    ),
    "chained": lambda o: schedules.ChainedScheduler([schedules.ExponentialLR(o, 0.9), schedules.StepLR(o, 2)]),
    "cyclic": lambda o: schedules.CyclicLR(o, 0.01, 0.1, step_size_up=2),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_groups_of_a_run_follow_the_scheduler_from_the_first_step_on_and_again(name: str) -> None:
    def two_groups(parameters: list[nn.Parameter]) -> optim.Optimizer:
        return optim.SGD([{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.5}], lr=0.1, momentum=0.8)

    plain = two_groups(list(model().parameters()))
    scheduler, wanted = SCHEDULES[name](plain), []
    user = given(two_groups, SCHEDULES[name])
    for _ in range(9):
        wanted.append([(group["lr"], group["momentum"]) for group in plain.param_groups])
        plain.step()
        scheduler.step()
    for _ in range(2):  # as after layers have moved between stages
        run = user.made_for(user.groups(model(), {})[::-1])  # the rank's own order
        schedule = user.schedule(lambda _: pytest.fail("the user gave one"))(run)
        initial, found = copy.deepcopy(schedule.state_dict()), []
        for _ in range(9):
            found.append([(group["lr"], group["momentum"]) for group in run.param_groups][::-1])
            assert schedule.get_last_lr() == [rate for rate, _ in found[-1]]
            schedule.step()
        assert found == wanted
    schedule.load_state_dict(initial)
    assert [(group["lr"], group["momentum"]) for group in run.param_groups][::-1] == wanted[0]


def test_a_scheduler_that_has_ended_is_one_line() -> None:
    user = given(SGD, lambda o: schedules.OneCycleLR(o, max_lr=1.0, total_steps=2))
    schedule = user.schedule(lambda _: pytest.fail("the user gave one"))(user.made_for(user.groups(model(), {})))
    with pytest.raises(UserError, match=r"^optimizers: OneCycleLR.step\(\): Tried to step"):
        for _ in range(4):
            schedule.step()
