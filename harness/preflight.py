"""Check everything that can be refused before torch is imported or a process group exists."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from pathlib import Path

from harness.arguments import TrainingArguments
from harness.arguments.configure import RunConfig
from harness.arguments.themes.lora import LoraArguments, require_bitsandbytes, require_peft
from harness.arguments.themes.preferences import PreferenceArguments
from harness.arguments.themes.script import PYTHON_STDLIB, ScriptArguments
from harness.checkpoint.directories import optimizer_name
from harness.checkpoint.integrity import find_resume
from harness.checkpoint.run_lock import lock_directory
from harness.checkpoint.saved_run import SavedRun
from harness.config.model.families import require_trainable_family
from harness.config.values.secrets import Secrets
from harness.data.files.sources import TOKENS, source_groups, validation_group
from harness.data.inputs.early_checks import read_prompts
from harness.data.streaming.flags import refuse_buffer, require_streamable
from harness.data.tokenizer import BYTES, tokenizer_directory, tokenizer_name
from harness.errors import UserError, reason
from harness.hf.locate import model_directory
from harness.installed import read_run_config, require_installed
from harness.optimizers import DEFAULT, find
from harness.topology.env import LaunchEnv

TRIAL_STEPS = 200  # for a run that names neither data nor steps


def check_before_start(
    script: ScriptArguments,
    args: TrainingArguments,
    env: LaunchEnv,
    lora: LoraArguments | None = None,
    preference: PreferenceArguments | None = None,
) -> RunConfig:
    """Check config, model, data and output directory in well under a second; return the config.

    Raises UserError for the first thing that cannot be used. Rank 0 also locks the output directory.
    """
    config = check_inputs(script, args, env, lora, preference)
    output_dir = Path(args.output_dir)
    args.overwrite_output_dir |= not args.trains  # an evaluation overwrites nothing, so a run there is no error
    if env.rank == 0:
        lock_directory(output_dir)
    if (env.rank == 0 or not args.rank_0_finds_checkpoint) and not args.may_read_checkpoint_back:
        resume = find_resume(output_dir, args.resume_from_checkpoint, overwrites=args.overwrite_output_dir)
        if resume is not None:
            saved = SavedRun.read(resume)
            saved.require_same_optimizer(optimizer_name(config.resolved))
            saved.require_same_objective("" if preference is None else preference.settings)
    require_writable(output_dir)
    return config


def check_inputs(
    script: ScriptArguments,
    args: TrainingArguments,
    env: LaunchEnv,
    lora: LoraArguments | None,
    preference: PreferenceArguments | None = None,
) -> RunConfig:
    """Check config, model and data; return the config. UserError if one of them cannot be used."""
    if lora is not None and lora.use_peft:
        require_peft()
        if lora.load_in_4bit:
            require_bitsandbytes()
            if args.fp8 != "no":
                raise UserError("--fp8 and --load_in_4bit exclude each other: remove one of them")
    if script.preview_samples and not args.trains:
        raise UserError("--preview_samples shows what is trained: remove --do_eval, or give --do_train")
    if not (args.trains or args.do_eval):
        raise UserError("--do_train false: nothing is to be done without --do_eval")
    model = model_directory(script.model)
    require_trainable_family(str(model))
    if (tokenizer := tokenizer_name(script.tokenizer_name, model)) != BYTES:
        tokenizer_directory(tokenizer)
    config = read_run_config(args, world_size=env.world_size, model=str(model))
    require_package(optimizer_name(config.resolved))
    if args.push_checkpoints_to is not None:
        require_file_system(args.push_checkpoints_to)
    if preference is None or preference.preference is None:
        _require_data(script, args)
    else:
        _require_preferences(script, args, preference, config.resolved.micro_batch)
    if args.sample_prompts is not None:
        read_prompts(Path(args.sample_prompts))
    return config


def require_package(optimizer: str) -> None:
    """Raise UserError if the package of an optimizer, given by its name in a config, is not installed."""
    kind = find(optimizer)
    if kind is not None and kind.package and importlib.util.find_spec(kind.package) is None:
        raise UserError(
            f"optimizer {kind.name} needs {kind.package}, which is not installed: pip install {kind.package}, or use "
            f"{DEFAULT.name}"
        )


def require_file_system(url: str) -> None:
    """Raise UserError if the package with which fsspec writes to a URL of --push_checkpoints_to is not installed."""
    from fsspec.registry import known_implementations

    protocol, found, _ = url.partition("://")
    package = known_implementations.get(protocol, {}).get("class", "fsspec").partition(".")[0]
    if found and importlib.util.find_spec(package) is None:
        raise UserError(
            f"--push_checkpoints_to {Secrets.known().masked(url)}: {protocol}:// needs {package}, which is not "
            f"installed: pip install {package}"
        )


def _require_data(script: ScriptArguments, args: TrainingArguments) -> None:
    """Raise UserError for data that cannot be read as the flags ask.

    Training data is not checked if a run only evaluates a validation file.
    """
    if script.validation_file is not None and not args.trains:
        validation_group(script.validation_file)
        return
    tokens = next((group.paths[0] for group in source_groups(script.train_file) if group.kind == TOKENS), None)
    if script.validation_file is not None:
        validation_group(script.validation_file)
    _require_streamed(script, args, tokens)


def _require_streamed(script: ScriptArguments, args: TrainingArguments, tokens: str | None) -> None:
    """Raise UserError for flags that a stream cannot follow, or that need one; `tokens` is a path of token files."""
    if (
        script.validation_file is None
        and script.holds_out(evaluates=args.evaluates or args.do_eval)
        and (tokens or script.streaming)
    ):
        kind = "a stream" if script.streaming else tokens
        raise UserError(f"no part of {kind} can be held out for evaluation: give a --validation_file")
    if not script.streaming:
        refuse_buffer(args)
        return
    if tokens:
        raise UserError(f"--streaming: {tokens} is mapped as it is, never read ahead: leave out --streaming")
    require_streamable(args, "--streaming")


def _require_preferences(
    script: ScriptArguments, args: TrainingArguments, preference: PreferenceArguments, micro_batch: int
) -> None:
    """Raise UserError for preferences that cannot be read as the flags ask, by their first rows."""
    require_installed("harness.preferences", f"--preference {preference.preference}")
    from harness.preferences.items import require_data

    require_data(script, args, preference, micro_batch)
    if args.trains or script.validation_file is None:
        _require_streamed(script, args, None)


def limit_trial(script: ScriptArguments, args: TrainingArguments) -> str | None:
    """Limit a run that names neither data nor steps to TRIAL_STEPS; return a line for the user, None for other runs."""
    if script.train_file != [PYTHON_STDLIB] or args.max_steps > 0 or "num_train_epochs" in args.given:
        return None
    args.max_steps = TRIAL_STEPS
    return f"no --train_file, --max_steps or --num_train_epochs: a trial of {TRIAL_STEPS} steps on the standard library"


def require_writable(directory: Path) -> None:
    """Create `directory`, and a file in it that is deleted again. UserError if that fails."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=directory, prefix="writable-")
        os.close(descriptor)
        Path(name).unlink()
    except OSError as error:
        raise UserError(f"--output_dir {directory}: cannot be written: {reason(error, directory)}") from error
