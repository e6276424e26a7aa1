"""The verb `ds-harness cluster`: write the job file for Kubernetes or Slurm."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import yaml

from harness.arguments.words import RESUME, value_of, with_resume
from harness.cluster.job import Job
from harness.cluster.kubernetes import job_set, train_job
from harness.cluster.slurm import batch
from harness.errors import UserError
from harness.verb_parser import VerbParser, positive

DESCRIPTION = """Write a Kubernetes job (for `kubectl apply -f`) or Slurm batch file (for `sbatch`) that runs a training
script under `ds-harness launch` on every host. It starts no job."""
EXAMPLE = """example:
  ds-harness cluster kubernetes --nodes 4 --gpus 8 --image registry/train:1 --volume checkpoints --output job.yaml \\
      -- scripts/train.py --deepspeed_config pipeline_3d --max_steps 1000 --output_dir /data/run
  ds-harness cluster slurm --nodes 4 --gpus 8 --output job.sbatch \\
      -- scripts/train.py --deepspeed_config pipeline_3d --max_steps 1000 --output_dir runs/a"""
NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")  # Kubernetes' labels take 63 characters; it appends to names
SAVE_S = 60.0  # seconds of a save, if no run has measured one
SPARE_S = 60.0  # besides the save: to finish a step before it, and to end the processes after it


def cluster(argv: Sequence[str]) -> int:
    """Write the job file and return the exit code.

    Raises UserError for a script that itself says where to resume, or that writes outside of the volume.
    """
    own, script = _parted(argv)
    parser = VerbParser("cluster", DESCRIPTION, EXAMPLE)
    add = parser.add_argument
    add("kind", choices=("kubernetes", "slurm"), help="what will run the file")
    add("--nodes", type=positive, default=1, help="hosts")
    add("--min_nodes", type=positive, help="fewest hosts with which the run continues (default: --nodes, all of them)")
    add("--gpus", type=positive, metavar="N", help="GPUs on each host, one for each rank")
    add("--ranks", type=positive, metavar="N", help="ranks on each host without GPUs (default: --gpus)")
    add("--max_restarts", type=int, default=20, metavar="N", help="restarts until the launch gives up")
    of_save = f"how long a save takes (default: from run.json, else {SAVE_S:g})"
    add("--save_seconds", type=float, metavar="S", help=of_save)
    add("--name", default="ds-harness", help="name of the job")
    add("--output", type=Path, metavar="FILE", help="where to write (default: standard output)")
    add("--resource", choices=("TrainJob", "JobSet"), default="TrainJob", help="kubernetes: kind of job")
    add("--image", default="ds-harness:latest", help="kubernetes: the container image, as of scripts/Containerfile")
    add("--volume", default="", metavar="CLAIM", help="kubernetes: PersistentVolumeClaim for --output_dir")
    add("--mount", default="/data", metavar="DIR", help="kubernetes: folder at which pods mount it")
    add("--namespace", default="", help="kubernetes: namespace of the job (default: kubectl's)")
    add("--cpus", default="", metavar="N", help="kubernetes: processors of each pod")
    add("--memory", default="", metavar="SIZE", help="kubernetes: memory of each pod, as 900Gi")
    add("--shared_memory", type=positive, default=16, metavar="GIB", help="kubernetes: size of /dev/shm")
    args = parser.parse_args(own)
    if not script:
        parser.error("the training script is missing: add -- SCRIPT ARGUMENTS")
    ranks = args.ranks or args.gpus
    if ranks is None:
        parser.error("give --gpus, or --ranks for hosts without GPUs")
    if args.min_nodes is not None and args.min_nodes > args.nodes:
        parser.error(f"--min_nodes {args.min_nodes} is more than --nodes {args.nodes}")
    for flag in ("name", "namespace"):
        if (given := getattr(args, flag)) and not NAME.fullmatch(given):
            parser.error(f"--{flag} {given}: must be lower-case letters, digits and dashes, at most 40, a letter first")
    if any(word.partition("=")[0] == RESUME for word in script):
        parser.error(f"the job goes on from its newest checkpoint: leave out {RESUME}")
    folder = value_of(script, "--output_dir")
    if args.kind == "kubernetes" and args.volume and not (folder or "").startswith(args.mount.rstrip("/") + "/"):
        parser.error(f"--output_dir {folder}: must lie in the volume, for instance {args.mount.rstrip('/')}/run")
    save = args.save_seconds if args.save_seconds is not None else measured_save(folder) or SAVE_S
    job = Job(
        name=args.name,
        nodes=args.nodes,
        least=args.min_nodes or args.nodes,
        ranks=ranks,
        gpus=args.gpus is not None,
        restarts=args.max_restarts,
        grace_s=int(2 * save + SPARE_S),
        words=tuple(with_resume(script)),
        image=args.image,
        volume=args.volume,
        mount=args.mount,
        namespace=args.namespace,
        cpus=args.cpus,
        memory=args.memory,
        shared_gib=args.shared_memory,
    )
    if args.kind == "slurm":
        text, how = batch(job), "sbatch"
    else:
        documents = train_job(job) if args.resource == "TrainJob" else [job_set(job)]
        text = yaml.safe_dump_all(documents, sort_keys=False, width=100)
        how = "kubectl apply -f"
    if args.output is None:
        sys.stdout.write(text)
        return 0
    try:
        args.output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{args.output}: cannot be written: {error.strerror}") from error
    print(f"written: {args.output}; start it with `{how} {args.output}`")
    return 0


def measured_save(folder: str | None) -> float | None:
    """Return the longest save of an earlier run in this folder, in seconds; None if none was measured."""
    with suppress(OSError, ValueError, TypeError, AttributeError):
        found = json.loads((Path(folder or "") / "run.json").read_text(encoding="utf-8"))
        return float(found["longest_save_s"]) or None
    return None


def _parted(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the command line at the first `--`: this verb's arguments, and the training script with its own."""
    words = list(argv)
    if "--" not in words:
        return words, []
    at = words.index("--")
    return words[:at], words[at + 1 :]
