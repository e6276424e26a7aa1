"""The flags of logging, profiling and sampling."""

import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from harness.arguments.themes.flags import Flags, flag
from harness.arguments.themes.intervals import checked_interval
from harness.config.values.json_object import JsonObject
from harness.config.values.paths import usable_path
from harness.errors import UserError

MONITORS = {"tensorboard": "tensorboard", "wandb": "wandb", "csv": "csv_monitor", "comet": "comet"}
"""Name in `--report_to` -> section of the DeepSpeed JSON."""
PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}
"""Section -> package that must be installed for it."""
FILES = ("tensorboard", "csv")


@dataclass(kw_only=True)
class ReportingArguments(Flags):
    """When to log, and where to."""

    TITLE: ClassVar[str] = "Logs"

    logging_strategy: str = flag(
        "steps",
        "log every logging_steps steps, at the end of each epoch, or not at all",
        choices=("no", "steps", "epoch"),
    )
    logging_steps: float = flag(
        10,
        "steps between log events, below 1: the fraction of all steps; if given, output other than a terminal gets a "
        "line for each",
    )
    logging_first_step: bool = flag(False, "log the first step too")
    disable_tqdm: bool = flag(False, "print lines instead of a progress bar on a terminal")
    report_to: str = flag(
        "none", "none, a comma-separated list of tensorboard, wandb, comet, csv, or all that are installed"
    )
    run_name: str | None = flag(None, "name of the run in TensorBoard and W&B (default: run; the output_dir's name)")

    profile: int = flag(
        0,
        "number of steps to profile, after the first two: timeline of each rank, layers, memory; written to "
        "output_dir/profile for ds-harness report and ui.perfetto.dev",
        least=0,
    )
    sample_prompts: str | None = flag(
        None,
        "file of prompts to continue at each evaluation: one a line, or .jsonl with prompt or messages",
        paths=True,
        hf_only=True,
    )
    sample_tokens: int = flag(
        64,
        "largest number of tokens of a continuation; each costs a forward pass of all prompts",
        least=1,
        hf_only=True,
    )

    def reporters(self) -> list[str]:
        """Return the monitors that `report_to` names."""
        if self.report_to == "all":
            return [name for name, package in PACKAGES.items() if importlib.util.find_spec(package) is not None]
        return [name.strip() for name in self.report_to.split(",") if name.strip() not in ("", "none")]

    def check(self) -> None:
        """Raise UserError for an unknown monitor or an invalid interval."""
        self.logging_steps = checked_interval("logging_steps", self.logging_steps)
        unknown = set(self.reporters()) - MONITORS.keys()
        if unknown:
            raise UserError(
                f"--report_to {self.report_to}: {sorted(unknown)[0]} is not one of {', '.join(MONITORS)}, none, all"
            )


def within(output_dir: str, path: str, what: str) -> str:
    """Return a path from a config, made absolute below `output_dir`. Raises UserError for a path outside."""
    try:
        # Resolved, because a link in output_dir may lead out of it.
        found = usable_path(str(Path(output_dir, path))).resolve()
    except ValueError as error:
        raise UserError(f"{what} {path[:80]!r}: no file can have this name: {error}") from error
    root = Path(output_dir).resolve()
    # A config may come from somebody else, and must not make a run write elsewhere.
    if not found.is_relative_to(root):
        raise UserError(f"{what} {path!r}: is outside of --output_dir {output_dir}: give a path in it, as 'logs/mine'")
    return str(found)


def monitor_sections(args: ReportingArguments, output_dir: str, config: JsonObject) -> dict[str, JsonObject]:
    """Return section -> settings of the monitors enabled by `--report_to` or in the JSON.

    Raises UserError for a monitor that would write outside `output_dir`.
    """
    job = args.run_name or "run"
    found = {}
    for name, section in MONITORS.items():
        stated = config.get(section, {})
        if name not in args.reporters() and not stated.get("enabled"):
            continue
        if name in FILES:
            # An empty output_path, DeepSpeed's default, would put the files in the working directory.
            given = {key: value for key, value in stated.items() if value}
            merged = {"output_path": name, "job_name": job, **given, **({"job_name": job} if args.run_name else {})}
            path = Path(merged["output_path"], merged["job_name"])
            folder = within(output_dir, str(path), f"{section}.output_path and job_name")
            found[section] = {**merged, "output_path": str(Path(folder).parent), "job_name": Path(folder).name}
            continue
        asked = {}
        if name == "wandb":
            if name in args.reporters():
                asked = {"project": Path(output_dir).name, "name": args.run_name or Path(output_dir).name}
            # wandb's default is the working directory.
            asked["dir"] = output_dir
        found[section] = {**asked, **stated}
    return found


def require_packages(sections: Iterable[str]) -> None:
    """Raise UserError if the package of an enabled monitor is not installed."""
    for section in sections:
        package = PACKAGES.get(section)
        if package is not None and importlib.util.find_spec(package) is None:
            raise UserError(f"--report_to {section}: {package} is not installed: pip install {package}")
