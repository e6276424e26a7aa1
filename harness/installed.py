"""Which parts are installed, and those that are used before torch is imported."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING

from harness import arguments
from harness.arguments import configure
from harness.arguments.configure import RunConfig
from harness.config import ConfigCheck
from harness.errors import UserError
from harness.resilience.process.watching import Watch
from harness.uncaught import show_in_one_line

PARTS = (
    *("harness.checking", "harness.cluster", "harness.context_parallel", "harness.data", "harness.dry_run"),
    *("harness.extras", "harness.huggingface", "harness.planner", "harness.preferences", "harness.report"),
    *("harness.resilience.watch", "harness.verify"),
)
"""The folders that can be deleted. What needs one of them is then refused in one line, and the rest works."""


def absent_part(module: str) -> str | None:
    """Return the part that is not installed, if this module lies in one; else None."""
    holding = (part for part in PARTS if f"{module}.".startswith(f"{part}."))
    return next((part for part in holding if not is_installed(part)), None)


def refusal(name: str, error: ModuleNotFoundError) -> Exception:
    """Return what `harness.NAME` raises if its module cannot be imported: UserError if that lies in an absent part."""
    part = absent_part(error.name or "")
    if part is None:
        return error
    show_in_one_line()
    return UserError(f"harness.{name} needs {part}, which is not installed")


def is_installed(folder: str) -> bool:
    """Return whether the package of a part is installed."""
    spec = find_spec(folder)
    return spec is not None and spec.origin is not None  # a deleted package may leave a folder of caches: no origin


def require_installed(folder: str, what: str) -> None:
    """Raise UserError if the part that `what` needs is not installed."""
    if not is_installed(folder):
        raise UserError(f"{what} needs {folder}, which is not installed")


def config_check() -> ConfigCheck | None:
    """Return the check of a run's config; None if that part is not installed."""
    if not is_installed("harness.checking"):
        return None
    from harness.checking import ConfigRules

    return ConfigRules()


def read_run_config(args: arguments.TrainingArguments, *, world_size: int, model: str | None = None) -> RunConfig:
    """Read and check the config of a run.

    Args:
        world_size: number of ranks.
        model: a preset's name or a directory, whose heads and layers the layout must fit; None: not checked.

    Raises:
        ConfigError: the config is wrong, cannot run on so many ranks, or contradicts an argument.
    """
    return configure.read_run_config(args, world_size=world_size, check=config_check(), model=model)


def watch() -> Watch:
    """Return the watch of a run; one that watches nothing if the part is not installed."""
    if not is_installed("harness.resilience.watch"):
        return Watch()
    from harness.resilience.watch.part import RankWatch

    return RankWatch()


if TYPE_CHECKING or is_installed("harness.huggingface"):
    from harness.huggingface.arguments import HuggingFaceArguments as BaseArguments
else:
    BaseArguments = arguments.TrainingArguments


class TrainingArguments(BaseArguments):
    __doc__ = arguments.TrainingArguments.__doc__

    @classmethod
    def own_names(cls, given: Mapping[str, object]) -> Mapping[str, object]:
        """Return keyword arguments under the names of the flags; see the base class."""
        show_in_one_line()  # an error here usually ends the program: print it without a traceback
        return super().own_names(given)
