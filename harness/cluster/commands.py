"""The verb `ds-harness cluster`: write the job file for Kubernetes or Slurm."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from harness.arguments.words import RESUME, value_of, with_resume
from harness.atomic import write_output
from harness.cluster.checks import cpus, memory, require_kept, require_startable
from harness.cluster.job import Job
from harness.cluster.kubernetes import job_set, train_job
from harness.cluster.slurm import batch
from harness.config.values.json_file import object_or_empty
from harness.errors import UserError
from harness.verb_parser import VerbParser, number, path_argument, positive, whole_number

DESCRIPTION = """Write a Kubernetes job (for `kubectl apply -f`) or Slurm batch file (for `sbatch`) that runs a training
script under `ds-harness launch` on every host. It starts no job."""
EXAMPLE = """example:
  ds-harness cluster kubernetes --nodes 4 --gpus 8 --image registry/train:1 --volume checkpoints --output job.yaml \\
      -- scripts/train.py --deepspeed_config pipeline_3d --max_steps 1000 --output_dir /data/run
  ds-harness cluster slurm --nodes 4 --gpus 8 --output job.sbatch \\
      -- scripts/train.py --deepspeed_config pipeline_3d --max_steps 1000 --output_dir runs/a"""
NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")  # Kubernetes' labels take 63 characters; it appends to names
OF_PODS = ("resource", "image", "volume", "mount", "namespace", "cpus", "memory", "shared_memory")
CLAIM = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
IMAGE = re.compile(r"[\w./:@-]{1,255}", re.ASCII)
SAVE_S = 60.0  # seconds of a save, if no run has measured one
SPARE_S = 60.0  # besides the save: to finish a step before it, and to end the processes after it


def cluster(argv: Sequence[str]) -> int:
    """Write the job file and return the exit code.

    Raises UserError for a script that itself says where to resume, or that writes outside of the volume.
    """
    own, script = _parted(argv)
    parser = _parser()
    args = parser.parse_args(own)
    ranks = args.ranks or args.gpus
    _require(parser, args, script)
    folder = value_of(script, "--output_dir")
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
        cpus=args.cpus or "",
        memory=args.memory or "",
        shared_gib=args.shared_memory,
    )
    if args.kind == "slurm":
        text = batch(job)
        how = "sbatch"
    else:
        documents = train_job(job) if args.resource == "TrainJob" else [job_set(job)]
        text = yaml.safe_dump_all(documents, sort_keys=False, width=100)
        how = "kubectl apply -f"
    if args.output is None:
        sys.stdout.write(text)
        return 0
    try:
        write_output(args.output, text)
    except OSError as error:
        raise UserError(f"{args.output}: cannot be written: {error.strerror}") from error
    print(f"written: {args.output}; start it with `{how} {args.output}`")
    return 0


def _parser() -> VerbParser:
    parser = VerbParser("cluster", DESCRIPTION, EXAMPLE)
    add = parser.add_argument
    add("kind", choices=("kubernetes", "slurm"), help="what will run the file")
    add("--nodes", type=positive, default=1, help="hosts")
    add("--min_nodes", type=positive, help="fewest hosts with which the run continues (default: --nodes, all of them)")
    add("--gpus", type=positive, metavar="N", help="GPUs on each host, one for each rank")
    add("--ranks", type=positive, metavar="N", help="ranks on each host without GPUs (default: --gpus)")
    add("--max_restarts", type=whole_number, default=20, metavar="N", help="restarts until the launch gives up")
    of_save = f"how long a save takes (default: from run.json, else {SAVE_S:g})"
    add("--save_seconds", type=number, metavar="S", help=of_save)
    add("--name", default="ds-harness", help="name of the job")
    add("--output", type=path_argument, metavar="FILE", help="where to write (default: standard output)")
    add("--resource", choices=("TrainJob", "JobSet"), default="TrainJob", help="kubernetes: kind of job")
    add("--image", default="ds-harness:latest", help="kubernetes: the container image, as of scripts/Containerfile")
    add("--volume", default="", metavar="CLAIM", help="kubernetes: PersistentVolumeClaim for --output_dir")
    add("--mount", type=_mount, default="/data", metavar="DIR", help="kubernetes: folder at which pods mount it")
    add("--namespace", default="", help="kubernetes: namespace of the job (default: kubectl's)")
    add("--cpus", type=cpus, metavar="N", help="kubernetes: processors of each pod")
    add("--memory", type=memory, metavar="SIZE", help="kubernetes: memory of each pod, as 900Gi")
    add("--shared_memory", type=positive, default=16, metavar="GIB", help="kubernetes: size of /dev/shm")
    return parser


def _require(parser: VerbParser, args: argparse.Namespace, script: Sequence[str]) -> None:
    """Refuse arguments that do not fit together, and a run that would fail. UserError, or the parser's exit."""
    if not script:
        parser.error("the training script is missing: add -- SCRIPT ARGUMENTS")
    if args.ranks is None and args.gpus is None:
        parser.error("give --gpus, or --ranks for hosts without GPUs")
    if args.min_nodes is not None and args.min_nodes > args.nodes:
        parser.error(f"--min_nodes {args.min_nodes} is more than --nodes {args.nodes}")
    for flag in ("name", "namespace"):
        if (given := getattr(args, flag)) and not NAME.fullmatch(given):
            parser.error(f"--{flag} {given}: must be lower-case letters, digits and dashes, at most 40, a letter first")
    if args.volume and not CLAIM.fullmatch(args.volume):
        parser.error(f"--volume {args.volume}: must be a claim's name: lower-case letters, digits, dashes, dots")
    if not IMAGE.fullmatch(args.image):
        parser.error(f"--image {args.image}: must be the name of an image, as registry/train:1")
    if any(word.partition("=")[0] == RESUME for word in script):
        parser.error(f"the job goes on from its newest checkpoint: leave out {RESUME}")
    in_pods = args.kind == "kubernetes"
    for name in OF_PODS if not in_pods else ():
        if getattr(args, name) != parser.get_default(name):
            parser.error(f"--{name} is for kubernetes")
    volume = None
    if in_pods:
        require_kept(script, args.volume, args.mount)
        volume = args.mount if args.volume else ""
    require_startable(script, args.nodes * (args.ranks or args.gpus), elsewhere=volume)


def _mount(text: str) -> str:
    """Return the folder at which a volume is mounted."""
    if not text.startswith("/") or ":" in text or not text.isprintable() or text.strip("/") == "":
        raise argparse.ArgumentTypeError("must be a folder's absolute path, without a colon")
    return text


def measured_save(folder: str | None) -> float | None:
    """Return the longest save of an earlier run in this folder, in seconds; None if none was measured."""
    found = object_or_empty(Path(folder or "") / "run.json").get("longest_save_s")
    return found or None if isinstance(found, float) else None


def _parted(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the command line at the first `--`: this verb's arguments, and the training script with its own."""
    words = list(argv)
    if "--" not in words:
        return words, []
    at = words.index("--")
    return words[:at], words[at + 1 :]
