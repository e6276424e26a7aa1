"""Values of flags: what each type takes from the command line, a file or Python, and what it answers to all else."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import HfArgumentParser

from harness import TrainingArguments, UserError
from harness.arguments.themes.flags import Flags, flag, groups
from harness.arguments.themes.lora import LoraArguments
from harness.arguments.themes.preferences import PreferenceArguments
from harness.arguments.themes.script import ScriptArguments
from harness.command_line.parsing import shown_default
from harness.config.values.typed import typed
from harness.errors import UserErrors
from harness.hf.locate import model_directory
from harness.installed import read_run_config

WITH_OTHERS = ("use_dora", "load_in_4bit", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "bnb_4bit_compute_dtype")
"""Flags that are refused without another one, besides those of LoRA."""


class Kind(Enum):
    """As transformers has for strategies and schedules."""

    COSINE = "cosine"
    THREE = 3


TAKEN = [
    pytest.param(int, "7", 7, id="whole"),
    pytest.param(int | None, " +7 ", 7, id="whole-with-spaces"),
    pytest.param(int, "-0", 0, id="whole-minus-nothing"),
    pytest.param(int, "1_000", 1000, id="whole-with-underscores"),
    pytest.param(int, "7.0", 7, id="whole-with-a-point"),
    pytest.param(int, "1e3", 1000, id="whole-with-an-e"),
    pytest.param(int, 7.0, 7, id="whole-from-a-float"),
    pytest.param(int, np.int64(2**62 + 1), 2**62 + 1, id="whole-from-numpy"),
    pytest.param(int, np.float32(3), 3, id="whole-from-numpys-float"),
    pytest.param(int, Fraction(6, 2), 3, id="whole-from-a-fraction"),
    pytest.param(int, Kind.THREE, 3, id="whole-from-an-enum"),
    pytest.param(int, "9007199254740993", 2**53 + 1, id="whole-beyond-a-float"),
    pytest.param(float, "1e-5", 1e-5, id="number"),
    pytest.param(float, ".5", 0.5, id="number-without-a-nought"),
    pytest.param(float, 2, 2, id="number-whole"),
    pytest.param(float | None, Fraction(1, 4), 0.25, id="number-from-a-fraction"),
    pytest.param(float, np.float64(0.1), 0.1, id="number-from-numpy"),
    pytest.param(bool, True, True, id="true"),
    pytest.param(bool, "YES", True, id="yes"),
    pytest.param(bool | None, 0, False, id="nought"),
    pytest.param(bool, "False", False, id="false"),
    pytest.param(bool | str, "Yes", True, id="yes-or-a-word"),
    pytest.param(bool | str, False, False, id="false-or-a-word"),
    pytest.param(bool | str, "auto", "auto", id="a-word-or-true"),
    pytest.param(bool, np.True_, True, id="true-of-numpy"),
    pytest.param(str, "a", "a", id="text"),
    pytest.param(str | None, Path("a/b"), "a/b", id="text-of-a-path"),
    pytest.param(str, Kind.COSINE, "cosine", id="text-of-an-enum"),
    pytest.param(str, ["csv", "wandb"], "csv,wandb", id="text-of-a-list"),
    pytest.param(str, (), "", id="text-of-nothing"),
    pytest.param(list[str], "a b", ["a b"], id="words-of-a-text"),
    pytest.param(list[str], Path("a"), ["a"], id="words-of-a-path"),
    pytest.param(list[str] | None, ["a", "b"], ["a", "b"], id="words-of-a-list"),
    pytest.param(list[str], [Path("a"), "b"], ["a", "b"], id="words-of-paths"),
    pytest.param(list[str], {"b", "a", "c"}, ["a", "b", "c"], id="words-of-a-set-in-one-order"),
    pytest.param(str | Mapping[str, object] | None, {"a": 1}, {"a": 1}, id="mapping"),
    pytest.param(str | Mapping[str, object] | None, ' {"a": 1}', {"a": 1}, id="mapping-as-json"),
    pytest.param(str | Mapping[str, object] | None, Path("a.json"), "a.json", id="mapping-as-a-file"),
    pytest.param(str | Mapping[str, object] | None, "zero2", "zero2", id="mapping-as-a-name"),
]


@pytest.mark.parametrize(("hint", "value", "found"), TAKEN)
def test_a_value_is_taken_in_the_type_of_its_flag(hint: object, value: object, found: object) -> None:
    got = typed(hint, value)
    assert got == found and isinstance(got, type(found))


@pytest.mark.parametrize(
    ("hint", "value", "words"),
    [
        pytest.param(int, "", "not a number", id="whole-of-nothing"),
        pytest.param(int, "7.5", "not a whole number", id="whole-of-a-part"),
        pytest.param(int, "nan", "not a whole number", id="whole-of-nan"),
        pytest.param(int, "-inf", "not a whole number", id="whole-of-inf"),
        pytest.param(int, "1e400", "not a whole number", id="whole-beyond-all"),
        pytest.param(int, "9" * 400, "more than 9223372036854775807", id="whole-of-400-digits"),
        pytest.param(int, 10**40, "more than 9223372036854775807", id="whole-beyond-torch"),
        pytest.param(Mapping[str, int], '{"a":' * 10**5, "not JSON: its values are nested", id="deep-JSON"),
        pytest.param(int, "0x10", "not a number", id="whole-in-hex"),
        pytest.param(int, True, "not a number", id="whole-of-true"),
        pytest.param(int, b"7", "not a number", id="whole-of-bytes"),
        pytest.param(int, [7], "not a number", id="whole-of-a-list"),
        pytest.param(float, "1,5", "not a number", id="number-with-a-comma"),
        pytest.param(float, "5%", "not a number", id="number-of-a-hundred"),
        pytest.param(float, False, "not a number", id="number-of-false"),
        pytest.param(float, 1j, "not a number", id="number-complex"),
        pytest.param(bool, "on", "not true or false", id="on"),
        pytest.param(bool, 2, "not true or false", id="two"),
        pytest.param(bool, "", "not true or false", id="no-word"),
        pytest.param(str, 3, "not a text", id="text-of-a-number"),
        pytest.param(str, {"a": 1}, "not a text", id="text-of-a-mapping"),
        pytest.param(list[str], 3, "not a list", id="words-of-a-number"),
        pytest.param(list[str], {"a": 1}, "not a list", id="words-of-a-mapping"),
        pytest.param(str | Mapping[str, object], "{a: 1}", "not JSON: Expecting property name", id="mapping-no-json"),
        pytest.param(str | Mapping[str, object], 3, "neither a path nor a dictionary", id="mapping-of-a-number"),
        pytest.param(str | Mapping[str, object], ["a"], "neither a path nor a dictionary", id="mapping-of-a-list"),
    ],
)
def test_another_value_is_told_in_words(hint: object, value: object, words: str) -> None:
    with pytest.raises(ValueError, match=f"^{words}"):
        typed(hint, value)


@given(st.integers(-(2**63) + 1, 2**63 - 1), st.floats(allow_nan=False, allow_infinity=False))
def test_a_number_comes_back_from_its_text(whole: int, number: float) -> None:
    assert typed(int, str(whole)) == typed(int, whole) == whole
    assert typed(float, repr(number)) == typed(float, number) == number


@dataclass(kw_only=True)
class Colours(Flags):
    """A theme."""

    TITLE: ClassVar[str] = "Colours"

    shade: float = flag(0.5, "how dark", least=0)
    name: str | None = flag(None, "which", choices=("red", "blue"))
    seen: bool = flag(False, "whether it is seen")
    layers: list[str] = flag(["a", "b"], "where")

    def check(self) -> None:
        """Refuse what cannot be seen."""
        if self.seen and self.shade == 0:
            raise UserError("--seen needs --shade")


@dataclass(kw_only=True)
class Sizes(Flags):
    """Another theme."""

    width: int = flag(3, "how wide", least=1)


@dataclass(kw_only=True)
class Both(Colours, Sizes):
    """Two themes."""


def test_a_class_of_several_themes_has_the_flags_and_the_checks_of_each() -> None:
    assert groups(Both) == (Colours, Sizes) and groups(Colours) == (Colours,)
    both = Both(shade="0.25", width="4", layers=["c"])  # type: ignore[arg-type]
    assert (both.shade, both.width, both.layers, both.name) == (0.25, 4, ["c"], None)
    assert both.given == {"shade", "width", "layers"}
    with pytest.raises(UserError, match="--seen needs --shade"):
        Both(seen=True, shade=0)
    assert [shown_default(item) for item in fields(Both)] == ["3", "0.5", "", "False", "a b"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        pytest.param({"shade": -1e-9}, "--shade -1e-09: must be at least 0", id="below-the-least"),
        pytest.param({"shade": "inf"}, "--shade inf: must be a finite number", id="infinite"),
        pytest.param({"shade": "-inf"}, "--shade -inf: must be a finite number", id="minus-infinite"),
        pytest.param({"name": "green"}, "--name green: not one of red, blue", id="no-choice"),
        pytest.param({"name": ""}, "--name : not one of red, blue", id="no-word"),
        pytest.param({"seen": "perhaps"}, "--seen 'perhaps': not true or false", id="neither"),
        pytest.param({"width": 0}, "--width 0: must be at least 1", id="nought"),
        pytest.param({"width": 1.5}, "--width 1.5: not a whole number", id="a-part"),
    ],
)
def test_a_value_that_is_not_allowed_is_told_with_its_flag(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        Both(**given)
    assert str(caught.value) == words


@pytest.mark.parametrize("kind", [TrainingArguments, LoraArguments, ScriptArguments, PreferenceArguments])
def test_none_stands_for_every_default_and_counts_as_not_given(kind: type[Flags]) -> None:
    nothing = kind(**{item.name: None for item in fields(kind)})
    assert nothing == kind() and nothing.given == set()


@pytest.mark.parametrize("kind", [TrainingArguments, LoraArguments, ScriptArguments, PreferenceArguments])
def test_every_default_is_a_value_that_its_flag_takes(kind: type[Flags]) -> None:
    alone = [item.name for item in fields(kind) if item.name not in WITH_OTHERS and "lora" not in item.name]
    again = kind(**{name: getattr(kind(), name) for name in alone})
    assert all(getattr(again, item.name) == getattr(kind(), item.name) for item in fields(kind))


@pytest.mark.parametrize("kind", [TrainingArguments, Both])
def test_a_flag_that_is_set_later_counts_as_given_and_is_checked_alike(kind: type[Flags]) -> None:
    made: Any = kind()
    name, good, bad = ("max_steps", "7", "many") if kind is TrainingArguments else ("width", 7.0, 0)
    with pytest.raises(UserError, match=f"--{name} "):
        setattr(made, name, bad)
    assert made == kind() and made.given == set()
    setattr(made, name, good)
    assert getattr(made, name) == 7 and made.given == {name}
    with pytest.raises(UserError, match=f"--{name} "):
        setattr(made, name, bad)
    assert getattr(made, name) == 7
    setattr(made, name, None)  # its default again
    assert made == kind() and made.given == set()
    made.of_ones_own = 3  # as a program may note on it
    assert made.given == set() and made.of_ones_own == 3


def test_copies_know_what_was_given() -> None:
    made = TrainingArguments(max_steps=7)
    made.seed = 3
    for again in (copy.copy(made), copy.deepcopy(made), pickle.loads(pickle.dumps(made))):  # our own
        assert again == made and again.given == {"max_steps", "seed"}
        again.bf16 = True
        assert again.given == {"max_steps", "seed", "bf16"} and made.given == {"max_steps", "seed"}


def test_a_flag_that_is_set_later_contradicts_the_file_as_one_given_at_once() -> None:
    made = TrainingArguments(deepspeed_config={"train_batch_size": 8, "gradient_clipping": 0.5})
    assert read_run_config(made, world_size=1).resolved.config["gradient_clipping"] == 0.5
    made.max_grad_norm = 0.1
    with pytest.raises(UserError, match=r"--max_grad_norm is 0.1 and gradient_clipping is 0.5"):
        read_run_config(made, world_size=1)


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(UserErrors) as caught:
        TrainingArguments(learning_rate=-1, seed=-2, lr_scheduler_type="steep")
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == [
        "--seed -2", "--learning_rate -1", "--lr_scheduler_type steep",
    ]  # fmt: skip
    with pytest.raises(UserErrors) as caught:
        TrainingArguments(optim="no", output_dir=" ")
    assert len(str(caught.value).splitlines()) == 2
    with pytest.raises(UserErrors) as caught:
        TrainingArguments(cutoff_len=512, lr=1e-3)
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == [
        "TrainingArguments takes no cutoff_len", "TrainingArguments takes no lr",
    ]  # fmt: skip


def test_a_copy_with_changes_asks_for_what_the_original_and_the_changes_ask_for(tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), learning_rate=1e-3, deepspeed_config={"train_batch_size": 8})
    changed = replace(args, seed=7)
    assert changed.given - {"output_dir"} == {"learning_rate", "deepspeed_config", "seed"}
    assert (changed.learning_rate, changed.seed, changed.output_dir) == (1e-3, 7, str(tmp_path))
    assert read_run_config(replace(changed, seed=42), world_size=1).resolved.train_batch == 8
    lora = LoraArguments(use_peft=True)
    assert replace(lora, lora_r=4).given == {"use_peft", "lora_r"}
    assert "seed" in TrainingArguments(seed=42).given  # which may contradict the JSON


def test_a_file_of_a_model_is_answered_with_its_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=f"is a file: give its directory, {tmp_path}$"):
        model_directory(str(tmp_path / "config.json"))


def test_values_that_do_not_fit_each_other_are_said_with_those_that_are_wrong_alone() -> None:
    with pytest.raises(UserError) as told:
        TrainingArguments(seed=-1, max_steps=0, learning_rate="abc", save_strategy="no", save_seconds=3)
    lines = str(told.value).splitlines()
    assert [line.split()[0] for line in lines] == ["--seed", "--learning_rate", "--max_steps", "--save_seconds"]
    with pytest.raises(UserError, match=r"^--eval_steps 'x': not a number$"):
        TrainingArguments(eval_steps="x", load_best_model_at_end=True, save_steps=1)


@dataclass
class Mine(TrainingArguments):
    """A class that a program derives."""

    model_max_length: int = 512  # no flag: a field as any dataclass has
    learning_rate: float = 1e-4
    notes: list[str] = field(default_factory=list)


@dataclass
class Ready(TrainingArguments):
    """A class with what HuggingFace's scripts do in `__post_init__`."""

    steps_per_day: int = 0

    def __post_init__(self) -> None:
        """Set flags before and after they are checked."""
        self.eval_steps = 5
        super().__post_init__()
        self.max_steps = self.steps_per_day * 7 or self.max_steps


def test_a_class_that_a_program_derives_is_checked_as_its_base() -> None:
    mine = Mine("x", model_max_length=7, learning_rate="1e-3")  # type: ignore[arg-type]
    assert (mine.model_max_length, mine.learning_rate, Path(mine.output_dir).name) == (7, 1e-3, "x")
    assert mine.given == {"model_max_length", "learning_rate", "output_dir"}
    assert replace(mine, seed=3).model_max_length == 7
    for wrong, words in (({"adam_beta1": 2}, "adam_beta1 2: must be below 1"), ({"max_steps": 0}, "max_steps 0")):
        with pytest.raises(UserError, match=words):
            Mine("x", **wrong)
    with pytest.raises(UserError, match="takes no micro_batch_size: use --per_device_train_batch_size"):
        Mine(micro_batch_size=4)  # type: ignore[call-arg]
    mine.model_max_length = 8
    mine.notes.append("one")
    assert mine.model_max_length == 8 and Mine().notes == []
    assert Mine().given == set() and Mine(learning_rate=None).learning_rate == 1e-4  # type: ignore[arg-type]


def test_a_class_that_a_program_derives_knows_what_is_given_and_other_names() -> None:
    mine = Mine(deepspeed={"train_batch_size": 8, "gradient_clipping": 0.5}, max_grad_norm=1.0, ddp_timeout=1800)  # type: ignore[call-arg]
    assert mine.given == {"deepspeed_config", "max_grad_norm"} and mine.ddp_timeout == 1800
    for again in (mine, copy.deepcopy(mine), pickle.loads(pickle.dumps(mine)), replace(replace(mine, seed=3))):
        assert again.without_effect == {"ddp_timeout": 1800}
        with pytest.raises(UserError, match=r"--max_grad_norm is 1.0 and gradient_clipping is 0.5"):
            read_run_config(again, world_size=1)


def test_an_argument_that_is_assigned_is_refused_as_one_that_is_passed() -> None:
    args = TrainingArguments()
    for name, value in (("group_by_length", True), ("torch_compile", True), ("eval_delay", 7)):
        with pytest.raises(UserError, match=f"takes no {name}: "):
            setattr(args, name, value)
        assert getattr(args, name, None) in (None, False)
    args.push_to_hub, args.evaluation_strategy, args.of_the_program = False, "epoch", 3  # type: ignore[attr-defined]
    assert (args.push_to_hub, args.eval_strategy, args.of_the_program) == (False, "epoch", 3)  # type: ignore[attr-defined]
    assert args.given == {"eval_strategy"}
    derived = type("Derived", (TrainingArguments,), {"data_seed": None})()
    derived.data_seed = 7
    assert derived.data_seed == 7


def test_a_class_that_a_program_derives_may_set_flags_in_its_post_init() -> None:
    made = Ready("x", steps_per_day=3, load_best_model_at_end=True)
    assert (made.eval_steps, made.max_steps) == (5, 21)
    assert made.given == {"output_dir", "steps_per_day", "load_best_model_at_end", "eval_steps", "max_steps"}
    assert replace(made, seed=3).given == made.given | {"seed"}
    (parsed,) = HfArgumentParser(Ready).parse_args_into_dataclasses(["--steps_per_day", "2"])
    assert (parsed.max_steps, parsed.given) == (14, {"steps_per_day", "eval_steps", "max_steps"})
    with pytest.raises(UserError, match="--seed -1: must be at least 0"):
        Ready(seed=-1)


def test_a_copy_keeps_that_a_default_was_given() -> None:
    made = replace(TrainingArguments(learning_rate=5e-5, seed=3), max_steps=3)
    assert made.given - {"output_dir"} == {"learning_rate", "seed", "max_steps"}
    optimizer = {"type": "AdamW", "params": {"lr": 1e-4}}
    made = replace(made, deepspeed_config={"train_batch_size": 8, "optimizer": optimizer})
    with pytest.raises(UserError, match=r"--learning_rate is 5e-05 and optimizer.params.lr is 0.0001"):
        read_run_config(made, world_size=1)
