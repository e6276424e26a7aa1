"""The training script, which every rank runs: under `ds-harness train`, any other launcher, or plain `python`.

Everything that can be refused is refused before torch is imported. An error is one line on standard error: the rank
that caused an error prints it; ranks that only lost a peer wait until it has. Tracebacks go to the rank's log.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from harness.arguments import TrainingArguments
from harness.arguments.configure import RunConfig
from harness.arguments.themes.lora import LoraArguments
from harness.arguments.themes.preferences import PreferenceArguments
from harness.arguments.themes.script import ScriptArguments
from harness.arguments.words import resume_command
from harness.command_line import parse
from harness.console import Console, plain_console
from harness.errors import UserError
from harness.installed import require_installed, watch
from harness.preconditions import establish
from harness.quiet import quiet
from harness.resilience.process import activity, records, signals
from harness.topology.env import ACCELERATOR, LaunchEnv, inherited, replace_environment
from harness.uncaught import GRACE_S, lines_of, out_of_memory, report

if TYPE_CHECKING:
    from harness.composition import Trainer
    from harness.training.parts.data import Datasets

DESCRIPTION = "Train a HuggingFace decoder in the layout of a DeepSpeed JSON config."
EXAMPLE = """example:
  deepspeed --num_accelerators 2 scripts/train.py --deepspeed_config ds_configs/pipeline_checkpointing.json \\
      --max_steps 200 --learning_rate 3e-3 --output_dir runs/first"""
NOTHING_GIVEN = (
    "no arguments: give at least --max_steps and --output_dir, for instance `ds-harness train --deepspeed_config zero3 "
    "--max_steps 100 --output_dir runs/first` (see --help)"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script with these arguments; returns the exit code."""
    try:
        establish()
        env = LaunchEnv.from_environ(os.environ)
    except UserError as error:
        plain_console(0).fail(str(error))
        records.record_failure(error)
        return 1
    console = plain_console(env.rank)
    records.THIS_RANK.rank = env.rank
    records.expect_success()
    if all(word.startswith("--local_rank") for word in (sys.argv[1:] if argv is None else argv)):
        if env.rank == 0:
            console.fail(NOTHING_GIVEN)
        return 2
    with signals.listening(console.say, env.parent):
        code = _main(argv, env, console)
    if code == 0:
        records.record_success()
    return code


def _main(argv: Sequence[str] | None, env: LaunchEnv, console: Console) -> int:
    try:
        script: ScriptArguments
        args: TrainingArguments
        lora: LoraArguments
        preference: PreferenceArguments
        script, args, lora, preference = parse(
            [ScriptArguments, TrainingArguments, LoraArguments, PreferenceArguments],
            argv,
            prog="train.py",
            description=DESCRIPTION,
            epilog=EXAMPLE,
        )
        if args.use_cpu:  # before DeepSpeed is imported
            replace_environment({**inherited(), ACCELERATOR: "cpu"})
        require_installed("harness.data", "a training script that reads files")
        from harness.preflight import check_before_start

        # one rank may be downloading for the whole host
        with watch().for_stopped_ranks(args.hang_seconds, console):
            config = check_before_start(script, args, env, lora, preference)
        log = Path(args.output_dir) / "logs" / f"rank_{env.rank}.log"
        with quiet(log, env.rank) as console, signals.reported_by(console.say):
            return _guarded(partial(run, script, args, config, lora, preference, env, console), env, console)
    except UserError as error:
        records.record_failure(error)
        report(env, error, partial(_show, error, env, console))
        return 1


def run(
    script: ScriptArguments,
    args: TrainingArguments,
    config: RunConfig,
    lora: LoraArguments,
    preference: PreferenceArguments,
    env: LaunchEnv,
    console: Console,
) -> None:
    """Read the data, train, evaluate, export."""
    if args.trains:
        require_installed("harness.extras", "the export of the trained model")
    from harness.composition import Trainer, preferences
    from harness.data.inputs.datasets import script_datasets
    from harness.data.preview import shown
    from harness.device.process_group import require_supported
    from harness.hf.skeleton import read_source
    from harness.preflight import limit_trial
    from harness.training.parts.data import DataRequest
    from harness.training.recording.files import note_wall_clock

    files = script.train_file if args.trains else script.validation_file or script.train_file
    console.say(f"preparing {script.model} and {' '.join(files)}")
    if args.trains and (note := limit_trial(script, args)):
        console.say(note)
    require_supported(config.resolved)
    with watch().for_stopped_ranks(args.hang_seconds, console):
        source = read_source(script.model)
        objective = preferences(preference)
        prepare = script_datasets if objective is None else objective.data.script_datasets
        data = prepare(script, DataRequest(args=args, config=config, source=source, env=env, console=console))
    if script.preview_samples:
        _preview(shown if objective is None else objective.data.shown, script.preview_samples, data, console)
        return
    trainer = Trainer(
        source,
        args,
        data.train,
        data.evaluation,
        processing_class=data.tokenizer,
        peft_config=lora.peft_config(),
        quantization_config=lora.quantization_config(),
        objective=objective,
        console=console,
        config=config,
        flags={**asdict(script), **asdict(lora), **asdict(preference)},
    )
    if not args.trains:
        metrics = trainer.evaluate()
        console.say(", ".join(f"{name} {value:,.4g}" for name, value in metrics.items()))
        _shut_down(trainer)
        return
    try:
        trainer.train()
    except signals.Stopped:
        if not args.save_only_model:
            typed = signals.typed_command()
            again = "the same command and --resume_from_checkpoint auto" if typed is None else resume_command(typed)
            console.say(f"go on with: {again}")
        _shut_down(trainer)
        raise
    directory = trainer.save_model()
    if env.rank == 0:
        note_wall_clock(trainer.run.spec.output_dir)
    what = "model is" if trainer.run.spec.adaptation is None else "adapters are"
    console.say(f"the {what} in {directory}, the metrics in {directory / 'metrics.jsonl'}")
    _shut_down(trainer)


def _preview(shown: Callable[..., Iterator[str]], count: int, data: Datasets, console: Console) -> None:
    """Show the first samples, and end on all ranks together."""
    import torch.distributed as dist

    for number, text in enumerate(shown(data.train, data.tokenizer, count) if console.speaks else (), start=1):
        console.say(f"sample {number}: {text}")
    with activity.inside("ending"):
        dist.barrier()
    activity.ACTIVITY.stop_watching()
    dist.destroy_process_group()


def _guarded(work: Callable[[], None], env: LaunchEnv, console: Console) -> int:
    try:
        work()
    except signals.Stopped as stopped:
        records.record_failure(stopped)
        sys.stdout.flush()
        os._exit(int(stopped.code or 0))  # everything is saved: skip Python's slow shutdown
    except BaseException as error:
        signals.say_nothing()
        activity.leave(error)
        records.record_failure(error)
        traceback.print_exc()  # into this rank's log
        if signals.received() and records.is_lost_peer(error):  # the signal ended the other ranks
            os._exit(128 + signals.received())
        report(env, error, partial(_show, error, env, console))
        sys.stderr.flush()
        os._exit(1)  # a process group whose peers are gone may hang when it is torn down
    return 0


def _show(error: BaseException, env: LaunchEnv, console: Console) -> None:
    """Print an error of this rank as one line for each thing to correct."""
    if isinstance(error, UserError):
        for line in lines_of(error):
            console.fail(line)
        return
    text = f"{type(error).__name__}: {error}".strip()
    if records.is_lost_peer(error):
        time.sleep(2 * GRACE_S)  # the failed rank prints its own error first
        text = f"lost contact with another rank ({text.splitlines()[0]})"
    elif (memory := out_of_memory(error, records.THIS_RANK.step)) is not None:
        text = memory
    console.fail(f"rank {env.rank}: {text.splitlines()[0]}; the traceback is in {console.log}")


def _shut_down(trainer: Trainer) -> None:
    """Leave the process group together, so that no rank loses its connection."""
    import torch.distributed as dist

    with activity.inside("ending"):
        trainer.engine.deepspeed.destroy()
        dist.barrier()
    activity.ACTIVITY.stop_watching()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
