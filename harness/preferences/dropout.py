"""Switch dropout off: both sequences of a pair, and the model before training, are compared without its noise."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from transformers import PretrainedConfig


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout rate in a model to 0: of dropout layers, in numbers of modules, and in the modules' configs.

    TRL sets only those of `nn.Dropout`, so attention whose rate is a number keeps its dropout there.
    """
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        _clear(vars(module))
        if isinstance(config := getattr(module, "config", None), PretrainedConfig):
            _clear(vars(config))


def dropout_rates(config: PretrainedConfig) -> dict[str, float]:
    """Return the dropout rates above 0 of a config by name."""
    return {name: value for name, value in vars(config).items() if _is_rate(name, value) and value > 0}


def _clear(values: dict[str, object]) -> None:
    for name, value in values.items():
        if _is_rate(name, value):
            values[name] = 0.0


def _is_rate(name: str, value: object) -> bool:
    return "drop" in name and isinstance(value, float)
