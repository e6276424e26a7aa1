#!/usr/bin/env python
"""Where the time of a step on a GPU goes, without a GPU: kernels, bytes and milliseconds by part.

    python scripts/bench/account.py --deepspeed_config zero1 --model_name_or_path llama-1b --block_size 4096 \\
        --hardware h100

One rank's step is traced by the dry run with its real shapes, and costed with the planner's formulas and the device's
figures. Every other flag is one of scripts/train.py. Norms, rotary embeddings, activations and the loss count as one
kernel each, unless `--fused_kernels false`; the JSON's `compile`, and `--compile` whatever the JSON says, count what a
compiler fuses as one. Waits for other ranks, and the data, are not counted, and
communication is counted as if nothing else ran beside it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from step_account.account import account

from harness.arguments import TrainingArguments
from harness.arguments.themes.lora import LoraArguments
from harness.arguments.themes.script import ScriptArguments
from harness.command_line import parse
from harness.dry_run.command import dry_run_plan
from harness.errors import UserError
from harness.planner.hardware import load_hardware, names
from harness.preflight import check_inputs
from harness.quiet import quiet
from harness.topology.env import LaunchEnv


def main() -> int:
    """Print the account."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--hardware", default="h100", help=f"{', '.join(names())}, or the path of a device file")
    parser.add_argument("--world_size", type=int, default=1, help="number of ranks of the run (default: 1)")
    parser.add_argument("--rank", type=int, default=0, help="the rank whose step is traced (default: 0)")
    parser.add_argument("--compile", action="store_true", help="count layers as torch.compile fuses them")
    parser.add_argument("--json", action="store_true", help="print JSON")
    own, words = parser.parse_known_args()
    if not 0 <= own.rank < own.world_size:
        parser.error(f"--rank {own.rank} is outside the {own.world_size} ranks of --world_size")
    try:
        hardware = load_hardware(own.hardware, own.world_size)
        kinds = [ScriptArguments, TrainingArguments, LoraArguments]
        script, args, lora = parse(kinds, words, prog="account.py", description="", epilog="")
        env = LaunchEnv(rank=own.rank, world_size=own.world_size)
        config = check_inputs(script, args, env, lora)
        with tempfile.TemporaryDirectory() as folder, quiet(Path(folder) / "log", own.json) as console:
            plan = dry_run_plan(script, args, config, lora)
            compiles = own.compile or plan.resolved.compile_backend is not None
            one_each = args.fused_kernels or args.use_liger_kernel is True
            fusion = "compile" if compiles else "kernels" if one_each else None
            found = account(plan, env, hardware, fusion)
            print(json.dumps(found.as_json(), indent=1) if own.json else found, file=console.out)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
