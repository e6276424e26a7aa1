"""Arguments: HuggingFace's names and defaults, what was given and what was not, errors of one line."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import transformers
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION
from transformers.trainer_utils import SchedulerType

from harness import TrainingArguments, UserError
from harness.arguments import SCHEDULES
from harness.arguments.configure import max_steps
from harness.arguments.themes.intervals import interval
from harness.arguments.themes.lora import LoraArguments
from harness.arguments.themes.script import ScriptArguments
from harness.command_line import parse
from harness.command_line.other_programs import notes
from harness.config.text.diagnostic import ConfigError
from harness.config.values.arguments import SCHEDULE_OPTIONS
from harness.installed import read_run_config

SAME_AS_HF = (
    *("max_steps", "num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate"),
    *("lr_scheduler_type", "warmup_steps", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"),
    *("max_grad_norm", "seed", "save_steps", "save_total_limit", "bf16", "fp16"),
)


def command_line(*flags: str) -> tuple[ScriptArguments, TrainingArguments]:
    return parse([ScriptArguments, TrainingArguments], flags, prog="t", description="", epilog="")  # type: ignore[return-value]


@pytest.mark.parametrize("name", SAME_AS_HF)
def test_defaults_are_those_of_huggingface(name: str) -> None:
    theirs = {item.name: item.default for item in transformers.TrainingArguments.__dataclass_fields__.values()}
    ours = getattr(TrainingArguments(), name)
    assert ours == getattr(theirs[name], "value", theirs[name])


OF_STEPS = {"optimizer", "last_epoch", "num_warmup_steps", "num_training_steps"}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_takes_the_values_that_transformers_takes(name: str) -> None:
    function = TYPE_TO_SCHEDULER_FUNCTION[SchedulerType(name)]
    assert set(SCHEDULE_OPTIONS[name]) == set(inspect.signature(function).parameters) - OF_STEPS


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("linear", {"num_cycles": 1}, "linear takes no num_cycles"),
        ("cosine", {"cycles": 1}, "cosine takes no cycles, only num_cycles"),
        ("cosine", {"num_cycles": "two"}, "num_cycles is 'two': give a number"),
        ("cosine_with_min_lr", {}, "needs min_lr or min_lr_rate, and not both"),
        ("cosine_warmup_with_min_lr", {"min_lr": 1, "min_lr_rate": 1}, "needs min_lr or min_lr_rate, and not both"),
        ("warmup_stable_decay", {"num_stable_steps": 3}, "needs num_decay_steps"),
        ("warmup_stable_decay", {"num_decay_steps": 3, "decay_type": "steep"}, "decay_type is 'steep': give linear"),
        ("cosine", "fast", "give a JSON object"),
    ],
)
def test_values_that_a_schedule_does_not_take_are_refused(name: str, options: Any, said: str) -> None:
    with pytest.raises(UserError, match="--lr_scheduler_kwargs.*" + re.escape(said)):
        TrainingArguments(lr_scheduler_type=name, lr_scheduler_kwargs=options)


def test_values_of_a_schedule_beside_a_scheduler_in_the_json_are_a_conflict() -> None:
    config = {"train_batch_size": 8, "scheduler": {"type": "OneCycle", "params": {}}}
    args = TrainingArguments(deepspeed_config=config, lr_scheduler_type="cosine", lr_scheduler_kwargs={"num_cycles": 2})
    with pytest.raises(ConfigError) as refused:
        read_run_config(args, world_size=1)
    assert "--lr_scheduler_type is cosine and scheduler.type is OneCycle" in str(refused.value)
    assert "--lr_scheduler_kwargs is {'num_cycles': 2} and scheduler.type is OneCycle" in str(refused.value)


@pytest.mark.parametrize("max_steps", [1, 7, 10, 1000])
@pytest.mark.parametrize("stated", [0.001, 0.1, 0.3, 0.99, 1, 3, 500])
def test_an_interval_below_1_is_the_fraction_of_all_steps_as_in_transformers(stated: float, max_steps: int) -> None:
    state = transformers.TrainerState()
    args = TrainingArguments(logging_steps=stated, eval_steps=stated, save_steps=stated)
    state.compute_steps(args, max_steps)
    assert interval(args.save_steps, max_steps) == state.save_steps == state.eval_steps == state.logging_steps


@pytest.mark.parametrize(
    ("flag", "value"), [("logging_steps", 0), ("eval_steps", 0), ("eval_steps", 1.5), ("save_steps", -1)]
)
def test_a_number_of_steps_that_is_no_interval_is_refused(flag: str, value: float) -> None:
    with pytest.raises(UserError, match=f"--{flag} {value}: must be "):
        TrainingArguments(**{flag: value})  # type: ignore[arg-type]


def test_arguments_that_change_nothing_that_is_trained_are_taken_with_a_note() -> None:
    given: dict[str, Any] = {"log_level": "info", "logging_dir": "logs", "full_determinism": True}
    in_python = TrainingArguments(**given).without_effect
    _, args = command_line("--log_level", "info", "--logging_dir", "logs", "--full_determinism")
    assert notes(in_python) == notes(args.without_effect) != []
    assert [note.partition(":")[0] for note in notes(in_python)] == list(given)
    quiet = TrainingArguments(log_level="passive", full_determinism=False, assistant_only_loss=True)  # type: ignore[call-arg]
    assert notes(quiet.without_effect) == []
    with pytest.raises(UserError, match="takes no assistant_only_loss: conversations are trained on the assistant's"):
        TrainingArguments(assistant_only_loss=False)  # type: ignore[call-arg]


def test_bf16_auto_is_what_the_gpu_has(monkeypatch: pytest.MonkeyPatch) -> None:
    for has in (True, False):
        for reader in ("harness.arguments.training_arguments", "harness.command_line.parsing"):
            monkeypatch.setattr(f"{reader}.computes_in_bf16", lambda has=has: has)
        assert TrainingArguments(bf16="auto").bf16 is has  # type: ignore[arg-type]
        assert command_line("--bf16", "auto", "--seed", "3")[1].bf16 is has


def test_all_monitors_are_those_that_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "wandb" or None)
    assert TrainingArguments(report_to="all").reporters() == ["wandb"]


def test_the_order_of_samples_has_a_seed_of_its_own() -> None:
    assert TrainingArguments(seed=3).order_seed == 3
    assert TrainingArguments(seed=3, data_seed=0).order_seed == 0


def test_a_default_that_was_given_contradicts_the_json_all_the_same() -> None:
    config = {"train_batch_size": 8, "gradient_clipping": 0.5}
    read_run_config(TrainingArguments(deepspeed_config=config), world_size=1)
    _, given = command_line("--max_grad_norm", "1.0")
    given.deepspeed_config = config
    with pytest.raises(ConfigError, match=r"max_grad_norm.*gradient_clipping"):
        read_run_config(given, world_size=1)


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ([], True),
        (["auto"], "auto"),
        (["false"], False),
        (["--max_steps", "2"], True),
        (["auto", "--max_steps", "2"], "auto"),
    ],
)
def test_a_boolean_that_takes_a_word_stands_alone_too(words: list[str], value: object) -> None:
    (args,) = parse([TrainingArguments], ["--use_liger_kernel", *words], prog="t", description="", epilog="")
    assert args.use_liger_kernel == value
    with pytest.raises(UserError, match="--use_liger_kernel perhaps: not one of true, false, auto"):
        TrainingArguments(use_liger_kernel="perhaps")


def test_the_launchers_own_flag_is_taken_and_booleans_need_no_value() -> None:
    script, args = command_line("--local_rank=1", "--bf16", "--train_file", "x.txt", "--warmup_steps", "0.1")
    assert args.bf16 and script.train_file == ["x.txt"]
    assert args.warmup(200) == 20


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--no_such_flag", "1"), "no_such_flag"),
        (("--max_steps", "many"), "max_steps"),
        (("--max_steps", "0"), "must be at least 1, or -1"),
        (("--lr_scheduler_type", "nonsense"), "not one of linear"),
        (("--eval_steps", "0"), "must be above 0"),
        (("--tensor_parallel_size", "0"), "must be at least 1"),
        (("--report_to", "carrier_pigeon"), "carrier_pigeon"),
        (("--bf16", "maybe"), "is not true or false"),
    ],
)
def test_a_wrong_flag_is_told_in_one_line(flags: tuple[str, ...], words: str) -> None:
    with pytest.raises(UserError, match=words) as told:
        command_line(*flags)
    assert "\n" not in str(told.value)


def test_epochs_become_steps() -> None:
    assert max_steps(TrainingArguments(num_train_epochs=2), 33, 8) == 9
    assert max_steps(TrainingArguments(max_steps=5), 33, 8) == 5
    with pytest.raises(UserError, match="gives no step"):
        max_steps(TrainingArguments(num_train_epochs=0), 33, 8)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"train_batch_size": 8, "zero_optimisation": {"stage": 3}}, "zero_optimization"),
        ({"train_batch_size": 8, "pipeline": {"stages": 2}, "zero_optimization": {"stage": 3}}, "ZeRO"),
        (
            {"train_batch_size": 8, "fp16": {"enabled": True}, "optimizer": {"type": "Lamb"}},
            "DS407 fp16 at ZeRO stage 0: ZeRO is not tested with Lamb",
        ),
        ({"train_batch_size": 7, "pipeline": {"stages": 1}}, "train_batch_size"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_built(config: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        read_run_config(TrainingArguments(deepspeed_config=config), world_size=2)


def test_fp16_without_zero_runs_at_stage_1() -> None:
    config = {"train_batch_size": "auto", "fp16": {"enabled": "auto"}}
    resolved = read_run_config(TrainingArguments(deepspeed_config=config, fp16=True), world_size=1).resolved
    assert resolved.zero_stage == resolved.config["zero_optimization"]["stage"] == 1


def test_an_argument_is_refused_by_the_rules_of_the_file() -> None:
    config = {"train_batch_size": 8, "fp16": {"enabled": True}, "zero_optimization": {"stage": 1}}
    with pytest.raises(UserError, match="DS401 fp16 and bf16 are both enabled"):
        read_run_config(TrainingArguments(deepspeed_config=config, bf16=True), world_size=1)


def test_a_misspelt_key_runs_if_the_user_insists() -> None:
    config = {"train_batch_size": 8, "zero_optimisation": {"stage": 3}}
    args = TrainingArguments(deepspeed_config=config, allow_ignored_keys=True)
    resolved, _ = read_run_config(args, world_size=1).for_data(args, None)
    assert resolved.zero_stage == 0


def test_a_config_that_was_read_with_other_arguments_is_refused() -> None:
    args = TrainingArguments(learning_rate=1e-3)
    config = read_run_config(args, world_size=1)
    with pytest.raises(UserError, match="the config was read with other arguments"):
        config.for_data(TrainingArguments(learning_rate=1e-4), 100)
    args.max_steps = 7
    assert config.for_data(args, 100)[1] == 7


def adapter_flags(*flags: str) -> LoraArguments:
    (arguments,) = parse([LoraArguments], flags, prog="t", description="", epilog="")
    return arguments


def test_lora_flags_become_pefts_config() -> None:
    config = adapter_flags(
        "--use_peft", "--lora_r", "4", "--lora_target_modules", "q_proj,k_proj", "v_proj"
    ).peft_config()
    assert (config.r, config.lora_alpha, config.target_modules) == (4, 32, {"q_proj", "k_proj", "v_proj"})
    assert (
        adapter_flags("--use_peft", "--lora_target_modules", "all-linear").peft_config().target_modules == "all-linear"
    )
    expression = r".*layers\.[01]\..*(q|o)_proj"
    assert adapter_flags("--use_peft", "--lora_target_modules", expression).peft_config().target_modules == expression
    assert adapter_flags("--use_peft", "--lora_modules_to_save", "lm_head").peft_config().modules_to_save == ["lm_head"]
    assert adapter_flags().peft_config() is None


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        (("--lora_r", "8"), "--lora_r has no effect without --use_peft"),
        (("--lora_r", "16"), "--lora_r has no effect without --use_peft"),  # its default
        (("--use_peft", "false", "--use_rslora", "false"), "--use_rslora has no effect without --use_peft"),
        (("--use_peft", "--lora_r", "0"), "--lora_r 0: must be at least 1"),
        (("--use_peft", "--lora_dropout", "1"), "--lora_dropout 1.0"),
    ],
)
def test_lora_flags_that_cannot_act_are_told(flags: tuple[str, ...], wanted: str) -> None:
    with pytest.raises(UserError, match=wanted):
        adapter_flags(*flags)


def test_a_missing_peft_is_one_line_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"--use_peft: peft is not installed: pip install 'ds-harness\[peft\]'"):
        adapter_flags("--use_peft").peft_config()


AUTO_BATCH = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}


def resolved_with(config: dict[str, Any] | str, **given: Any) -> Any:
    return read_run_config(TrainingArguments(deepspeed_config=config, **given), world_size=4).resolved


@pytest.mark.parametrize("preset", ["zero2", "zero3", "tensor_parallel", "pipeline_3d"])
def test_gradient_checkpointing_acts_in_every_preset_and_an_interval_of_the_file_stands(preset: str) -> None:
    assert resolved_with(preset, gradient_checkpointing=True).activation_checkpoint_interval == 1
    assert resolved_with(preset, gradient_checkpointing=False).activation_checkpoint_interval == 0
    config = {**AUTO_BATCH, "pipeline": {"activation_checkpoint_interval": 3}}
    assert resolved_with(config, gradient_checkpointing=True).activation_checkpoint_interval == 3


def test_only_a_gradient_checkpointing_that_is_given_switches_the_interval_of_the_file_off() -> None:
    config = {**AUTO_BATCH, "pipeline": {"activation_checkpoint_interval": 3}}
    assert resolved_with(config).activation_checkpoint_interval == 3
    _, args = command_line("--gradient_checkpointing", "false")
    args.deepspeed_config = config
    assert read_run_config(args, world_size=4).resolved.activation_checkpoint_interval == 0


def test_optim_names_the_optimizer_where_the_file_leaves_it_open() -> None:
    assert "optimizer" not in resolved_with(AUTO_BATCH, optim="adamw_torch").config
    sgd = {"type": "SGD", "params": {"lr": 0.5, "weight_decay": 0.1}}
    for config in (AUTO_BATCH, {**AUTO_BATCH, "optimizer": {"type": "auto"}}):
        assert resolved_with(config, optim="sgd", learning_rate=0.5, weight_decay=0.1).config["optimizer"] == sgd
    adam = {**AUTO_BATCH, "optimizer": {"type": "Adam"}}
    assert resolved_with(adam, optim="adamw_torch").config["optimizer"]["type"] == "Adam"
    with pytest.raises(ConfigError, match=r"--optim is sgd and optimizer.type is Adam"):
        resolved_with(adam, optim="sgd")
    with pytest.raises(ConfigError, match=r"--optim is adamw_8bit and optimizer.type is Adam"):
        resolved_with(adam, optim="adamw_8bit")
    assert resolved_with(AUTO_BATCH, optim="adamw_bnb_8bit").config["optimizer"]["type"] == "AdamW8bit"
    with pytest.raises(UserError, match=r"--optim galore_adamw: give .* optimizer\.type"):
        TrainingArguments(optim="galore_adamw")


def test_a_fraction_of_warm_up_is_huggingfaces() -> None:
    for steps in (7, 10, 100):
        theirs = transformers.TrainingArguments(warmup_steps=0.15, use_cpu=True).get_warmup_steps(steps)
        assert TrainingArguments(warmup_ratio=0.15).warmup(steps) == theirs
        assert TrainingArguments(warmup_steps=0.15).warmup(steps) == theirs
    with pytest.raises(UserError, match="both given"):
        TrainingArguments(warmup_ratio=0.1, warmup_steps=5)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"early_stopping_patience": 2}, "--early_stopping_patience needs evaluations during training"),
        ({"load_best_model_at_end": True, "eval_steps": 2, "save_strategy": "no"}, "needs checkpoints"),
        ({"load_best_model_at_end": True, "eval_steps": 2, "save_steps": 0}, "needs checkpoints"),
        ({"save_strategy": "best"}, "--save_strategy best needs evaluations"),
    ],
)
def test_what_needs_evaluations_or_their_checkpoints_is_refused_without(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        TrainingArguments(**given)


def test_strategies_say_when() -> None:
    asked = TrainingArguments(load_best_model_at_end=True, eval_strategy="epoch", save_strategy="epoch")
    assert (asked.saves, asked.evaluates, asked.higher_is_better) == (True, True, False)
    assert not TrainingArguments(eval_strategy="no", eval_steps=3).evaluates
    assert not TrainingArguments(save_strategy="no").saves
    assert TrainingArguments(metric_for_best_model="eval_accuracy").higher_is_better
