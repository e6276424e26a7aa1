"""Each record of an optimizer agrees with the classes that DeepSpeed and torch have."""

from __future__ import annotations

import inspect
from pkgutil import resolve_name

import pytest
from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS
from torch import optim

from harness.checking.rules.syntax.ranges import KINDS
from harness.optimizers import DEFAULT, FLAGS, OPTIMIZERS, OptimizerClass, find

CLASSES = {
    each.path: each
    for record in OPTIMIZERS.values()
    for each in (record.device, record.host, record.torch, record.coupled)
    if each is not None and each.options is not None and each.name != "MuonWithAuxAdam"
    # a function that makes the optimizer takes all options as one dict
    if each.path != record.made_by.replace(":", ".")
}


@pytest.mark.parametrize("path", CLASSES)
def test_the_options_of_a_class_are_the_arguments_of_its_constructor(path: str) -> None:
    stated = CLASSES[path]
    assert stated.options == tuple(inspect.signature(resolve_name(path).__init__).parameters)[2:]
    assert stated.compiled == path.startswith("deepspeed.") and {*stated.set_by_engine} <= {*stated.options}


def test_the_options_of_muon_are_those_of_its_two_kinds_of_groups() -> None:
    both = (*DeepSpeedEngine._MUON_HALF_KEYS, *DeepSpeedEngine._ADAM_HALF_KEYS)
    assert set(OPTIMIZERS["Muon"].device.options or ()) == {*both, "muon_lr", "adam_lr", "per_head_muon"}


def test_the_names_are_deepspeeds_and_those_of_torch_that_deepspeed_looks_up() -> None:
    own = {name.lower() for name, each in OPTIMIZERS.items() if each.source == "deepspeed"}
    assert own == set(DEEPSPEED_OPTIMIZERS)
    of_torch = {
        name
        for name, each in vars(optim).items()
        if isinstance(each, type) and issubclass(each, optim.Optimizer) and each is not optim.Optimizer
    }
    looked_up = {name for name in of_torch if name.lower() not in own}
    assert {name for name, each in OPTIMIZERS.items() if each.source == "torch"} == looked_up


def test_zero_is_tested_with_the_classes_that_deepspeed_lists() -> None:
    listed = {each.__name__ for each in ZERO_SUPPORTED_OPTIMIZERS} | {"MuonWithAuxAdam"}  # which it adds when asked
    for record in OPTIMIZERS.values():
        if record.source == "harness":
            continue  # tested here
        assert record.tested_with_zero == (record.device.name in listed), record.name


def test_deepspeed_alone_takes_its_names_in_any_case() -> None:
    assert find("ADAMW") is DEFAULT and find("SGD") is not None and find("sgd") is None and find("") is None


def test_an_option_decides_the_class_and_the_kept_state() -> None:
    adam, muon, sgd = (OPTIMIZERS[name] for name in ("Adam", "Muon", "SGD"))

    def built(offloaded: bool = False, by_torch: bool = False, **options: object) -> str:
        return adam.class_of(options, offloaded=offloaded, by_torch=by_torch).path.rpartition(".")[2]

    assert built() == "FusedAdam" and built(offloaded=True) == "DeepSpeedCPUAdam"
    assert built(by_torch=True) == "AdamW" and built(by_torch=True, adam_w_mode=False) == "Adam"
    assert adam.states_of({"amsgrad": True}) == 3 and sgd.states_of({"momentum": 0.0}) == 0
    assert sgd.states_of({"momentum": 0.9}) == 1 and (muon.states, muon.other_states) == (1, 2)
    assert adam.shares_state_with(DEFAULT) and not adam.shares_state_with(muon)


def test_ranges_are_of_options_that_a_class_has_and_of_kinds_that_the_check_knows() -> None:
    for record in OPTIMIZERS.values():
        classes: list[OptimizerClass] = [each for each in (record.device, record.host, record.torch) if each]
        known = {option for each in classes for option in each.options or ()}
        assert {*record.ranges} <= known, record.name
        assert {*record.ranges.values()} <= {*KINDS}
        assert all({*options} <= known for options in record.flags.values())


def test_a_value_of_optim_selects_one_optimizer() -> None:
    assert len(FLAGS) == sum(len(record.flags) for record in OPTIMIZERS.values())
