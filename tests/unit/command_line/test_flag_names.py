"""Every name that a newcomer may type: HuggingFace's, other programs', a config file's, a misspelt one."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import transformers

from harness import TrainingArguments, UserError
from harness.arguments.themes.flags import ALIASES
from harness.arguments.themes.lora import LoraArguments
from harness.arguments.themes.preferences import PreferenceArguments
from harness.arguments.themes.script import ScriptArguments
from harness.command_line import expanded, parse
from harness.command_line.other_programs import other_programs
from harness.command_line.parsing import known_flags
from harness.preflight import check_inputs
from harness.topology.env import LaunchEnv
from harness.train import main

KINDS = (ScriptArguments, TrainingArguments, LoraArguments, PreferenceArguments)
RUN_CLM = (
    *("model_name_or_path", "model_type", "config_overrides", "config_name", "tokenizer_name", "cache_dir"),
    *("use_fast_tokenizer", "model_revision", "token", "use_auth_token", "trust_remote_code", "torch_dtype", "dtype"),
    *("low_cpu_mem_usage", "attn_implementation", "dataset_name", "dataset_config_name", "train_file"),
    *("validation_file", "max_train_samples", "max_eval_samples", "streaming", "block_size", "overwrite_cache"),
    *("validation_split_percentage", "preprocessing_num_workers", "keep_linebreaks"),
)
OLDER = (
    *("evaluation_strategy", "no_cuda", "overwrite_output_dir", "warmup_ratio", "group_by_length", "save_safetensors"),
    *("per_gpu_train_batch_size", "logging_dir", "half_precision_backend", "fp16_backend", "use_mps_device"),
    *("include_tokens_per_second", "fsdp_min_num_params", "jit_mode_eval", "push_to_hub_model_id", "do_train"),
)


def command_line(*flags: str) -> tuple[Any, ...]:
    return parse(KINDS, flags, prog="t", description="", epilog="")


def refused(*flags: str) -> str:
    with pytest.raises(UserError) as caught:
        command_line(*flags)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_every_flag_of_huggingface_is_known() -> None:
    theirs = {item.name for item in fields(transformers.TrainingArguments)} | {*RUN_CLM, *OLDER}
    assert theirs - known_flags(KINDS).keys() - ALIASES.keys() - other_programs().not_taken.keys() == set()


def test_every_flag_that_is_advised_exists() -> None:
    known, of_launcher = known_flags(KINDS).keys(), {"config", "num_gpus", "num_nodes", "hostfile"}
    texts = [entry.advice for entry in other_programs().not_taken.values()]
    texts += [text for names in other_programs().programs.values() for text in names.values()]
    assert {flag for text in texts for flag in re.findall(r"--(\w+)", text)} <= known | of_launcher
    assert other_programs().not_taken.keys() & known == set()
    assert not [
        name
        for names in other_programs().programs.values()
        for name in names
        if name in known or name in other_programs().not_taken
    ]


def test_a_flag_that_asks_for_what_is_done_anyway_may_stand() -> None:
    idle = ("--ddp_timeout", "1800", "--bf16_full_eval=false", "--fsdp", "", "--no_tf32", "--deepspeed")
    _, args, *_ = command_line("--learning-rate", "1e-3", *idle, "--no_bf16", "--max_steps", "7")
    assert (args.learning_rate, args.bf16, args.max_steps) == (1e-3, False, 7)
    quiet = {"ddp_timeout": 1800, "tf32": None, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    args = TrainingArguments("somewhere", deepspeed="zero2", report_to=["csv"], max_steps=7.0, **quiet)
    assert (args.output_dir, args.deepspeed_config) == (str(Path("somewhere").absolute()), "zero2")
    assert (args.report_to, args.max_steps) == ("csv", 7)
    assert args.given == {"output_dir", "deepspeed_config", "report_to", "max_steps"}
    assert TrainingArguments(resume_from_checkpoint=True).resume_from_checkpoint == "auto"
    assert command_line("--resume_from_checkpoint", "False")[1].resume_from_checkpoint is None


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--fsdp full_shard", "--fsdp is not supported: use --deepspeed_config zero3"),
        ("--micro_batch_size 4", "use --per_device_train_batch_size (axolotl"),
        ("--training.seq_len 4", "use --block_size (torchtitan"),
        ("--parallelism.pipeline_parallel_degree=2", "use --pipeline_parallel_size (torchtitan"),
        ("--tensor-model-parallel-size 2", "use --tensor_parallel_size (Megatron-LM"),
        ("--parallelism.num_pp_microbatches 4", "use --gradient_accumulation_steps (torchtitan"),
        ("--finetuning_type lora", "use --use_peft (LoRA); without it all weights are trained (LLaMA-Factory"),
        ("--num-query-groups 4", "use a directory with the model's config.json as --model_name_or_path (Megatron-LM"),
        ("--distributed-backend nccl", "leave it out: the layers are transformers' own"),
        ("--sequence-parallel", "use tensor_parallel.sequence_parallel in the JSON (Megatron-LM"),
        ("--eval_sequence_len 8", "use --block_size, which holds for evaluation too (axolotl"),
        ("--qgalore_rank 8", "use --optim (GaLore is not supported"),
        ("--lora_drop 0.1", "did you mean --lora_dropout?"),
        ("--batch-size 2", "use --per_device_train_batch_size"),
        ("--lerning-rate 2", "did you mean --learning_rate?"),
        ("--frobnicate 2", "unknown flag --frobnicate: see --help"),
        ("--max_steps 2.5", "'2.5' is not a whole number"),
        ("--config", "--config: give a file"),
        ("--config no.yaml", "--config no.yaml: cannot be read: No such file"),
    ],
)
def test_another_name_is_one_line_that_says_what_to_write(flags: str, words: str) -> None:
    assert words in refused(*flags.split())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"micro_batch_size": 4}, "takes no micro_batch_size: use --per_device_train_batch_size"),
        ({"max_steps": "many"}, "--max_steps 'many': not a number"),
        ({"bf16": "maybe"}, "--bf16 'maybe': not true or false"),
        ({"output_dir": 3}, "--output_dir 3: not a text"),
        ({"learning_rate": float("nan")}, "--learning_rate nan: must be a finite number"),
        ({"learning_rate": -1.0}, "--learning_rate -1.0: must be at least 0"),
        ({"adam_beta2": 1.0}, "--adam_beta2 1.0: must be below 1"),
    ],
)
def test_a_wrong_keyword_is_one_line(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        TrainingArguments(**given)


def test_a_config_file_holds_flags_and_the_command_line_wins(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "max_steps: 3\nlearning_rate: 1e-5\nbf16: no\nseed:\nreport_to: [csv, tensorboard]\nuse_peft: true\n"
        "lora_target_modules: [q_proj, v_proj]\ndeepspeed_config:\n  zero_optimization: {stage: 2}\n"
    )
    _, args, lora, _ = command_line("--max_steps", "9", "--config", str(file))
    assert (args.max_steps, args.learning_rate, args.bf16, args.seed) == (9, 1e-5, False, 42)
    assert args.deepspeed_config == {"zero_optimization": {"stage": 2}}
    assert args.report_to == "csv,tensorboard" and lora.lora_target_modules == ["q_proj", "v_proj"]
    plain = expanded(KINDS, ["--config", str(file), "--max_steps", "9"])
    assert not any(word.startswith("--config") for word in plain)
    assert command_line(*plain)[1] == args


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.yaml", "max_steps: 3\n\nsequence_len: 4\n", "a.yaml:3: unknown flag --sequence_len: use --block_size"),
        ("a.json", '{\n\t"max_steps": "many"}', "a.json:2: argument --max_steps: 'many' is not a number"),
        ("a.yaml", "training:\n  steps: 3\n", "a.yaml:2: unknown flag --training.steps: use --max_steps (torchtitan"),
        ("a.yaml", "optimizer:\n  lr: 3\n", "a.yaml:2: unknown flag --optimizer.lr: use --learning_rate (torchtitan"),
        ("a.yaml", "seed: 1\nseed: 2\n", "a.yaml:2: seed is given twice"),
        ("a.yaml", "a: [1\n", "a.yaml:2: is neither YAML nor JSON"),
        ("a.yaml", "- 1\n", "give flags and their values"),
        ("a.yaml", "? [1]\n: 2\n", "a.yaml:1: a key is not a name"),
    ],
)
def test_a_wrong_config_file_is_one_line_with_the_place(tmp_path: Path, name: str, text: str, words: str) -> None:
    (tmp_path / name).write_text(text)
    assert words in refused("--config", str(tmp_path / name))


def test_each_key_of_a_toml_file_is_answered(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text("max_steps = 3\nseq_len = 4\n[training]\nsteps = 3\n[checkpoint]\ninterval = 5\n")
    with pytest.raises(UserError) as caught:
        command_line("--config", str(file))
    first, *lines = str(caught.value).splitlines()
    assert "TOML is not read: give flags in YAML or JSON" in first
    assert [line.partition(f"{file}: ")[2].split(" (")[0] for line in lines] == [
        "seq_len: use --block_size",
        "training.steps: use --max_steps",
        "checkpoint.interval: use --save_steps",
    ]


AXOLOTL = """\
base_model: some/model
load_in_8bit: false
plugins:
  - axolotl.integrations.liger.LigerPlugin
liger_rope: true
datasets:
  - path: data.jsonl
    type: alpaca
adapter: lora
learning_rate: 0.0002
wandb_watch:
wandb_entity: me
micro_batch_size: 2
wandb_log_model: false
"""


def test_all_keys_of_another_program_are_answered_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.yaml").write_text(AXOLOTL)
    assert main(["--config", str(tmp_path / "a.yaml")]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[2] for line in lines] == ["1", "3", "5", "6", "9", "12", "13"]
    assert all(line.startswith("error: ") and ("use " in line or "leave it out: " in line) for line in lines)


def test_a_run_json_repeats_the_run_without_its_defaults(tmp_path: Path) -> None:
    _, args, lora, _ = command_line("--max_steps", "7", "--warmup_steps", "0.5", "--use_peft", "--lora_r", "4")
    arguments = {item.name: getattr(flags, item.name) for flags in (args, lora) for item in fields(flags)}
    recorded = {"run_id": "x", "arguments": arguments, "config": {}}
    (tmp_path / "run.json").write_text(json.dumps(recorded))
    _, again, adapters, _ = command_line("--config", str(tmp_path / "run.json"))
    assert (again, adapters) == (args, lora)
    assert again.given <= {"max_steps", "warmup_steps", "output_dir"}


def test_do_eval_alone_evaluates_and_training_is_the_default() -> None:
    assert TrainingArguments().trains and not TrainingArguments(do_eval=True).trains
    assert TrainingArguments(do_train=True, do_eval=True, do_predict=False).trains
    for flags, said in (("--do_train false", "nothing is to be done"), ("--do_eval --preview_samples 2", "is trained")):
        script, args, lora, _ = parse(KINDS, flags.split(), prog="", description="", epilog="")
        with pytest.raises(UserError, match=said):
            check_inputs(script, args, LaunchEnv(), lora)
