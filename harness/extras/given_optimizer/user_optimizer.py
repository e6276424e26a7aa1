"""The user's optimizer and scheduler for a model in memory: `Trainer(optimizers=(optimizer, scheduler))`.

A run trains its own parameters: staged, sharded, on another device. It builds an optimizer of the same class with the
same groups over them. The user's optimizer never makes a step. It only serves the scheduler, which sets the options of
its groups (learning rate, perhaps momentum); the run's groups copy them after each step.

Checkpoints hold no scheduler state: a resumed run makes a new scheduler and advances it to its step. So nothing is
unpickled, and a run may be resumed with another schedule.
"""

from __future__ import annotations

import copy
import inspect
import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from deepspeed.pipe import LayerSpec
from torch import Tensor, nn
from torch.optim import Adagrad, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from harness.config import Resolved
from harness.config.values.json_object import JsonObject
from harness.errors import UserError, refuse_all
from harness.extras.given_optimizer.update_scope import Scope, scope_of
from harness.hf.adapters import Adapters, plain_name
from harness.hf.skeleton import ModelSource
from harness.optimizers import DEFAULT
from harness.topology.layout import Layout
from harness.training.engine.optimizer import LateAdagrad, ParameterGroup, grouped
from harness.training.prepare.one_model import tensors_in_memory
from harness.training.prepare.plan import RunInputs
from harness.wording import counted

BITSANDBYTES = "bitsandbytes"
"""The package whose optimizers keep states in blocks; the run makes them itself (harness/extras/blockwise)."""
INDEX = "group_of_user"
"""Key in a group of the run's optimizer: the index of the user's group whose options it copies."""


@dataclass(frozen=True, kw_only=True)
class UserOptimizer:
    """A user's optimizer, described by the names of the model's parameters.

    Attributes:
        optimizer: the user's optimizer; the run uses its class and the options of its groups.
        scheduler: the user's scheduler of this optimizer; None for the arguments' schedule.
        group_of: name of a parameter in the model -> index of its group.
        options: initial options of each group.
        schedule_state: initial state of the scheduler.
        scope: the values on which the update of a weight depends.
    """

    optimizer: Optimizer
    scheduler: LRScheduler | None
    group_of: Mapping[str, int]
    options: Sequence[ParameterGroup]
    schedule_state: JsonObject
    scope: Scope

    @property
    def name(self) -> str:
        return type(self.optimizer).__name__

    @property
    def summary(self) -> str:
        """The optimizer and scheduler in words, for messages."""
        scheduler = "" if self.scheduler is None else f" and scheduler {type(self.scheduler).__name__}"
        return f"optimizer {self.name} with {counted(len(self.options), 'parameter group')}{scheduler}"

    @property
    def hyperparameters(self) -> JsonObject:
        """Options of the groups and of the scheduler that JSON can represent."""
        found: JsonObject = {"groups": [_plain(each) for each in self.options]}
        if self.scheduler is not None:
            found["scheduler"] = {"type": type(self.scheduler).__name__, **_plain(self.schedule_state)}
        return found

    @property
    def description(self) -> str:
        """Class, options and groups as text, which must be equal on all ranks."""
        return json.dumps([self.name, self.hyperparameters, sorted(self.group_of.items())])

    def groups(self, module: nn.Module, first_names: Mapping[str, str]) -> list[ParameterGroup]:
        """Return the trained parameters of this rank's `module` in the user's groups.

        `first_names` as in `parameter_groups`, so that a tied parameter is in the same group on all stages.
        """

        def group(name: str) -> tuple[int, ParameterGroup]:
            index = self._index(first_names.get(name, name))
            return index, {**self.options[index], INDEX: index}

        return grouped(module, group)

    def _index(self, name: str) -> int:
        """Return the group index of a parameter, by its name in the run (a decoder's start with the layer index)."""
        in_model = name.partition(".")[2]
        known = (name, in_model, plain_name(in_model))
        return self.group_of[next(each for each in known if each in self.group_of)]

    def made_for(self, groups: list[ParameterGroup]) -> Optimizer:
        return remade(self.optimizer, groups)

    def schedule(self, own: Callable[[Optimizer], LRScheduler]) -> Callable[[Optimizer], UserSchedule]:
        """Return a function that makes the schedule of the run's optimizer, at its first step.

        Args:
            own: makes the arguments' schedule, for a user without a scheduler.
        """

        def make(optimizer: Optimizer) -> UserSchedule:
            for group, options in zip(self.optimizer.param_groups, self.options, strict=True):
                group.update(copy.deepcopy(options))
            if self.scheduler is not None:
                self.scheduler.load_state_dict(copy.deepcopy(self.schedule_state))
            return UserSchedule(self.scheduler or own(self.optimizer), self.optimizer, optimizer)

        return make

    def require_whole(self, resolved: Resolved, layout: Layout) -> None:
        """Raise UserError if the layout divides values that an update needs as a whole."""
        divides = resolved.zero_stage > 0 or resolved.precision != "fp32" or layout.tp_size > 1 or layout.ep_size > 1
        most = Scope.TENSOR if layout.pp_size > 1 else Scope.MODEL
        if divides:
            most = Scope.ELEMENT
        if self.scope > most:
            what = "the other weights of its parameter" if self.scope is Scope.TENSOR else "all other parameters"
            how = f"{layout}, ZeRO-{resolved.zero_stage}, {resolved.precision}"
            whole = "ZeRO-0 and fp32 without tensor and expert parallelism"
            stages = " and without stages" if self.scope is Scope.MODEL else ""
            raise UserError(
                f"optimizers: {self.name} updates a weight by {what}, which {how} divides: use {whole}{stages}, or an "
                f"optimizer that updates each weight by itself, such as {DEFAULT.name}"
            )


class UserSchedule:
    """Steps the user's scheduler and copies the options of its groups to the run's optimizer.

    It takes the place of a torch scheduler in DeepSpeed's engine.
    """

    def __init__(self, scheduler: LRScheduler, of_user: Optimizer, of_run: Optimizer) -> None:
        self.scheduler = scheduler
        self._of_user, self._of_run = of_user, of_run
        of_user._opt_called = True  # type: ignore[attr-defined]  # noqa: SLF001  # torch warns if it makes no step
        self._copy()

    def step(self) -> None:
        """Advance by one step of the run. Raises UserError for any error of the scheduler, such as one past its end."""
        try:
            self.scheduler.step()
        except Exception as error:  # the user's class may raise anything
            raise UserError(f"optimizers: {type(self.scheduler).__name__}.step(): {error}") from error
        self._copy()

    @property
    def first_learning_rate(self) -> float:
        """The learning rate of the user's first group."""
        return self.get_last_lr()[0]

    def get_last_lr(self) -> list[float]:
        """Return the learning rate of each of the user's groups."""
        return [float(group["lr"]) for group in self._of_user.param_groups]

    def state_dict(self) -> JsonObject:
        """Return the state of the scheduler, and the options that it has set."""
        return {"scheduler": self.scheduler.state_dict(), "groups": options_of(self._of_user)}

    def load_state_dict(self, state: JsonObject) -> None:
        self.scheduler.load_state_dict(state["scheduler"])
        for group, options in zip(self._of_user.param_groups, state["groups"], strict=True):
            group.update(options)
        self._copy()

    def _copy(self) -> None:
        options = options_of(self._of_user)
        for group in self._of_run.param_groups:
            group.update(options[group[INDEX]])


def options_of(optimizer: Optimizer) -> list[JsonObject]:
    return [{k: v for k, v in group.items() if k not in ("params", "param_names")} for group in optimizer.param_groups]


def remade(optimizer: Optimizer, groups: list[ParameterGroup]) -> Optimizer:
    """Return an optimizer of the same class and settings, without state, over other parameters."""
    if type(optimizer) is Adagrad:
        return LateAdagrad(groups, **optimizer.defaults)
    made = type(optimizer).__new__(type(optimizer))
    # Copy attributes instead of calling the constructor, whose arguments are unknown. `step` is a scheduler's wrapper.
    kept = {name: value for name, value in vars(optimizer).items() if name not in ("state", "param_groups", "step")}
    shared = {id(parameter): parameter for group in optimizer.param_groups for parameter in group["params"]}
    vars(made).update(copy.deepcopy(kept, shared))
    made.state = defaultdict(dict)
    made.param_groups = []
    for group in groups:
        made.add_param_group(group)
    return made


def of_run(
    inputs: RunInputs, source: ModelSource | None, adaptation: Adapters | None, resolved: Resolved, layout: Layout
) -> UserOptimizer:
    """Return what was given to a run as `optimizers`. UserError if the run cannot train with it."""
    if inputs.peft_config is not None:
        raise UserError(
            "optimizers and peft_config exclude each other, as no optimizer can hold adapters that do not exist yet: "
            "give model=get_peft_model(model, peft_config), and make the optimizer for its parameters"
        )
    tensors = tensors_in_memory(inputs.model, source, adaptation)
    if not tensors:
        raise UserError(
            "optimizers needs the model in memory that the optimizer was made for, as "
            "AutoModelForCausalLM.from_pretrained returns it: give that as model"
        )
    if isinstance(inputs.model, Sequence) and any(isinstance(layer, LayerSpec) for layer in inputs.model):
        raise UserError("optimizers needs the parameters of all layers, but a LayerSpec has none yet: give modules")
    trained = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}
    if adaptation is not None and not trained:
        trained = dict(adaptation.tensors)
    found = user_optimizer(inputs.optimizers, tensors, trained)
    sections = ["optimizer"] if found.scheduler is None else ["optimizer", "scheduler"]
    refuse_all(
        [
            f"optimizers and the section {section} of the DeepSpeed JSON exclude each other: remove one"
            for section in sections
            if section in resolved.config
        ]
    )
    found.require_whole(resolved, layout)
    return found


def user_optimizer(optimizers: object, tensors: Mapping[str, Tensor], trained: Mapping[str, Tensor]) -> UserOptimizer:
    """Check `optimizers=(optimizer, scheduler)` and find each parameter's group by name.

    Args:
        tensors: name -> tensor of the model in memory.
        trained: the ones that the run trains.

    Raises:
        UserError: the optimizer or scheduler has made steps, belongs to another model, or cannot be resumed.
    """
    optimizer, scheduler = _pair(optimizers)
    _require_fresh(optimizer)
    if scheduler is not None:
        _require_schedule(scheduler, optimizer)
    indices = {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
    group_of = {name: indices[id(tensor)] for name, tensor in tensors.items() if id(tensor) in indices}
    _require_model(optimizer, tensors, {name: tensor for name, tensor in trained.items() if name not in group_of})
    return UserOptimizer(
        optimizer=optimizer,
        scheduler=scheduler,
        group_of=group_of,
        options=copy.deepcopy(options_of(optimizer)),
        schedule_state={} if scheduler is None else copy.deepcopy(scheduler.state_dict()),
        scope=_scope(optimizer),
    )


def _pair(optimizers: object) -> tuple[Optimizer, LRScheduler | None]:
    if not isinstance(optimizers, Sequence) or len(optimizers) != 2:
        raise UserError("optimizers is not a pair: give (optimizer, scheduler) or (optimizer, None)")
    optimizer, scheduler = optimizers
    if optimizer is None:
        raise UserError(
            "optimizers=(None, scheduler): a scheduler sets the learning rate of the optimizer that it was made for, "
            "which would not be trained with: give that one too, optimizers=(scheduler.optimizer, scheduler)"
        )
    if not isinstance(optimizer, Optimizer):
        raise UserError(f"optimizers: a {_kind(optimizer)} is not a torch.optim.Optimizer: give an instance of one")
    if scheduler is not None and not isinstance(scheduler, LRScheduler):
        raise UserError(
            f"optimizers: a {_kind(scheduler)} is not a torch.optim.lr_scheduler.LRScheduler: give an instance of one, "
            "or None for the schedule of the arguments"
        )
    return optimizer, scheduler


def _require_fresh(optimizer: Optimizer) -> None:
    """Raise UserError for an optimizer with state, hooks, or options that a run cannot use."""
    kind = _kind(optimizer)
    problems = []
    # Adagrad makes its state in the constructor, with 0 steps
    if any(state and state.get("step", 1) for state in optimizer.state.values()):
        problems.append(f"{kind} has made steps before: make a new one; resume_from_checkpoint continues a run")
    if any(value for name, value in vars(optimizer).items() if name.endswith("_hooks")):
        problems.append(f"{kind} has hooks, which would not run here: use a TrainerCallback")
    if any(callable(getattr(optimizer, name, None)) for name in ("train", "eval")):
        problems.append(f"{kind} has a mode for training and one for evaluation, which are not switched here")
    if type(optimizer).__module__.partition(".")[0] == BITSANDBYTES:
        problems.append(
            f"{kind} of {BITSANDBYTES} has states in blocks, which this cannot divide or save: leave it out, and name "
            "it as optimizer.type in the DeepSpeed JSON, or give --optim"
        )
    for index, options in enumerate(options_of(optimizer)):
        problems += [
            f"{name} of group {index} is a tensor: give a number"
            for name, value in options.items()
            if isinstance(value, Tensor)
        ]
        if options.get("differentiable"):
            problems.append(f"group {index} is differentiable, which DeepSpeed's step is not: leave it out")
    refuse_all([f"optimizers: {problem}" for problem in problems])


def _require_schedule(scheduler: LRScheduler, optimizer: Optimizer) -> None:
    """Raise UserError for a scheduler of another optimizer, with steps made, or that reads a metric."""
    kind = _kind(scheduler)
    problems = []
    if getattr(scheduler, "optimizer", None) is not optimizer:
        problems.append(f"{kind} was made for another optimizer: make it for this one")
    if steps := getattr(scheduler, "last_epoch", 0):
        problems.append(f"{kind} has made {steps} steps before: make a new one; a resumed run takes it to its step")
    parameters = list(inspect.signature(type(scheduler).step).parameters.values())[1:]
    if any(each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD for each in parameters):
        problems.append(f"{kind} waits for a metric, which a step does not have: use a schedule of the step")
    refuse_all([f"optimizers: {problem}" for problem in problems])


def _require_model(optimizer: Optimizer, tensors: Mapping[str, Tensor], missing: Mapping[str, Tensor]) -> None:
    """Raise UserError for parameters of another model, and for trained parameters in no group."""
    known = {id(tensor) for tensor in tensors.values()}
    problems = []
    for index, group in enumerate(optimizer.param_groups):
        strange = [p for p in group["params"] if id(p) not in known and p.requires_grad]
        if strange:
            problems.append(
                f"group {index} has a parameter of shape {list(strange[0].shape)} that is not the model's: make the "
                "optimizer for the parameters of the very model that the Trainer gets"
            )
    if missing and not problems:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        problems.append(
            f"no group has {next(iter(missing))}{more}: add them to a group, or set their requires_grad to False"
        )
    refuse_all([f"optimizers: {problem}" for problem in problems])


def _scope(optimizer: Optimizer) -> Scope:
    """Return the widest scope of the groups; groups with equal options are tried once."""
    trials: dict[str, tuple[JsonObject, list[Tensor]]] = {}
    for options, group in zip(options_of(optimizer), optimizer.param_groups, strict=True):
        rate = {"lr": 1e-2} if isinstance(options.get("lr"), int | float) else {}  # a warm-up begins at 0
        trial = {name: value for name, value in options.items() if not name.endswith("lr")} | rate
        trials.setdefault(repr(trial), ({**options, **rate}, []))[1].extend(group["params"])

    def maker(options: JsonObject) -> Callable[[list[Tensor]], Optimizer]:
        return lambda parameters: remade(optimizer, [{**options, "params": parameters}])

    return max(scope_of(maker(options), of_group) for options, of_group in trials.values() if of_group)


def _plain(options: Mapping[str, object]) -> JsonObject:
    return {name: value for name, value in options.items() if _is_json(value)}


def _is_json(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_json, value))
    return value is None or isinstance(value, bool | int | float | str)


def _kind(value: object) -> str:
    return value.__name__ if isinstance(value, type) else type(value).__name__
