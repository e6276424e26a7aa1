"""What of a config is read while runs go on: each field of DeepSpeed's own config objects that anybody asks for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from harness import Trainer, TrainingArguments

POINTS = [(torch.tensor([i / 8, 1.0]), torch.tensor([i / 4])) for i in range(8)]
ZERO = [{"zero_optimization": {"stage": stage}} for stage in range(4)]
CONFIGS: list[dict[str, Any]] = [
    *ZERO,
    {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}},
    {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}},
    {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}, "zero_optimization": {"stage": 1}},
    {
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "timers": {"throughput": {"enabled": True, "synchronized": True}},
    },
    {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}},
    {
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {}},
        "flops_profiler": {"enabled": True, "output_file": "flops.txt"},
        "comms_logger": {"enabled": True},
        "wall_clock_breakdown": True,
        "memory_breakdown": True,
        "dump_state": True,
    },
]


def squares(outputs: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """A loss in float32, which in bf16 no GPU would compute from outputs and labels of two types."""
    return nn.functional.mse_loss(outputs.float(), wanted)


Reads = dict[str, set[str]]
"""Names of the fields that were read, by the name of the config's class."""


def reads(folder: str) -> Reads:
    """Train, save and go on by each of CONFIGS; returns what was read since the config was parsed."""
    with _watching() as found:
        for number, config in enumerate(CONFIGS):
            args = TrainingArguments(
                str(Path(folder, str(number))),
                deepspeed_config={"train_batch_size": 4, **config},
                max_steps=4,
                save_steps=2,
            )
            for resumed in (None, True):
                trainer = Trainer([nn.Linear(2, 4), nn.Linear(4, 1)], args, POINTS, loss_fn=squares)
                trainer.train(resumed)
                trainer.close()
    return dict(found)


@contextmanager
def _watching() -> Iterator[defaultdict[str, set[str]]]:
    """Note each field of a config object that is read, but for those that DeepSpeed's parser and its printer read."""
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel, DeepSpeedConfigObject

    found: defaultdict[str, set[str]] = defaultdict(set)
    silent = [0]

    def noting(kind: type) -> None:
        def read(self: Any, name: str) -> Any:
            if not silent[0] and not name.startswith("_"):
                fields = getattr(type(self), "model_fields", None) or object.__getattribute__(self, "__dict__")
                if name in fields:
                    found[type(self).__name__].add(name)
            return object.__getattribute__(self, name)

        kind.__getattribute__ = read  # type: ignore[method-assign, assignment]

    def hushed(kind: type, name: str) -> None:
        method = getattr(kind, name)

        def quietly(*words: Any, **named: Any) -> Any:
            silent[0] += 1
            try:
                return method(*words, **named)
            finally:
                silent[0] -= 1

        setattr(kind, name, quietly)

    for kind in (DeepSpeedConfigModel, DeepSpeedConfigObject, DeepSpeedConfig):
        noting(kind)
    for name in ("__init__", "print"):
        hushed(DeepSpeedConfig, name)
    yield found  # in a process of its own, which ends
