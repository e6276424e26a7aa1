"""The words of a command line: which become which flags, which may stand without effect, which are refused."""

from __future__ import annotations

from typing import Any

import pytest

from harness import TrainingArguments, UserError
from harness.arguments.themes.flags import ALIASES
from harness.arguments.themes.lora import LoraArguments
from harness.arguments.themes.preferences import PreferenceArguments
from harness.arguments.themes.script import ScriptArguments
from harness.command_line import expanded, parse
from harness.command_line.other_programs import advice, is_idle, is_section, meant, other_programs, refusal
from harness.command_line.parsing import known_flags, own_words
from harness.config import AutoValues
from harness.installed import read_run_config

KINDS = (ScriptArguments, TrainingArguments, LoraArguments, PreferenceArguments)
KNOWN = known_flags(KINDS)


def flags(*words: str) -> dict[str, Any]:
    """What is given by these words, by name."""
    found = parse(KINDS, words, prog="t", description="", epilog="")
    return {name: getattr(each, name) for each in found for name in each.given}


@pytest.mark.parametrize(
    ("words", "given"),
    [
        pytest.param((), {}, id="nothing"),
        pytest.param(("--max_steps=-1",), {"max_steps": -1}, id="a-negative-number-behind-a-sign"),
        pytest.param(("--max-steps", "-1"), {"max_steps": -1}, id="a-negative-number"),
        pytest.param(("--max_steps", "1", "--max_steps", "2"), {"max_steps": 2}, id="the-last-one-counts"),
        pytest.param(("--seed", "9007199254740993"), {"seed": 2**53 + 1}, id="a-seed-to-its-last-digit"),
        pytest.param(("--bf16", "--packing", "no"), {"bf16": True, "packing": False}, id="booleans"),
        pytest.param(("--no-do-train", "--do-eval"), {"do_train": False, "do_eval": True}, id="no-with-dashes"),
        pytest.param(("--no-bf16",), {"bf16": False}, id="no"),
        pytest.param(("--run_name=--x=y",), {"run_name": "--x=y"}, id="signs-in-a-value"),
        pytest.param(("--run_name", ""), {"run_name": ""}, id="an-empty-word"),
        pytest.param(("--train_file", "a,b", "c d"), {"train_file": ["a,b", "c d"]}, id="paths-stay-whole"),
        pytest.param(("--deepspeed", "zero2"), {"deepspeed_config": "zero2"}, id="another-name"),
        pytest.param(("--deepspeed", "--bf16"), {"bf16": True}, id="deepspeeds-own-flag"),
        pytest.param(("--evaluation-strategy=epoch",), {"eval_strategy": "epoch"}, id="an-older-name"),
        pytest.param(("--no_activation_checkpointing",), {"gradient_checkpointing": False}, id="no-and-another-name"),
        pytest.param(("--deepspeed_config", '{"a": 1}'), {"deepspeed_config": {"a": 1}}, id="json-in-a-word"),
        pytest.param(("--local_rank", "3", "--seed", "1"), {"seed": 1}, id="the-launchers-flag"),
        pytest.param(
            ("--use_peft", "--lora_target_modules", "q,k", "v_proj"),
            {"use_peft": True, "lora_target_modules": ["q", "k", "v_proj"]},
            id="names-by-commas-and-spaces",
        ),
        pytest.param(
            ("--use_peft", "--lora_target_modules", " q, k ,"),
            {"use_peft": True, "lora_target_modules": ["q", "k"]},
            id="names-by-both-at-once",
        ),
        pytest.param(
            ("--use_peft", "--lora_target_modules", r".*\.[0-9]{1,2}\.(q|k)"),
            {"use_peft": True, "lora_target_modules": [r".*\.[0-9]{1,2}\.(q|k)"]},
            id="an-expression-stays-whole",
        ),
    ],
)
def test_words_become_flags(words: tuple[str, ...], given: dict[str, Any]) -> None:
    assert flags(*words) == given
    # the same words after a --config was put in its place, and once more
    assert flags(*expanded(KINDS, words)) == given
    assert expanded(KINDS, expanded(KINDS, words)) == expanded(KINDS, words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        pytest.param("foo", "unrecognized arguments: foo (see --help)", id="a-word"),
        pytest.param("-x", "unrecognized arguments: -x (see --help)", id="a-short-flag"),
        pytest.param("--run_name a b", "unrecognized arguments: b (see --help)", id="a-word-too-many"),
        pytest.param("--bf16 foo", "argument --bf16: 'foo' is not true or false (see --help)", id="no-boolean"),
        pytest.param("--no_bf16 false", "--no_bf16 takes no value: give --bf16 true or false", id="not-not"),
        pytest.param("--no_bf16 true", "--no_bf16 takes no value: give --bf16 true or false", id="no-and-true"),
        pytest.param("--no-bf16=true", "--no_bf16=true takes no value: give --bf16 true or false", id="no-is-true"),
        pytest.param(
            "--no_activation_checkpointing yes",
            "--no_gradient_checkpointing takes no value: give --gradient_checkpointing true or false",
            id="no-and-another-name-and-yes",
        ),
        pytest.param("--no-bf16 foo", "unrecognized arguments: foo (see --help)", id="no-and-a-word"),
        pytest.param("--no_max_steps", "unknown flag --no_max_steps: did you mean --max_steps?", id="no-number"),
        pytest.param("--max_steps --bf16", "argument --max_steps: expected one argument (see --help)", id="no-value"),
        pytest.param("--train_file", "argument --train_file: expected at least one argument (see", id="no-values"),
        pytest.param("--max 3", "unknown flag --max: see --help for all flags", id="no-beginning-of-a-flag"),
        pytest.param("--=3", "unknown flag --: see --help for all flags", id="no-name"),
        pytest.param("--seed -3", "--seed -3: must be at least 0", id="negative-seed"),
        pytest.param(f"--seed {2**63}", f"argument --seed: '{2**63}' is more than {2**63 - 1}", id="seed-beyond-torch"),
        pytest.param("--learning_rate inf", "--learning_rate inf: must be a finite number", id="infinite"),
        pytest.param("--save_steps inf", "--save_steps inf: must be a finite number", id="infinite steps"),
        pytest.param("--hang_seconds nan", "--hang_seconds nan: must be a finite number", id="nan"),
        pytest.param("--save_strategy no --save_seconds 9", "--save_seconds and --save_strategy no", id="never-saves"),
        pytest.param("--save_seconds 0", "--save_seconds 0.0: must be above 0", id="no-seconds"),
        pytest.param("--output_dir=", "--output_dir is empty: give a directory", id="no-directory"),
        pytest.param("--nonfinite maybe", "--nonfinite maybe: not one of stop, skip, warn, rollback", id="no-choice"),
        pytest.param("--max_steps 0", "--max_steps 0: must be at least 1, or -1 to train for --num_t", id="no-step"),
        pytest.param("--max_steps -2", "--max_steps -2: must be at least -1", id="fewer-than-all"),
        pytest.param("--warmup_ratio 1.5", "--warmup_ratio 1.5: must be at most 1", id="more-than-all"),
        pytest.param("--adam_beta1 1", "--adam_beta1 1.0: must be below 1", id="beta-of-one"),
        pytest.param("--report_to csv,paper", "--report_to csv,paper: paper is not one of tensorboard, wandb", id="to"),
        pytest.param("--model_revision x", "--model_revision x: only models of the hub have revisions", id="revision"),
        pytest.param("--deepspeed_config {", "argument --deepspeed_config: '{' is not JSON: Expecting pro", id="brace"),
    ],
)
def test_words_that_are_no_flags_are_one_line(words: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        flags(*words.split())
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_an_empty_value_does_not_become_the_folder_in_which_a_run_is_started() -> None:
    for empty in ("", " "):
        with pytest.raises(UserError, match="--output_dir is empty"):
            TrainingArguments(empty)


def test_an_argument_that_is_none_does_not_contradict_the_file() -> None:
    config = {"train_batch_size": 8, "gradient_clipping": 0.5}
    args = TrainingArguments(max_grad_norm=None, deepspeed_config=config)
    assert read_run_config(args, world_size=1).resolved.config["gradient_clipping"] == 0.5
    assert args.given == {"deepspeed_config"} and args.max_grad_norm == 1.0


@pytest.mark.parametrize("name", sorted(ALIASES))
def test_another_name_is_taken_from_a_program_too(name: str) -> None:
    values = {"deepspeed": "zero2", "evaluation_strategy": "no", "activation_checkpointing": True, "no_cuda": True}
    value = values[name]
    args = TrainingArguments(**{name: value})
    assert args.given == {ALIASES[name]} and getattr(args, ALIASES[name]) == value
    assert TrainingArguments(**{name: None}).given == set()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--deepspeed a.json --deepspeed_config b.json", "--deepspeed and --deepspeed_config are the same flag"),
        ("--eval-strategy no --evaluation_strategy=no", "--eval_strategy and --evaluation_strategy are the same flag"),
        (
            "--no_activation_checkpointing --gradient_checkpointing true",
            "--activation_checkpointing and --gradient_checkpointing are the same flag: give one of them",
        ),
    ],
)
def test_one_flag_has_one_name(words: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        flags(*words.split())


def test_one_name_may_be_given_again_and_a_bare_deepspeed_is_no_config() -> None:
    assert flags("--deepspeed", "--deepspeed-config", "a", "--deepspeed_config=b") == {"deepspeed_config": "b"}


def test_a_program_gives_an_argument_under_one_name() -> None:
    with pytest.raises(UserError, match="deepspeed and deepspeed_config are the same flag: give one of them"):
        TrainingArguments(deepspeed="zero2", deepspeed_config="zero3")
    assert TrainingArguments(deepspeed=None, deepspeed_config="zero3").deepspeed_config == "zero3"


@pytest.mark.parametrize("spelled", [True, "True", "true", "TRUE"])
@pytest.mark.parametrize("off", [False, "False", "false"])
def test_a_resume_may_be_a_boolean_as_in_huggingface(spelled: object, off: object) -> None:
    assert TrainingArguments(resume_from_checkpoint=spelled).resume_from_checkpoint == "auto"
    assert TrainingArguments(resume_from_checkpoint=off).resume_from_checkpoint is None


def test_what_the_config_leaves_open_comes_from_the_arguments() -> None:
    args = TrainingArguments(max_steps=200, warmup_steps=0.1, learning_rate=1e-3, gradient_accumulation_steps=4)
    values = args.auto_values(world_size=8, max_steps=200, hidden_size=64)
    assert isinstance(values, AutoValues)
    assert (values.warmup_steps, values.learning_rate, values.max_steps, values.world_size) == (20, 1e-3, 200, 8)
    assert values.given == {"max_steps", "warmup_steps", "learning_rate", "gradient_accumulation_steps"}


@pytest.mark.parametrize(
    ("steps", "given", "warmup"),
    [
        pytest.param(100, {}, 0, id="none"),
        pytest.param(100, {"warmup_steps": 1}, 1, id="one-step"),
        pytest.param(100, {"warmup_steps": 7.9}, 7, id="steps-and-a-part"),
        pytest.param(3, {"warmup_steps": 0.999}, 3, id="nearly-all"),
        pytest.param(100, {"warmup_ratio": 1}, 100, id="all"),
        pytest.param(7, {"warmup_ratio": 0.01}, 1, id="a-part-of-a-step"),
        pytest.param(100, {"warmup_ratio": 0}, 0, id="no-part"),
    ],
)
def test_a_warm_up_is_in_steps_or_a_fraction_of_them(steps: int, given: dict[str, float], warmup: int) -> None:
    assert TrainingArguments(**given).warmup(steps) == warmup


@pytest.mark.parametrize(
    ("name", "value", "idle"),
    [
        pytest.param("load_in_8bit", False, True, id="axolotl-off"),
        pytest.param("load_in_8bit", "False", True, id="axolotl-off-as-a-word"),
        pytest.param("load_in_8bit", True, False, id="axolotl-on"),
        pytest.param("load_in_8bit", None, False, id="axolotl-none"),
        pytest.param("wandb_log_model", "false", True, id="axolotl-by-its-beginning"),
        pytest.param("shuffle_merged_datasets", False, False, id="axolotl-that-off-asks-for-something"),
        pytest.param("seq_len", False, False, id="of-another-program"),
        pytest.param("torch_compile_mode", None, True, id="huggingface-not-set"),
        pytest.param("fp16_opt_level", "o1", True, id="huggingface-in-other-letters"),
        pytest.param("ddp_timeout", 1.8e3, True, id="huggingface-as-another-number"),
        pytest.param("gradient_checkpointing_kwargs", {"use_reentrant": False}, True, id="huggingface-mapping"),
        pytest.param("gradient_checkpointing_kwargs", '{"use_reentrant":false}', True, id="huggingface-json"),
        pytest.param("gradient_checkpointing_kwargs", {"use_reentrant": True}, False, id="huggingface-other-mapping"),
        pytest.param("label_names", ["labels"], True, id="huggingface-list"),
        pytest.param("frobnicate", False, False, id="of-nobody"),
    ],
)
def test_a_flag_is_idle_where_it_asks_for_what_is_done(name: str, value: object, idle: bool) -> None:
    assert is_idle(name, value) is idle


@pytest.mark.parametrize(
    ("name", "words"),
    [
        pytest.param("bnb_4bit_quant_storage", "use --use_peft --load_in_4bit true (QLoRA) (axolotl", id="b"),
        pytest.param("liger_rms_norm", "use --use_liger_kernel, which takes all of", id="a-prefix"),
        pytest.param("Sequence-Len", "use --block_size (axolotl calls it Sequence-Len)", id="other-letters"),
        pytest.param("training.steps", "use --max_steps (torchtitan calls it training.steps)", id="a-section"),
        pytest.param("seq_length", "use --block_size (Megatron-LM calls it seq_length)", id="megatron"),
        pytest.param("neat_packing", "use --packing (LLaMA-Factory calls it neat_packing)", id="llama-factory"),
        pytest.param("lora_target", "use --lora_target_modules (all: all-linear) (LLaMA", id="its-adapters"),
        pytest.param(
            "freeze_vision_tower", "leave it out: only the text decoder of a multimodal model", id="its-prefix"
        ),
        pytest.param(
            "tokenizer_type",
            "leave it out: the tokenizer is loaded as its files say (axolotl calls it tokenizer_type); or use "
            "--tokenizer_name (Megatron-LM calls it tokenizer_type)",
            id="two-programs",
        ),
        pytest.param("eos_token", "use a tokenizer that has the token already", id="trl"),
        pytest.param("epochs", "use --num_train_epochs", id="common-words-name-no-program"),
        pytest.param("optim_args", "set optimizer.params in the DeepSpeed JSON", id="huggingface"),
        pytest.param("logging_step", "did you mean --logging_steps?", id="nearly-a-flag"),
        pytest.param("adafactr", "did you mean --adafactor?", id="nearly-a-flag-of-huggingface"),
        pytest.param("", "see --help for all flags", id="nothing"),
    ],
)
def test_what_to_do_instead_is_said_of_each_name(name: str, words: str) -> None:
    assert advice(name, KNOWN).startswith(words)
    what = "is not supported" if name in other_programs().not_taken else "unknown flag"
    assert what in refusal(name, f"--{name}", KNOWN)


def test_names_of_axolotl_and_their_beginnings_lead_to_their_own_answers() -> None:
    assert all(("axolotl", here) in meant(name) for name, here in other_programs().programs["axolotl"].items())
    beginnings = {prefix: meant(f"{prefix}xyz") for prefix in other_programs().beginnings["axolotl"]}
    assert [prefix for prefix, found in beginnings.items() if [program for program, _ in found] != ["axolotl"]] == []
    assert all(is_idle(f"{prefix}xyz", False) for prefix in other_programs().beginnings["axolotl"])
    assert meant("nothing_like_it") == []


def test_a_name_that_several_programs_have_is_answered_for_each() -> None:
    for program, names in other_programs().programs.items():
        for name, here in names.items():
            assert any(program in programs and here == said for programs, said in meant(name)), (program, name)


def test_sections_are_those_of_torchtitans_files() -> None:
    assert is_section("training") and is_section("parallelism")
    assert not is_section("train") and not is_section("deepspeed_config") and not is_section("")


def test_words_before_a_flag_and_behind_it_stay_with_it() -> None:
    assert own_words(["a", "--max-steps", "3", "--train_file", "b", "c"], KNOWN) == [
        *("a", "--max_steps", "3", "--train_file", "b", "c")
    ]
    assert own_words([], KNOWN) == []
