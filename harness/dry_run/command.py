"""The verb `ds-harness dry-run`: report what a rank of a run would build, hold and send, or why it would fail."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from harness.arguments import TrainingArguments
from harness.arguments.configure import RunConfig
from harness.arguments.themes.lora import LoraArguments
from harness.arguments.themes.preferences import PreferenceArguments
from harness.arguments.themes.script import ScriptArguments
from harness.atomic import replace_text
from harness.command_line import parse
from harness.errors import UserError, headline, reason
from harness.planner.hardware import load_hardware, names
from harness.preflight import check_inputs
from harness.quiet import quiet
from harness.topology.env import LaunchEnv
from harness.verb_parser import Boolean, VerbParser, name_or_path, path_argument, positive, whole_number

if TYPE_CHECKING:
    from harness.dry_run.rank import DryRun
    from harness.dry_run.timeline import TimelineSpan

DESCRIPTION = """Build one rank of a run on this machine, without the others, without a GPU and without memory for its
tensors, and let it make a step: the run's own checks, layers, process groups and DeepSpeed engine. Print its layers,
the memory it needs and the messages it sends in a step. Nothing is read from the data, nothing is written but the
--timeline."""
DEVICES = {"gpu": "h100", "cpu": "cpu"}
"""Devices of the timeline."""
EXAMPLE = """Every other flag is one of scripts/train.py (see its --help).

example:
  ds-harness dry-run --rank 0 --world_size 8 --deepspeed_config pipeline_3d --block_size 512"""


def dry_run(argv: Sequence[str]) -> int:
    """Print the report on one rank, or on one rank of each stage, and return the exit code.

    Raises UserError for whatever a run would refuse.
    """
    own, words = _parser().parse_known_args(argv)
    world_size, rank = own.world_size, own.rank
    if rank is not None and not 0 <= rank < world_size:
        _parser().error(f"--rank {rank} is outside the {world_size} ranks of --world_size")
    if own.hardware is not None and own.timeline is None:
        _parser().error("--hardware is the device of --timeline: give both, or leave it out")
    hardware = load_hardware(own.hardware or DEVICES[own.device], world_size) if own.timeline else None
    words = ["--model_name_or_path" + word[7:] if word.partition("=")[0] == "--model" else word for word in words]
    script, args, lora, preference = parse(
        [ScriptArguments, TrainingArguments, LoraArguments, PreferenceArguments],
        words,
        prog="ds-harness dry-run",
        description=DESCRIPTION,
        epilog=EXAMPLE,
    )
    env = LaunchEnv(rank=rank or 0, world_size=world_size)
    config = check_inputs(script, args, env, lora, preference)  # without torch
    with tempfile.TemporaryDirectory() as folder, quiet(Path(folder) / "log", int(own.json)) as console:
        from harness.dry_run.rank import dry_run_rank
        from harness.dry_run.report import as_json, as_text

        plan = dry_run_plan(script, args, config, lora, preference, own.device)
        layout = plan.layout
        ranks = [layout.stage_ranks(stage)[0] for stage in range(layout.pp_size)] if rank is None else [rank]
        timelines: dict[int, Sequence[TimelineSpan]] = {}
        for each in ranks:
            try:
                report = dry_run_rank(plan, replace(env, rank=each), hardware)
            except UserError:
                raise
            except Exception as error:  # a run would raise the same, from DeepSpeed or from the model's code
                raise UserError(f"rank {each} cannot be built: {type(error).__name__}: {headline(error)}") from error
            text = json.dumps(as_json(plan, report)) if own.json else as_text(plan, report)
            print(text, file=console.out, flush=True)
            if report.timeline is not None:
                timelines[each] = report.timeline
    if own.timeline is not None:
        _write(own.timeline, timelines)
    return 0


def _write(path: Path, timelines: Mapping[int, Sequence[TimelineSpan]]) -> None:
    """Write the timelines of ranks as a trace. Raises UserError if that fails."""
    from harness.dry_run.timeline import as_trace

    if not timelines:
        raise UserError(f"--timeline {path}: not written, as no step could be made: see `not checked` in the report")
    try:
        replace_text(path, json.dumps(as_trace(timelines)))
    except OSError as error:
        raise UserError(f"--timeline {path}: cannot be written: {reason(error)}") from error


def _parser() -> VerbParser:
    usage = "%(prog)s --rank R --world_size N [--deepspeed_config FILE] [--model M] [--FLAG VALUE ...]"
    parser = VerbParser("dry-run", DESCRIPTION, EXAMPLE, usage=usage, allow_abbrev=False)
    parser.add_argument("--rank", type=_rank, required=True, help="rank to build; all: the first rank of each stage")
    parser.add_argument("--world_size", type=positive, required=True, help="number of ranks of the run")
    parser.add_argument("--json", action=Boolean, help="print JSON, a line a rank")
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu", help="what the ranks of the run have")
    timeline = "predict the timeline of a step and write it to this file, which chrome://tracing and Perfetto open"
    parser.add_argument("--timeline", type=path_argument, metavar="FILE", help=timeline)
    defaults = " or ".join(f"{name} for --device {device}" for device, name in DEVICES.items())
    parser.add_argument(
        "--hardware",
        type=name_or_path,
        help=f"device of the timeline: {', '.join(names())}, or the path of a device file (default: {defaults})",
    )
    return parser


def _rank(text: str) -> int | None:
    """Return the rank that `--rank` names; None for `all`."""
    return None if text == "all" else whole_number(text)


def dry_run_plan(
    script: ScriptArguments,
    args: TrainingArguments,
    config: RunConfig,
    lora: LoraArguments,
    preference: PreferenceArguments | None = None,
    device: str = "gpu",
) -> DryRun:
    """Return the settings of the dry run. Raises UserError for whatever a run would refuse before its ranks meet."""
    import torch

    from harness.composition import preferences
    from harness.data.inputs.datasets import SampleForm
    from harness.data.tokenizer import load_tokenizer
    from harness.device.process_group import require_device, require_precision
    from harness.dry_run.rank import DryRun
    from harness.extras.fp8.layers import kernel_of
    from harness.extras.lora import adapted
    from harness.hf.locate import model_directory
    from harness.hf.skeleton import read_source
    from harness.training.prepare.plan import resolve_for

    source, adaptation = adapted(read_source(script.model), lora.peft_config(), lora.quantization_config())
    if source is None:
        raise UserError("a dry run needs a HuggingFace decoder")
    objective = None if preference is None else preferences(preference)
    if objective is not None:
        source = replace(source, prepare=objective.prepare_model)
    tokenizer = load_tokenizer(script.tokenizer_name, model_directory(script.model))
    resolved, max_steps, layout = resolve_for(source, args, config, None)
    if device == "cpu":
        require_precision(resolved.precision)
        require_device(resolved.config, torch.device("cpu"))
        if args.fp8 == "rowwise":
            kernel_of(torch.device("cpu"))  # which has none
    return DryRun(
        args=args,
        source=replace(source, has_values=False),
        adaptation=adaptation,
        resolved=resolved,
        layout=layout,
        block_size=SampleForm.of(tokenizer, source, args).block_size,
        max_steps=max_steps,
        objective=objective,
    )
