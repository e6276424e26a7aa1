"""The verb `ds-harness train`: the harness's own script on the devices of this machine, or of several hosts.

`resilience.launch` starts the ranks. Here the number of ranks is found, and whatever can be refused is refused before
a process starts.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from harness.arguments import TrainingArguments
from harness.arguments.configure import read_config
from harness.checkpoint.integrity import require_unused
from harness.command_line import add_flags, parse
from harness.command_line.fewer_ranks import KINDS
from harness.config import ConfigCheck
from harness.config.values.view import ConfigView
from harness.console import print_if_heard
from harness.errors import UserError
from harness.installed import config_check
from harness.preflight import check_inputs
from harness.resilience.hosts import counts_own_devices, devices_here, find_hosts
from harness.resilience.launch import start
from harness.resilience.options import Options, add_launch_flags, training_options
from harness.topology.env import ACCELERATOR, LaunchEnv, inherited, replace_environment
from harness.verb_parser import VerbParser
from harness.wording import counted

DESCRIPTION = """Train a HuggingFace decoder on all devices of this machine, or of several hosts. Without a GPU the
ranks run on the CPU: the fewest that the layout takes, unless --num_accelerators says how many. The flags are those of
the run and those of a launch."""
EXAMPLE = """example:
  ds-harness train --deepspeed_config zero3 --model_name_or_path path/to/model --train_file my.jsonl \\
      --output_dir runs/mine"""
USAGE = f"usage: ds-harness train --FLAG VALUE ... (see --help)\n\n{EXAMPLE}"
THREADS = "OMP_NUM_THREADS"


def train(argv: Sequence[str]) -> int:
    """Train as the flags ask; return the exit code, as `launch` does. UserError for whatever a run would refuse."""
    if {"-h", "--help"} & set(argv):
        _parser().parse_args(["--help"])
    options = training_options(argv)
    if options.started:  # by a launch that has looked at the flags
        return start(options)
    words = options.script[1:]
    if not words:
        print(USAGE)
        return 2
    if not words[0].startswith("-"):
        raise UserError(f"{words[0]}: give flags alone; `ds-harness launch` starts a script of your own")
    script, args, lora, preference = parse(KINDS, words, prog="ds-harness train", description="", epilog="")
    if args.use_cpu:
        replace_environment({**inherited(), ACCELERATOR: "cpu"})
    if counts_own_devices(options):
        options = _on_devices_here(options, args)
    hosts = find_hosts(options)
    if not options.rdzv_endpoint and len(hosts) == 1 and hosts[0].is_here:
        check_inputs(script, args, LaunchEnv(world_size=len(hosts[0].devices)), lora, preference)
        if args.trains and args.resume_from_checkpoint is None and not args.overwrite_output_dir:
            require_unused(Path(args.output_dir))
    return start(options)


def fewest_ranks(args: TrainingArguments, check: ConfigCheck | None) -> int:
    """Return the smallest number of ranks for the layout: a single copy of the model, if its sizes allow that.

    Raises UserError if the config cannot be read; `check` reads it.
    """
    view = ConfigView(
        data=read_config(args.deepspeed_config, check).data,
        pp_override=args.pipeline_parallel_size,
        tp_override=args.tensor_parallel_size,
        ep_override=args.expert_parallel_size,
        cp_override=args.context_parallel_size,
    )
    # Context ranks and ranks with whole experts both subdivide the data axis, whose size both must divide.
    return view.pp_size * view.tp_size * math.lcm(view.cp_size, max(1, view.ep_size // view.tp_size))


def _on_devices_here(options: Options, args: TrainingArguments) -> Options:
    """Return the options with a rank on each device of this host, or with the fewest ranks on its CPU.

    Ranks on a CPU divide its cores among them, unless the environment sets their threads.
    """
    kind, ranks = devices_here()
    if kind == "cpu":
        ranks = fewest_ranks(args, config_check())
        threads = max(1, len(os.sched_getaffinity(0)) // ranks)
        replace_environment({THREADS: str(threads), **inherited()})
        text = f"no GPU was found: {counted(ranks, 'rank')} on the CPU, {counted(threads, 'thread')} each"
        print_if_heard(f"{text} (--num_accelerators N for another number)", sys.stdout)
    return replace(options, num_accelerators=ranks)


def _parser() -> VerbParser:
    """Return the parser of all flags, for --help: those of the launch, and those of the run."""
    usage = "%(prog)s --FLAG VALUE ..."
    parser = VerbParser("train", DESCRIPTION, EXAMPLE, usage=usage, allow_abbrev=False)
    parser.add_argument("--config", metavar="FILE", help="flags in a YAML or JSON file, or the run.json of a run")
    add_launch_flags(parser.add_argument_group("Ranks and hosts"), of_any_script=False)
    for kind in KINDS:
        add_flags(parser, kind)
    return parser
