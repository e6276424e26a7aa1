"""`ds-harness resolve`: every argument of a run that a config may leave a value to."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest

from harness.arguments import TrainingArguments
from harness.arguments.themes.flags import Help
from harness.cli import main
from harness.config import AutoValues
from harness.config.values.arguments import LEAST
from harness.config.values.pointers import lookup
from harness.optimizers import FLAGS


@pytest.fixture
def config(tmp_path: Path) -> str:
    """A config that leaves to the arguments whatever it can."""
    path = tmp_path / "ds.json"
    optimizer = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
    schedule = dict.fromkeys(("warmup_num_steps", "total_num_steps", "warmup_min_lr", "warmup_max_lr"), "auto")
    sizes = dict.fromkeys(("reduce_bucket_size", "stage3_prefetch_bucket_size"), "auto")
    data = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "zero_optimization": {"stage": 2, **sizes},
        "optimizer": {"type": "AdamW", "params": optimizer},
        "scheduler": {"type": "WarmupDecayLR", "params": schedule},
    }
    path.write_text(json.dumps(data))
    return str(path)


def resolved(config: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    assert main(["resolve", config, "--format", "json", *words]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize(
    ("words", "pointer", "value"),
    [
        ("--learning_rate 1e-3", "/optimizer/params/lr", 1e-3),
        ("--learning_rate 1e-3", "/scheduler/params/warmup_max_lr", 1e-3),
        ("--learning_rate 1e-3", "/scheduler/params/warmup_min_lr", 0),
        ("--adam_beta1 0.8", "/optimizer/params/betas", [0.8, 0.999]),
        ("--adam_beta2 0.95", "/optimizer/params/betas", [0.9, 0.95]),
        ("--adam_epsilon 1e-6", "/optimizer/params/eps", 1e-6),
        ("--weight_decay 0.1", "/optimizer/params/weight_decay", 0.1),
        ("--warmup_steps 7", "/scheduler/params/warmup_num_steps", 7),
        ("--warmup_steps 0", "/scheduler/params/warmup_num_steps", 1),
        ("--warmup_steps 0.1 --max_steps 90", "/scheduler/params/warmup_num_steps", 9),
        ("--max_steps 90", "/scheduler/params/total_num_steps", 90),
        ("--max_grad_norm 0", "/gradient_clipping", 0.0),
        ("--bf16 true", "/bf16/enabled", True),
        ("--bf16", "/bf16/enabled", True),
        ("--bf16 NO", "/bf16/enabled", False),
        ("--fp16 1", "/fp16/enabled", True),
        ("--hidden_size 100", "/zero_optimization/reduce_bucket_size", 10_000),
        ("--hidden_size 100", "/zero_optimization/stage3_prefetch_bucket_size", 9_000),
        ("--per_device_train_batch_size 3", "/train_micro_batch_size_per_gpu", 3),
        ("--gradient_accumulation_steps 5", "/gradient_accumulation_steps", 5),
        ("--gradient_accumulation_steps 5 --world_size 2", "/train_batch_size", 80),
        ("--global_batch_size 64 --world_size 2", "/gradient_accumulation_steps", 4),
        ("--gradient_checkpointing true", "/pipeline/activation_checkpoint_interval", 1),
        ("--gradient_checkpointing false", "/pipeline/activation_checkpoint_interval", None),
        ("--tensor_parallel_size 2 --world_size 4", "/tensor_parallel/autotp_size", 2),
        ("--hidden_size 4", "/zero_optimization/stage", 2),
    ],
)
def test_an_argument_takes_the_place_of_auto(
    words: str, pointer: str, value: object, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lookup(resolved(config, words.split(), capsys), pointer) == value


@pytest.mark.parametrize("optim", FLAGS)
def test_the_optimizer_of_an_argument_is_written_where_the_file_names_none(
    optim: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 8, "optimizer": {"type": "auto"}, "zero_allow_untested_optimizer": true}')
    optimizer = FLAGS[optim]
    found = resolved(str(path), ["--optim", optim, "--learning_rate", "0.5"], capsys)
    assert lookup(found, "/optimizer/type") == optimizer.name
    params = lookup(found, "/optimizer/params")
    assert isinstance(params, dict) and params.keys() == set(optimizer.flags[optim]) and params["lr"] == 0.5


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--optim adamw_apex", "argument --optim: invalid choice: 'adamw_apex'"),
        ("--bf16=maybe", "argument --bf16: 'maybe' is not true or false"),
        ("--gradient_checkpointing 2", "unrecognized arguments: 2"),
        ("--world_size 0", "argument --world_size: must be a whole number of at least 1"),
        ("--pipeline_parallel_size -1", "argument --pipeline_parallel_size: must be a whole number of at least 1"),
        ("--max_steps many", "argument --max_steps: 'many' is not a number"),
        ("--learning_rate high", "argument --learning_rate: 'high' is not a number"),
        ("--learning_rate=-1", "argument --learning_rate: must be at least 0"),
        ("--learning_rate nan", "argument --learning_rate: must be a finite number"),
        ("--lr_scheduler_type bogus", "argument --lr_scheduler_type: invalid choice: 'bogus'"),
        ("--adam_beta1 2", "argument --adam_beta1: must be below 1"),
        ("--gradient_accumulation_steps 0", "argument --gradient_accumulation_steps: must be at least 1"),
    ],
)
def test_a_value_that_is_none_is_an_unusable_argument(
    words: str, said: str, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["resolve", config, *words.split()])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and said in error and len(error.splitlines()) == 1


def test_the_least_value_is_that_of_a_run() -> None:
    in_a_run = {item.name: Help.of(item).least for item in fields(TrainingArguments)}
    assert {name: in_a_run[name] for name in LEAST if name != "max_steps"} == {
        name: least for name, least in LEAST.items() if name != "max_steps"
    }
    sizes = {item.name for item in fields(AutoValues)} & in_a_run.keys()
    assert all(in_a_run[name] == 1 for name in sizes if name.endswith("_size"))


def test_every_argument_of_auto_has_a_flag(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["resolve", "--help"])
    shown = capsys.readouterr().out
    assert all(f"--{item.name}" in shown for item in fields(AutoValues) if item.name != "given")


def test_the_table_says_where_each_value_is_from(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--world_size", "2", "--learning_rate", "1e-3", "--tensor_parallel_size", "2"]
    assert main(["resolve", config, *words]) == 0
    comments = [line for line in capsys.readouterr().out.splitlines() if line.startswith("#")]
    rows = {line.split()[1]: line for line in comments}
    assert rows["optimizer.params.lr"].endswith("0.001          --learning_rate")
    assert rows["gradient_clipping"].endswith("1.0            default of --max_grad_norm")
    assert rows["zero_optimization.reduce_bucket_size"].endswith("-              left out: DeepSpeed's default")
    assert "# pipeline 1 x tensor 2 x data 1: 8 samples a step" in comments
    assert comments[-1].startswith("# without train_batch_size")


def test_what_cannot_run_is_shown_in_the_file(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resolve", config, "--bf16", "true", "--fp16", "true"]) == 1
    captured = capsys.readouterr()
    assert "error[DS401]: fp16 and bf16 are both enabled" in captured.err and not captured.out
    assert '"fp16": {"enabled": "auto"}' in captured.err
