"""Train any HuggingFace decoder with DeepSpeed: pipeline, tensor and data parallel from one JSON.

Importing this package imports neither torch nor deepspeed and changes nothing; its names are loaded on first use. What
a run prints also goes to the logger `harness`.
"""

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.arguments import LoraArguments as LoraArguments
    from harness.arguments import TrainingArguments as TrainingArguments
    from harness.arguments.configure import RunConfig as RunConfig
    from harness.arguments.configure import read_run_config as read_run_config
    from harness.config import ConfigError as ConfigError
    from harness.config import Diagnostic as Diagnostic
    from harness.config import Severity as Severity
    from harness.config import check as check
    from harness.config import load as load
    from harness.data.tokenizer import ByteTokenizer as ByteTokenizer
    from harness.errors import UserError as UserError
    from harness.errors import UserErrors as UserErrors
    from harness.parallel.tensor.layers import ColumnParallelLinear as ColumnParallelLinear
    from harness.parallel.tensor.layers import RowParallelLinear as RowParallelLinear
    from harness.parallel.tensor.layers import VocabParallelEmbedding as VocabParallelEmbedding
    from harness.training.callbacks import StepRecord as StepRecord
    from harness.training.callbacks import TrainerCallback as TrainerCallback
    from harness.training.callbacks import TrainerControl as TrainerControl
    from harness.training.callbacks import TrainerState as TrainerState
    from harness.training.callbacks.early_stopping import EarlyStoppingCallback as EarlyStoppingCallback
    from harness.training.trainer import Trainer as Trainer

_HOMES = {
    "ByteTokenizer": "harness.data.tokenizer",
    "ColumnParallelLinear": "harness.parallel.tensor.layers",
    "ConfigError": "harness.config",
    "Diagnostic": "harness.config",
    "EarlyStoppingCallback": "harness.training.callbacks.early_stopping",
    "LoraArguments": "harness.arguments",
    "RowParallelLinear": "harness.parallel.tensor.layers",
    "RunConfig": "harness.arguments.configure",
    "Severity": "harness.config",
    "StepRecord": "harness.training.callbacks",
    "Trainer": "harness.training.trainer",
    "TrainerCallback": "harness.training.callbacks",
    "TrainerControl": "harness.training.callbacks",
    "TrainerState": "harness.training.callbacks",
    "TrainingArguments": "harness.arguments",
    "UserError": "harness.errors",
    "UserErrors": "harness.errors",
    "VocabParallelEmbedding": "harness.parallel.tensor.layers",
    "check": "harness.config",
    "load": "harness.config",
    "read_run_config": "harness.arguments.configure",
}

__all__ = list(_HOMES)

# without a handler Python would print the warnings, which the console has printed already
logging.getLogger(__name__).addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("ds-harness")
    if name not in _HOMES:
        raise AttributeError(f"module 'harness' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*_HOMES, "__version__"]
