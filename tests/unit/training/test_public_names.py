"""What a program sees of the package: its names, the signature of its arguments, and no effect of an import."""

from __future__ import annotations

import inspect
import logging
import pydoc
import subprocess
import sys
from dataclasses import Field, fields, replace
from io import StringIO
from pathlib import Path

import pytest
from transformers import HfArgumentParser

import harness
from harness import TrainingArguments
from harness.arguments.themes.flags import ALIASES, Help, default_of, flags_of
from harness.arguments.themes.lora import LoraArguments
from harness.arguments.themes.preferences import PreferenceArguments
from harness.arguments.themes.script import ScriptArguments
from harness.command_line import parse
from harness.config import AutoValues
from harness.config.values.typed import takes
from harness.console import Console, warn
from harness.installed import read_run_config
from harness.quiet import quiet


def test_every_public_name_is_listed_and_there() -> None:
    assert set(harness.__all__) < set(dir(harness))
    assert all(getattr(harness, name) is not None for name in dir(harness))
    assert {"Trainer", "UserError", "ColumnParallelLinear", "ByteTokenizer", "read_run_config"} <= set(dir(harness))
    with pytest.raises(AttributeError, match="has no attribute 'Trainr'"):
        _ = harness.Trainr


def test_an_import_changes_nothing_of_the_program() -> None:
    code = (
        "import sys, logging; hook = sys.excepthook; from harness import UserError, ConfigError, TrainingArguments, "
        "read_run_config, EarlyStoppingCallback, StepRecord, TrainerControl, TrainerState; "
        "assert sys.excepthook is hook; assert not logging.getLogger().handlers; "
        "assert 'torch' not in sys.modules; TrainingArguments(max_steps='many')"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr.startswith("error: --max_steps 'many': not a number (")
    assert len(ended.stderr.splitlines()) == 1


@pytest.mark.thorough
def test_the_trainer_leaves_transformers_as_it_is() -> None:
    code = (
        "from transformers.masking_utils import AttentionMaskInterface; "
        "from transformers.modeling_utils import AttentionInterface; "
        "found = lambda: (AttentionInterface.get_interface, AttentionMaskInterface.__getitem__); "
        "before = found(); from harness import Trainer; assert found() == before"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("kind", [TrainingArguments, LoraArguments, ScriptArguments, PreferenceArguments])
def test_the_signature_shows_every_flag_with_its_type_and_default(kind: type) -> None:
    shown = inspect.signature(kind).parameters
    assert {name: item.default for name, item in shown.items()} == {
        item.name: default_of(item) for item in fields(kind)
    }
    assert all(not isinstance(item.annotation, str) for item in shown.values())
    assert "learning_rate: float = 5e-05" in pydoc.render_doc(TrainingArguments, renderer=pydoc.plaintext)


def test_huggingfaces_parser_makes_arguments_of_which_the_changed_ones_count_as_given() -> None:
    parser = HfArgumentParser(TrainingArguments)
    parser.format_help()
    words = ["--max_steps", "7", "--bf16", "--deepspeed_config", "zero2", "--report_to", "csv", "--seed", "42"]
    (made,) = parser.parse_args_into_dataclasses(words)
    assert (made.max_steps, made.bf16, made.deepspeed_config) == (7, True, "zero2")
    assert made.given - {"output_dir"} == {"max_steps", "bf16", "deepspeed_config", "report_to"}
    assert TrainingArguments(deepspeed_config={"train_batch_size": 8}).given == {"deepspeed_config"}
    config = {"train_batch_size": 8, "gradient_clipping": 0.5}
    copied = replace(made, deepspeed_config=config)
    assert read_run_config(copied, world_size=1).resolved.config["gradient_clipping"] == 0.5


KINDS = (ScriptArguments, TrainingArguments, LoraArguments, PreferenceArguments)
VALUES = {
    "optim": "sgd",
    "lr_scheduler_type": "cosine",
    "lr_scheduler_kwargs": '{"num_cycles": 2}',
    "report_to": "csv,wandb",
    "deepspeed_config": '{"a": 1}',
    "resume_from_checkpoint": "auto",
    "fused_kernels": "false",
    "use_liger_kernel": "true",  # to HuggingFace's parser it is a boolean
    "preference_label_smoothing": "0.1",
    "simpo_gamma": "1.5",
}
QUANTIZING = ("quant_type", "use_double_quant", "compute_dtype")
COMPANIONS = {
    "load_best_model_at_end": ("--eval_steps", "5"),
    "early_stopping_patience": ("--eval_steps", "5"),
    "save_strategy": ("--eval_steps", "5"),
    "model_revision": ("--model_name_or_path", "a/b"),
    "lr_scheduler_kwargs": ("--lr_scheduler_type", "cosine"),
    **{item.name: ("--use_peft",) for item in fields(LoraArguments) if item.name != "use_peft"},
    **{f"bnb_4bit_{name}": ("--use_peft", "--load_in_4bit") for name in QUANTIZING},
    **dict.fromkeys(("preference_beta", "preference_label_smoothing", "simpo_gamma"), ("--preference", "simpo")),
    **dict.fromkeys(("desirable_weight", "undesirable_weight"), ("--preference", "kto")),
}


def a_value(name: str, item: Field[object], hint: object) -> tuple[str, ...]:
    """Words for a flag: a value other than its default."""
    if name in VALUES:
        return (VALUES[name],)
    if Help.of(item).choices:
        return (Help.of(item).choices[-1],)
    found = {bool: ("true",), int: ("3",), float: ("0.5",), list: ("q_proj", "v_proj"), str: ("a b",)}
    return next(words for each, words in found.items() if takes(hint, each))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        pytest.param(name, words, id="-".join((name, *words)))
        for kind in KINDS
        for name, (item, hint) in flags_of(kind).items()
        for words in (a_value(name, item, hint), *([()] if hint is bool and not default_of(item) else []))
        if item.init  # else scripts have flags of that name
    ],
)
def test_huggingfaces_parser_reads_every_flag_as_ours(name: str, words: tuple[str, ...]) -> None:
    given = [f"--{name}", *words, *COMPANIONS.get(name, ())]
    ours = parse(KINDS, given, prog="t", description="", epilog="")
    theirs = HfArgumentParser(KINDS).parse_args_into_dataclasses(given, look_for_args_file=False)
    assert ours == theirs
    assert [made.given for made in ours] == [made.given for made in theirs]
    assert name in {name for made in theirs for name in made.given}


@pytest.mark.parametrize(
    ("alias", "words"), [(alias, a_value(own, *flags_of(TrainingArguments)[own])) for alias, own in ALIASES.items()]
)
def test_huggingfaces_parser_takes_its_own_names_too(alias: str, words: tuple[str, ...]) -> None:
    (made,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses([f"--{alias}", *words])
    assert made.given == {ALIASES[alias]}


def test_a_default_that_a_config_may_take_stands_once() -> None:
    assert TrainingArguments().auto_values(world_size=1, max_steps=1) == AutoValues()


def test_a_program_can_collect_what_the_console_prints(tmp_path: Path) -> None:
    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(f"{record.levelname} {record.getMessage()}")
            names.append(record.name)

    lines: list[str] = []
    names: list[str] = []
    logger, handler = logging.getLogger("harness"), Collect()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        out, error = StringIO(), StringIO()
        for speaks in (True, False):
            console = Console(out=out, error=error, speaks=speaks)
            console.say("step 1: 50%")
            console.warn("the disk is nearly full")
        console.fail("no\nroom")
        exec("console.fail('no room')", {"__name__": "harness.training.trainer", "console": console})
        with quiet(tmp_path / "log", rank=0), pytest.warns(UserWarning, match="of a module"):
            for _ in range(2):
                exec("warn('of a module')", {"__name__": "harness.extras.lora", "warn": warn})
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    assert lines == [
        "INFO step 1: 50%",
        "WARNING the disk is nearly full",
        "ERROR no room",
        "ERROR no room",
        "WARNING of a module",
    ]
    assert names == ["harness"] * 3 + ["harness.training.trainer", "harness.extras.lora"]
    assert (out.getvalue(), error.getvalue()) == (
        "step 1: 50%\nwarning: the disk is nearly full\n",
        "error: no room\n" * 2,
    )
