"""The verbs `ds-harness estimate` and `ds-harness plan`, and the tables that they print."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from harness.arguments.themes.lora import LoraArguments
from harness.arguments.themes.preferences import SEQUENCES
from harness.checking import resolve
from harness.config.model.families import require_trainable_family
from harness.config.model.shape import read_model_config
from harness.config.text.document import load
from harness.config.values.arguments import BLOCK_SIZE
from harness.config.values.json_object import JsonObject
from harness.errors import UserError
from harness.planner.calibrate import calibrate
from harness.planner.carried import carried_bytes
from harness.planner.counted_shape import counted_decoder
from harness.planner.estimate import Estimate, predict
from harness.planner.hardware import GIB, HEADROOM, Hardware, load_hardware, names
from harness.planner.lora import ALL_LINEAR, FOUR_BITS, Lora, targets_of
from harness.planner.memory import mask_bytes
from harness.planner.page.write import write_page
from harness.planner.preset import write_preset
from harness.planner.search import (
    Found,
    MoreDevices,
    MoreMemory,
    Task,
    longest,
    more_devices,
    more_memory,
    require_fit,
    search,
    task_of,
)
from harness.planner.shape import DecoderShape
from harness.planner.step import strategy_stages
from harness.planner.workload import ELEMENT_BYTES, HABITS, Strategy
from harness.preference_losses import PREFERENCE_LOSSES
from harness.verb_parser import Boolean, VerbParser, name_or_path, path_argument, positive, run_arguments
from harness.wording import counted

ESTIMATE_EXAMPLE = """example:
  ds-harness estimate --deepspeed_config zero3 --model DIRECTORY --world_size 8 --hardware h100 --bf16"""
PLAN_EXAMPLE = """example:
  ds-harness plan --model DIRECTORY --world_size 8 --hardware h100 --global_batch_size 256 --block_size 4096
  ds-harness plan --model DIRECTORY --world_size 8 --hardware h100 --row 2 --write my_layout.json"""


def plan_lines(found: Found, top: int, devices: MoreDevices | None, memory: MoreMemory | None) -> Iterator[str]:
    """Yield the table of the best layouts, the reasons against the others, and the gain from more devices or memory."""
    best = found.fitting[0]
    yield from _table(found.fitting[:top])
    more = len(found.fitting) - top
    if more > 0:
        yield f"and {counted(more, 'slower layout')}: --top shows more"
    yield f"\n{counted(found.tried, 'layout')} tried, {len(found.fitting):,} fit {best.hardware.name}"
    for reason, count in found.reasons.most_common():
        yield f"  {count:>6,}  {reason}"
    yield from _mask_lines(best)
    yield ""
    if devices is None:
        yield "more devices: none of the next sizes is faster with this global batch"
    else:
        gain = devices.tokens_per_second / best.tokens_per_second - 1
        added = devices.devices - best.strategy.world_size
        yield f"{counted(added, 'more device')}: {gain:+.1%} tokens/s"
    if memory is None:
        yield "more memory: no faster layout needs it"
    else:
        gain = memory.tokens_per_second / best.tokens_per_second - 1
        yield f"{memory.gib:.1f} GiB more on each device: {gain:+.1%} tokens/s"


def _mask_lines(best: Estimate) -> Iterator[str]:
    """Yield a sentence on attention masks [tokens, tokens], if one does not fit beside the rest of the best layout."""
    one = replace(best.strategy, attention_tile=0)
    stages = strategy_stages(best.workload, best.strategy)
    for packed, who in ((False, "the model's window"), (True, "--packing")):
        mask = max(mask_bytes(best.workload, one, stage, packed=packed) for stage in stages)
        within = max(mask_bytes(best.workload, best.strategy, stage) for stage in stages)
        if mask and best.peak_bytes - within + mask > best.hardware.limit_bytes:
            remedy = "the layouts above have" if best.strategy.attention_tile else "set"
            yield (
                f"{who} needs a tokens x tokens mask ({mask / GIB:,.1f} GiB a rank), which does not fit: "
                f"{remedy} tiling.attention, which builds it for a few queries at a time"
            )
            return


def _table(rows: Sequence[Estimate]) -> Iterator[str]:
    columns = [_cells(number, one) for number, one in enumerate(rows, 1)]
    table = [tuple(columns[0]), *(tuple(cells.values()) for cells in columns)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        yield "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))


def _cells(number: int, one: Estimate) -> dict[str, str]:
    """Return the cells of a row by column heading."""
    row = one.row()
    strategy = one.strategy
    tiles = ("loss", strategy.loss_tile), ("ffn", strategy.block_tile), ("mask", strategy.attention_tile)
    recomputes = "yes" if row["activation_checkpointing"] else "no"
    return {
        "": str(number),
        "pp": str(strategy.pp_size),
        "tp": _tensor(strategy),
        "dp": f"{strategy.dp_size}{f' cp{strategy.cp_size}' * (strategy.cp_size > 1)}",
        "ZeRO": str(strategy.zero_stage),
        "micro": str(strategy.micro_batch),
        "accum": str(strategy.accumulation),
        "ckpt": "host" if strategy.host_activations else recomputes,
        "schedule": _schedule(strategy),
        "offload": {"none": "no", "optimizer": "states", "parameters": "weights", "optimizer+parameters": "all"}[
            strategy.offload
        ],
        "tiles": " ".join(word for word, tile in tiles if tile) or "-",
        "GiB": f"{row['memory_gib']['max']:.1f}",
        "longest": f"{longest(one) // 1024:,}k",
        "step s": f"{row['step_seconds']['total']:.3g}",
        "bubble": f"{row['bubble_fraction']:.0%}",
        "tokens/s": f"{row['tokens_per_second']:,.0f}",
        "MFU": f"{row['mfu']:.1%}",
    }


def _tensor(strategy: Strategy) -> str:
    """Return the tensor-parallel size, with `ep` if ranks hold whole experts and `sp` if they split sequences.

    `ep` shows its size if experts are distributed over data-parallel ranks, too.
    """
    size = "" if strategy.ep_size == strategy.tp_size else str(strategy.ep_size)
    more = f" ep{size}" * (strategy.ep_size > 1) + " sp" * strategy.sequence_parallel
    return f"{strategy.tp_size}{more}"


def _schedule(strategy: Strategy) -> str:
    """Return the schedule, with the number of chunks of a stage unless that is 2, as usual."""
    if strategy.pp_size == 1:
        return "-"
    return strategy.schedule_name + (f" x{strategy.chunks}" if strategy.chunks > 2 else "")


def estimate_lines(one: Estimate) -> Iterator[str]:
    """Yield the lines of the prediction for one config."""
    strategy = one.strategy
    row = one.row()
    limit = row["memory_gib"]["limit"]
    yield (
        f"pipeline {strategy.pp_size} x tensor {strategy.tp_size} x data {strategy.dp_size} on {one.hardware.name}, "
        f"{one.workload.precision}, ZeRO-{strategy.zero_stage}, {strategy.accumulation} x {strategy.micro_batch} "
        f"samples of {f'{strategy.sequences} x ' * (strategy.sequences > 1)}{one.workload.sequence:,} tokens on each "
        "data-parallel rank"
        f"{f'; {strategy.cp_size} context ranks share each sample' * (strategy.cp_size > 1)}"
    )
    yield f"\nGiB on each rank, of {limit:.1f}"
    parts = list(row["memory_gib"]["stages"][0])
    yield "stage  " + "  ".join(f"{part:>11}" for part in parts)
    for index, stage in enumerate(row["memory_gib"]["stages"]):
        yield f"{index:>5}  " + "  ".join(f"{stage[part]:>11.2f}" for part in parts)
    if host := one.host_bytes:
        yield f"and {host / GIB:.2f} GiB of the host's memory for each rank"
    yield "\nseconds of a step"
    for part, seconds in row["step_seconds"].items():
        yield f"  {part:<10} {seconds:>10.4f}  {seconds / row['step_seconds']['total']:>6.1%}"
    yield (
        f"\n{row['tokens_per_second']:,.0f} tokens/s, {row['tokens_per_second_per_gpu']:,.0f} on each rank, "
        f"{row['model_tflops_per_gpu']:.3g} TFLOP/s on each rank, MFU {row['mfu']:.1%}"
    )
    if one.fits and not one.has_room:
        yield (
            f"fits closely: {one.peak_bytes / GIB:.1f} GiB of {limit:.1f}; `ds-harness plan` keeps {HEADROOM:.0%} "
            "free, as a margin for errors of the prediction"
        )
    if not one.fits:
        host_limit = one.hardware.host_memory_bytes / GIB
        mask = max(mask_bytes(one.workload, strategy, each) for each in strategy_stages(one.workload, strategy))
        if mask > one.peak_bytes / 10:
            yield f"a mask of all pairs of tokens takes {mask / GIB:.1f} GiB of it: set tiling.attention to 1024"
        yield (
            f"does not fit: a rank needs {one.peak_bytes / GIB:.1f} GiB of {limit:.1f}, "
            f"and {one.host_bytes / GIB:.1f} of {host_limit:.1f} on its host"
        )


def _parser(verb: str, description: str, example: str) -> VerbParser:
    parser = VerbParser(verb, description, example)
    parser.add_argument(
        "--model", type=name_or_path, required=True, help="a preset, a directory with config.json, or a model type"
    )
    parser.add_argument("--world_size", type=positive, required=True, help="number of ranks")
    parser.add_argument(
        "--hardware", type=name_or_path, required=True, help=f"{', '.join(names())}, or the path of a device file"
    )
    parser.add_argument(
        *("--block_size", "--sequence_length"),
        type=positive,
        default=BLOCK_SIZE,
        help="tokens of a sample",
    )
    parser.add_argument("--global_batch_size", type=positive, help="samples of a step over all ranks")
    parser.add_argument(
        "--tf32", action=Boolean, help="with fp32: compute matrix products in TF32, like the run's --tf32"
    )
    parser.add_argument(
        "--fused_kernels",
        action=Boolean,
        default=True,
        help="on a GPU: norms, rotary embeddings and gated activations by one kernel each, like the run's flag",
    )
    parser.add_argument(
        "--preference",
        choices=tuple(PREFERENCE_LOSSES),
        help="train on preferences: a sample is two sequences of block_size tokens; some losses need a pass before it",
    )
    parser.add_argument("--use_peft", action=Boolean, help="train LoRA adapters on a frozen model, like the run's flag")
    parser.add_argument("--lora_r", type=positive, default=LoraArguments.lora_r, help="with --use_peft: their rank")
    parser.add_argument(
        "--lora_target_modules",
        nargs="+",
        default=[ALL_LINEAR],
        metavar="NAME",
        help=f"with --use_peft: names of linear layers (default: {ALL_LINEAR})",
    )
    parser.add_argument("--load_in_4bit", action=Boolean, help="with --use_peft: the frozen linear layers in 4 bits")
    parser.add_argument(
        "--bnb_4bit_use_double_quant", action=Boolean, help="with --load_in_4bit: scales are quantised too"
    )
    parser.add_argument("--json", action=Boolean, help="print the rows as JSON")
    return parser


def _lora(args: argparse.Namespace) -> Lora | None:
    """Return the adapters that the flags ask for. Raises UserError for flags without effect, and unknown layers."""
    if args.load_in_4bit and not args.use_peft:
        raise UserError("--load_in_4bit: weights in 4 bits cannot be trained, only adapters on them: add --use_peft")
    if not args.use_peft:
        if args.lora_target_modules != [ALL_LINEAR] or args.lora_r != LoraArguments.lora_r:
            raise UserError("--lora_r and --lora_target_modules have no effect without --use_peft")
        return None
    width = FOUR_BITS[args.bnb_4bit_use_double_quant] if args.load_in_4bit else None
    return Lora(rank=args.lora_r, targets=targets_of(args.lora_target_modules), weight_bytes=width)


def _sequences(args: argparse.Namespace) -> int:
    """Return the sequences of a sample."""
    return 1 if args.preference is None else SEQUENCES


def _needs_reference(args: argparse.Namespace) -> bool:
    """Whether the loss compares the model with the model before training."""
    return args.preference is not None and PREFERENCE_LOSSES[args.preference].needs_reference


def _reference_lines(args: argparse.Namespace, one: Estimate) -> Iterator[str]:
    """Yield a line on the pass over the data that a preference loss needs before training."""
    if _needs_reference(args):
        yield (
            f"\nbefore training: --preference {args.preference} needs a pass without gradients, about "
            f"{_reference_seconds(one):,.3g} s for each 1,000 samples and no more memory than a step; its results are "
            "kept with the data"
        )


def _reference_seconds(one: Estimate) -> float:
    """Return the seconds of that pass for each 1,000 samples."""
    return one.forward_seconds / one.strategy.global_batch * 1000


def _carried_lines(carried: int) -> Iterator[str]:
    """Yield a line on the parts of a vision-language model that are not trained."""
    if carried:
        yield (
            f"\nbesides the text decoder, the model's files hold about {carried / GIB:.3g} GiB, which no rank loads "
            "and an export copies"
        )


def _row(args: argparse.Namespace, one: Estimate, carried: int) -> JsonObject:
    """Return a prediction as JSON, with the pass before training and the bytes that are carried along, if any."""
    before = {"reference_seconds_per_1000_samples": _reference_seconds(one)}
    return {
        **one.row(),
        **(before if _needs_reference(args) else {}),
        **({"carried_gib": carried / GIB} if carried else {}),
    }


def _require_fp8(args: argparse.Namespace, hardware: Hardware, flag: str) -> None:
    """Raise UserError for what a run with `--fp8 rowwise` would refuse, and for emulation, which is not predicted."""
    if flag.endswith("emulate"):
        raise UserError("--fp8 emulate is for trials, and its speed is not predicted: give --fp8 rowwise")
    if args.load_in_4bit:
        raise UserError(f"{flag} and --load_in_4bit exclude each other: remove one of them")
    if "fp8" not in hardware.flops or hardware.name.startswith("AMD "):
        raise UserError(
            f"{flag} needs an NVIDIA GPU of compute capability 8.9 or more, which {hardware.name} is not: remove "
            f"{flag}, or name another --hardware"
        )


def _hardware(args: argparse.Namespace) -> Hardware:
    hardware = load_hardware(args.hardware, args.world_size)
    return hardware.in_tf32 if args.tf32 else hardware


def estimate(argv: Sequence[str]) -> int:
    """Print the prediction for one config and return the exit code."""
    description = "Predict memory and speed of one DeepSpeed config, before anything is started."
    parser = _parser("estimate", description, ESTIMATE_EXAMPLE)
    parser.add_argument(
        "--deepspeed_config", type=name_or_path, required=True, metavar="FILE", help="a config or a preset"
    )
    parser.add_run_arguments(
        (
            "per_device_train_batch_size",
            "gradient_accumulation_steps",
            "pipeline_parallel_size",
            "tensor_parallel_size",
            "expert_parallel_size",
            "context_parallel_size",
            "bf16",
            "fp16",
            "fp8",
        )
    )
    args = parser.parse_args(argv)
    require_trainable_family(args.model)
    hardware = _hardware(args)
    _, shape = _decoder(args.model)
    carried = carried_bytes(args.model, shape)
    values = run_arguments(args, hidden_size=shape.hidden)
    resolved = resolve(load(args.deepspeed_config), values, model=args.model)
    if values.fp8 != "no":
        _require_fp8(args, hardware, f"--fp8 {values.fp8}")
    one = predict(
        resolved,
        shape,
        args.block_size,
        hardware=hardware,
        fused_kernels=args.fused_kernels,
        sequences=_sequences(args),
        fp8=values.fp8 == "rowwise",
        lora=_lora(args),
    )
    assert isinstance(one, Estimate)  # its hardware is known
    lines = [*estimate_lines(one), *_reference_lines(args, one), *_carried_lines(carried)]
    print(json.dumps([_row(args, one, carried)], indent=2) if args.json else "\n".join(lines))
    return 0


def plan(argv: Sequence[str]) -> int:
    """Print the layouts of a number of ranks, best first; write the preset of one on request; return the exit code.

    Raises UserError for options that do not fit together, a model that the harness cannot train, and if no layout fits.
    """
    description = "Rank every layout of a number of ranks by its predicted speed."
    if "--calibrate" in argv:
        return _calibrate(argv)
    parser = _parser("plan", description, PLAN_EXAMPLE)
    parser.add_argument(
        "--calibrate",
        metavar="FILE",
        help="measure this machine's CPU, write its device file and exit; takes no other option",
    )
    parser.add_argument(
        "--precision",
        choices=tuple(ELEMENT_BYTES),
        help="default: bf16 where it is faster than fp32; fp8: with --fp8; fp4 with --like megatron or torchtitan",
    )
    parser.add_argument(
        "--like",
        choices=tuple(HABITS),
        default="deepspeed",
        help="predict how this program would train; deepspeed: as this harness runs it",
    )
    parser.add_argument("--top", type=positive, default=10, help="rows of the table")
    parser.add_argument("--row", type=positive, default=1, help="with --write: the row to write; 1 is the best")
    parser.add_argument("--write", type=path_argument, metavar="FILE", help="write the DeepSpeed JSON of a row")
    parser.add_argument(
        "--page", type=path_argument, metavar="FILE", help="write a page that plans in a browser, without a server"
    )
    args = parser.parse_args(argv)
    require_trainable_family(args.model)
    if args.preference is not None and args.page is not None:
        parser.error("--page plans training on the next token: leave out --preference")
    if args.use_peft and args.page is not None:
        parser.error("--page plans training of all parameters: leave out --use_peft")
    for name in ("write", "page"):
        if args.like != "deepspeed" and getattr(args, name) is not None:
            parser.error(f"--{name} is for --like deepspeed: {args.like} reads no DeepSpeed JSON")
    if args.like == "deepspeed" and args.precision == "fp4":
        parser.error("--precision fp4: this harness trains in fp32, bf16, fp16 and, with --fp8, fp8; see --like")
    task = _task(args)
    if args.like == "deepspeed" and args.precision == "fp8":
        _require_fp8(args, task.hardware, "--precision fp8")
    found = search(task)
    if args.page is not None:
        write_page(args.page, args.model, args.hardware, task, found)
    require_fit(task, found)
    if args.row > len(found.fitting):
        raise UserError(f"--row {args.row}: there are {len(found.fitting)} layouts that fit")
    if args.write is not None:
        precision = "bf16" if args.precision == "fp8" else task.workload.precision  # the run gets --fp8
        write_preset(args.write, found.fitting[args.row - 1].strategy, precision, args.model)
    carried = carried_bytes(args.model, task.workload.shape)
    if args.json:
        print(json.dumps([_row(args, one, carried) for one in found.fitting], indent=2))
        return 0
    devices = more_devices(task, found.fitting[0])
    lines = plan_lines(found, args.top, devices, more_memory(found))
    print("\n".join([*lines, *_reference_lines(args, found.fitting[0]), *_carried_lines(carried)]))
    return 0


def _calibrate(argv: Sequence[str]) -> int:
    """Write the device file of this machine's CPU, and print how to use it."""
    parser = VerbParser("plan", "Measure this machine's CPU, in a minute.")
    parser.add_argument("--calibrate", type=path_argument, required=True, metavar="FILE", help="device file to write")
    path = parser.parse_args(argv).calibrate
    calibrate(path)
    print(f"wrote {path}: use it as --hardware {path}")
    return 0


def _task(args: argparse.Namespace) -> Task:
    """Return the task that the arguments describe."""
    config, shape = _decoder(args.model)
    task = task_of(
        config,
        args.model,
        _hardware(args),
        world_size=args.world_size,
        sequence=args.block_size,
        global_batch=args.global_batch_size,
        precision=args.precision,
        shape=shape,
        habits=HABITS[args.like],
    )
    task = replace(task, sequences=_sequences(args), workload=replace(task.workload, lora=_lora(args)))
    if args.fused_kernels and task.workload.habits.loss_in_one_pass:
        task = replace(task, workload=replace(task.workload, kernels="fused"))
    return task


def _decoder(source: str) -> tuple[Mapping[str, object], DecoderShape]:
    """Return the config and the shape of a model; print a warning to standard error if the shape is a guess."""
    config, shape, doubt = counted_decoder(read_model_config(source), source)
    if doubt:
        print(f"warning: --model {source}: {shape.parameters:,} parameters are a guess: {doubt}", file=sys.stderr)
    return config, shape
