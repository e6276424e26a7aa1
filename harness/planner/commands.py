"""The verbs `ds-harness estimate` and `ds-harness plan`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.config import load, resolve
from harness.config.model.families import require_trainable_family
from harness.config.model.shape import read_model_config
from harness.errors import UserError
from harness.planner.calibrate import calibrate
from harness.planner.counted import counted_decoder
from harness.planner.estimate import Estimate, predict
from harness.planner.habits import HABITS
from harness.planner.hardware import load_hardware, names
from harness.planner.page.write import write_page
from harness.planner.preset import write_preset
from harness.planner.search import require_fit, search
from harness.planner.sensitivity import more_devices, more_memory
from harness.planner.shape import DecoderShape
from harness.planner.table import estimate_lines, plan_lines
from harness.planner.task import Task, task_of
from harness.verb_parser import VerbParser, positive, run_arguments

BLOCK_SIZE = 1024  # of a run that gives none
ESTIMATE_EXAMPLE = """example:
  ds-harness estimate --deepspeed_config zero3 --model DIRECTORY --world_size 8 --hardware h100 --bf16"""
PLAN_EXAMPLE = """example:
  ds-harness plan --model DIRECTORY --world_size 8 --hardware h100 --global_batch_size 256 --block_size 4096
  ds-harness plan --model DIRECTORY --world_size 8 --hardware h100 --row 2 --write my_layout.json"""


def _parser(verb: str, description: str, example: str) -> VerbParser:
    parser = VerbParser(verb, description, example)
    parser.add_argument("--model", required=True, help="a preset, a directory with config.json, or a model type")
    parser.add_argument("--world_size", type=positive, required=True, help="number of ranks")
    parser.add_argument("--hardware", required=True, help=f"{', '.join(names())}, or the path of a file like theirs")
    parser.add_argument("--block_size", type=positive, default=BLOCK_SIZE, help="tokens of a sample (default: 1024)")
    parser.add_argument("--global_batch_size", type=positive, help="samples of a step over all ranks")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    return parser


def estimate(argv: Sequence[str]) -> int:
    """Print what one config needs and does."""
    description = "Predict memory and speed of one DeepSpeed config, before anything is started."
    parser = _parser("estimate", description, ESTIMATE_EXAMPLE)
    parser.add_argument("--deepspeed_config", required=True, metavar="FILE", help="a config or a preset")
    parser.add_run_arguments(
        (
            "per_device_train_batch_size",
            "gradient_accumulation_steps",
            "pipeline_parallel_size",
            "tensor_parallel_size",
            "expert_parallel_size",
            "bf16",
            "fp16",
        )
    )
    args = parser.parse_args(argv)
    require_trainable_family(args.model)
    hardware = load_hardware(args.hardware, args.world_size)
    _, shape = _decoder(args.model)
    values = run_arguments(args, hidden_size=shape.hidden)
    resolved = resolve(load(args.deepspeed_config), values, model=args.model)
    one = predict(resolved, shape, args.block_size, hardware=hardware)
    assert isinstance(one, Estimate)  # its hardware is known
    print(json.dumps([one.row()], indent=2) if args.json else "\n".join(estimate_lines(one)))
    return 0


def plan(argv: Sequence[str]) -> int:
    """Print all layouts of a number of ranks, best first; write the preset of one."""
    description = "Rank every layout of a number of ranks by its predicted speed."
    if "--calibrate" in argv:
        return _calibrate(argv)
    parser = _parser("plan", description, PLAN_EXAMPLE)
    parser.add_argument(
        "--calibrate", metavar="FILE", help="alone: measure this machine's CPU and write its device file"
    )
    parser.add_argument(
        "--precision", choices=("fp32", "bf16", "fp16"), help="default: bf16 where it is faster than fp32"
    )
    parser.add_argument(
        "--like",
        choices=tuple(HABITS),
        default="deepspeed",
        help="the program whose habits are predicted (default: deepspeed, as this harness runs it)",
    )
    parser.add_argument("--top", type=positive, default=10, help="rows of the table (default: 10)")
    parser.add_argument("--row", type=positive, default=1, help="with --write: the row to write (default: 1, the best)")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the DeepSpeed JSON of a row")
    parser.add_argument(
        "--page", type=Path, metavar="FILE", help="write a page that plans in a browser, without a server"
    )
    args = parser.parse_args(argv)
    require_trainable_family(args.model)
    for name in ("write", "page"):
        if args.like != "deepspeed" and getattr(args, name) is not None:
            raise UserError(f"--{name} is for --like deepspeed: {args.like} reads no DeepSpeed JSON")
    task = _task(args)
    found = search(task)
    if args.page is not None:
        write_page(args.page, args.model, args.hardware, task)
    require_fit(task, found)
    if args.row > len(found.fitting):
        raise UserError(f"--row {args.row}: there are {len(found.fitting)} layouts that fit")
    if args.write is not None:
        write_preset(args.write, found.fitting[args.row - 1].strategy, task.workload.precision, args.model)
    if args.json:
        print(json.dumps([one.row() for one in found.fitting], indent=2))
        return 0
    devices = more_devices(task, found.fitting[0])
    print("\n".join(plan_lines(found, args.top, devices, more_memory(found))))
    return 0


def _calibrate(argv: Sequence[str]) -> int:
    """Write the device file of this machine's CPU, and say how to use it."""
    parser = VerbParser("plan", "Measure this machine's CPU, in a minute.")
    parser.add_argument("--calibrate", type=Path, required=True, metavar="FILE", help="device file to write")
    path = parser.parse_args(argv).calibrate
    calibrate(path)
    print(f"wrote {path}: use it as --hardware {path}")
    return 0


def _task(args: argparse.Namespace) -> Task:
    """Return what the arguments ask for."""
    config, shape = _decoder(args.model)
    return task_of(
        config,
        args.model,
        load_hardware(args.hardware, args.world_size),
        world_size=args.world_size,
        sequence=args.block_size,
        global_batch=args.global_batch_size,
        precision=args.precision,
        shape=shape,
        habits=HABITS[args.like],
    )


def _decoder(source: str) -> tuple[Mapping[str, object], DecoderShape]:
    """Return the config and the shape of a model, with a warning on standard error where the shape is a guess."""
    config, shape, doubt = counted_decoder(read_model_config(source), source)
    if doubt:
        print(f"warning: --model {source}: {shape.parameters:,} parameters are a guess: {doubt}", file=sys.stderr)
    return config, shape
