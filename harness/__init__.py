"""Train any HuggingFace decoder with DeepSpeed: pipeline, tensor and data parallel from one JSON.

Importing this package imports neither torch nor deepspeed; `Trainer` and its companions are loaded on first use. A
program that uses them shows a UserError that it does not catch as one line.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.arguments import TrainingArguments as TrainingArguments
    from harness.errors import UserError as UserError
    from harness.training.best_model import EarlyStoppingCallback as EarlyStoppingCallback
    from harness.training.callbacks import TrainerCallback as TrainerCallback
    from harness.training.trainer import Trainer as Trainer

_HOMES = {
    "EarlyStoppingCallback": "harness.training.best_model",
    "Trainer": "harness.training.trainer",
    "TrainerCallback": "harness.training.callbacks",
    "TrainingArguments": "harness.arguments",
    "UserError": "harness.errors",
}

__all__ = ["EarlyStoppingCallback", "Trainer", "TrainerCallback", "TrainingArguments", "UserError"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("ds-harness")
    if name not in _HOMES:
        raise AttributeError(f"module 'harness' has no attribute {name!r}")
    import_module("harness.resilience.process.uncaught").show_in_one_line()
    return getattr(import_module(_HOMES[name]), name)
