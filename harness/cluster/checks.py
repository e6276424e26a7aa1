"""Refuse a job that would fail on the cluster, before its file is written: as a dry run refuses a run."""

from __future__ import annotations

import posixpath
import re
from argparse import ArgumentTypeError
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.arguments import TrainingArguments
from harness.arguments.words import value_of
from harness.command_line import parse
from harness.command_line.fewer_ranks import KINDS
from harness.errors import UserError
from harness.hf.locate import model_directory
from harness.installed import read_run_config
from harness.preflight import check_inputs
from harness.resilience.options import usable_file
from harness.resilience.script import Script
from harness.topology.env import LaunchEnv

OURS = ("harness.train", "scripts/train.py")  # the harness's own script; in a container it lies elsewhere
CPUS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,3})?|[0-9]{1,9}m")
MEMORY = re.compile(r"[0-9]{1,18}(\.[0-9]{1,3})?(Ki|Mi|Gi|Ti|Pi|Ei|k|M|G|T|P|E)?")


def cpus(text: str) -> str:
    """Return a number of processors as Kubernetes takes it: `8`, `1.5` or `500m`."""
    if CPUS.fullmatch(text) is None or not float(text.rstrip("m")):
        raise ArgumentTypeError("must be a number of processors, as 8 or 500m")
    return text


def memory(text: str) -> str:
    """Return a size as Kubernetes takes it."""
    if MEMORY.fullmatch(text) is None or not float(text.rstrip("KMGTPEki")):
        raise ArgumentTypeError("must be a size in Kubernetes' units, as 900Gi or 900G")
    return text


def require_startable(words: Sequence[str], world_size: int, *, elsewhere: str | None) -> None:
    """Refuse a run that would refuse to start, if the script is the harness's own.

    Args:
        words: the script and its arguments.
        elsewhere: the folder of a volume that only the job's pods see, "" if they have none; None if the job sees the
            files of this host.

    Raises:
        UserError: the script or the config does not exist, a flag is misspelt, the layout does not fit `world_size`.
    """
    is_ours = words[0] in OURS or Script(words[:1]).is_known
    if elsewhere is None and words[0] != OURS[0] and not usable_file(words[0]):
        raise UserError(f"{words[0]}: no such file")
    if not is_ours:
        return
    script, args, lora, preference = parse(KINDS, words[1:], prog="", description="", epilog="")

    is_model_here = Path(script.model_name_or_path).exists() or "/" not in script.model_name_or_path
    if elsewhere is None and is_model_here:  # a model of the hub would be downloaded
        check_inputs(script, args, LaunchEnv(world_size=world_size), lora, preference)
    elif not _is_in(args.deepspeed_config, elsewhere):
        model = str(model_directory(script.model)) if is_model_here else None
        read_run_config(args, world_size=world_size, model=model)


def require_kept(words: Sequence[str], volume: str, mount: str) -> None:
    """Raise UserError if a pod's `output_dir` does not lie in the volume: it would be lost with the pod."""
    folder = value_of(words, "--output_dir")
    if folder is None and words[0] not in OURS:
        return
    folder = folder or TrainingArguments.output_dir
    if not volume:
        raise UserError(f"--output_dir {folder}: lies in the pod and is lost with it: give --volume CLAIM")
    if not _is_in(folder, mount):
        raise UserError(f"--output_dir {folder}: must lie in the volume, for instance {mount.rstrip('/')}/run")


def _is_in(path: Mapping[str, object] | str | None, folder: str | None) -> bool:
    """Return whether a path lies below a folder, of which nothing is known here."""
    if not folder or not isinstance(path, str):
        return False
    return posixpath.normpath(path).startswith(posixpath.normpath(folder).rstrip("/") + "/")
