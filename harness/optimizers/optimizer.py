"""An optimizer that a config can name: its classes, their options and its state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Range: TypeAlias = Literal[
    "count",
    "decay",
    "not_negative",
    "not_positive",
    "positive",
    "share",
    "two_decays",
    "two_not_negative",
    "two_positive",
]
"""The valid values of an option, by name in the config check."""


@dataclass(frozen=True, kw_only=True)
class OptimizerClass:
    """A class that updates weights.

    Attributes:
        path: its module and name.
        options: arguments of its constructor besides the parameters; None if unknown.
        compiled: whether DeepSpeed compiles it when it is first used.
        on_cpu: whether it can update weights in the host's memory.
        set_by_engine: options that DeepSpeed's engine sets itself.
        refused: options that the constructor accepts only if they are false.
    """

    path: str
    options: tuple[str, ...] | None
    compiled: bool = False
    on_cpu: bool = True
    set_by_engine: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]


@dataclass(frozen=True, kw_only=True)
class OptimizerType:
    """An optimizer by its name in a config.

    Attributes:
        name: value of `optimizer.type`.
        source: where the name is defined. DeepSpeed ignores the case of its own names; torch's are classes of
            torch.optim; the harness's are known only in its runs.
        device: the class that updates weights on the run's device.
        host: the class that DeepSpeed uses instead if optimizer states are offloaded; None for the same class.
        torch: torch's class that DeepSpeed builds instead if the option `torch_adam` is true.
        coupled: torch's class if `adam_w_mode` is false too, with weight decay added to the gradient.
        made_by: "module:function" that makes the optimizer in a run of the harness, called with the parameter groups,
            the options, and the names of all parameters. If "", DeepSpeed makes it, or the class itself for a name of
            the harness. A text, because the function imports torch, and this module must not.
        engine_options: options that DeepSpeed's engine reads and does not pass to the class.
        ranges: option -> valid values, for options that not every optimizer has.
        flags: value of --optim that selects this optimizer -> the options that take a run's arguments.
        family: optimizers of one family have the same states, so that one can resume from a checkpoint of another; ""
            for a family of its own.
        states: number of state values per weight.
        other_states: number of state values per weight outside the decoder layers' matrices; None for `states`.
        state_bytes: bytes of a state value, unless the config keeps states in 16 bits.
        more_states: options that each add a state value if they are on.
        tested_with_zero: whether it is accepted under ZeRO without `zero_allow_untested_optimizer`.
        elementwise: whether each weight is updated independently.
        sets_groups: whether DeepSpeed makes several parameter groups for it, each with its own options.
        package: the package with the class, if DeepSpeed does not install it.
        succeeds: names of DeepSpeed's removed optimizers that this one replaces, in lower case.
        cannot_train: why no run can use it; "" if one can.
        trial: options with which `ds-harness verify` tries it on a tiny model; `lr` is relative to the default
            optimizer's, so that all optimizers move the weights equally far. None to try the default instead.
    """

    name: str
    source: Literal["deepspeed", "torch", "harness"] = "harness"
    device: OptimizerClass
    host: OptimizerClass | None = None
    torch: OptimizerClass | None = None
    coupled: OptimizerClass | None = None
    made_by: str = ""
    engine_options: tuple[str, ...] = ()
    ranges: Mapping[str, Range] = field(default_factory=dict)
    flags: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    family: str = ""
    states: int = 2
    other_states: int | None = None
    state_bytes: float = 4
    more_states: tuple[str, ...] = ("amsgrad",)
    tested_with_zero: bool = False
    elementwise: bool = True
    sets_groups: bool = False
    package: str = ""
    succeeds: tuple[str, ...] = ()
    cannot_train: str = ""
    trial: Mapping[str, object] | None = None

    def class_of(
        self, options: Mapping[str, object], *, offloaded: bool = False, by_torch: bool = False
    ) -> OptimizerClass:
        """Return the class that DeepSpeed builds.

        Args:
            options: `optimizer.params`.
            offloaded: whether optimizer states are offloaded to the host.
            by_torch: whether `torch_adam` is on.
        """
        # In DeepSpeed's order: `torch_adam` decides before offloading does.
        if by_torch and self.coupled is not None and not options.get("adam_w_mode", True):
            return self.coupled
        if by_torch and self.torch is not None:
            return self.torch
        return self.host if offloaded and self.host is not None else self.device

    def runs_on_cpu(self, *, offloaded: bool) -> bool:
        """Return whether a run on a CPU can use it; `offloaded` as in `class_of`."""
        return self.torch is not None or self.class_of({}, offloaded=offloaded).on_cpu

    def states_of(self, options: Mapping[str, object]) -> int:
        """Return the number of state values per weight of a matrix, with these options."""
        return self.states + sum(bool(options.get(name)) for name in self.more_states)

    def shares_state_with(self, other: OptimizerType) -> bool:
        """Return whether it can resume from the states of `other`."""
        return self.name == other.name or (self.family == other.family != "")
