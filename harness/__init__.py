"""Train any HuggingFace decoder with DeepSpeed: pipeline, tensor and data parallel from one JSON.

Importing this package imports neither torch nor deepspeed and changes nothing; its names are loaded on first use, and
type checkers find them in `__init__.pyi`. What a run prints also goes to the logger `harness`.
"""

import logging
from importlib import import_module
from typing import Any

_HOMES = {
    "ByteTokenizer": "harness.data.tokenizer",
    "ColumnParallelLinear": "harness.parallel.tensor.layers",
    "ConfigError": "harness.config.text.diagnostic",
    "Diagnostic": "harness.config.text.diagnostic",
    "EarlyStoppingCallback": "harness.extras.early_stopping",
    "LoraArguments": "harness.arguments.themes.lora",
    "PreferenceArguments": "harness.arguments.themes.preferences",
    "Preferences": "harness.preferences.objective",
    "RowParallelLinear": "harness.parallel.tensor.layers",
    "RunConfig": "harness.arguments.configure",
    "Severity": "harness.config.text.diagnostic",
    "StepRecord": "harness.training.callbacks",
    "Trainer": "harness.composition",
    "TrainerCallback": "harness.training.callbacks",
    "TrainerControl": "harness.training.callbacks",
    "TrainerState": "harness.training.callbacks",
    "TrainingArguments": "harness.installed",
    "UserError": "harness.errors",
    "UserErrors": "harness.errors",
    "VocabParallelEmbedding": "harness.parallel.tensor.layers",
    "check": "harness.checking",
    "load": "harness.config.text.document",
    "read_run_config": "harness.installed",
}

__all__ = list(_HOMES)

# Without a handler Python would print the warnings, which the console has printed already.
logging.getLogger(__name__).addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("ds-harness")
    if name not in _HOMES:
        raise AttributeError(f"module 'harness' has no attribute {name!r}")
    try:
        return getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        raise import_module("harness.installed").refusal(name, error) from None


def __dir__() -> list[str]:
    return [*_HOMES, "__version__"]
