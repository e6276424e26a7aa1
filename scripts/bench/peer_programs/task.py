"""What every program trains, and how its steps are timed."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

RATE, LARGEST_NORM = 1e-3, 1.0


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is trained.

    Attributes:
        shape: of the model, as its config has it.
        family: of the model.
        micro_batches, samples, length: of a step, over all replicas.
        dtype: name of the type that is computed in.
    """

    shape: dict[str, int]
    micro_batches: int
    samples: int
    length: int
    dtype: str = "float32"
    family: str = "llama"

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.micro_batches * self.samples * self.length

    def write(self, folder: Path, *, weights: bool = True) -> None:
        """Write it with the weights that all programs begin with; without them each makes its own."""
        torch.manual_seed(0)
        config = AutoConfig.for_model(self.family, **self.shape)
        if weights:
            AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        else:
            config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[self.family]]
            config.save_pretrained(folder)
        (folder / "work.json").write_text(json.dumps(asdict(self)))


@dataclass
class Task:
    """What a rank of a program trains; every step takes the whole data, so no order of samples counts.

    Attributes:
        folder: of the model's weights.
        steps: to make.
        losses, seconds: of the steps made.
    """

    folder: Path
    steps: int
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @cached_property
    def work(self) -> Work:
        """What is trained."""
        return Work(**json.loads((self.folder / "work.json").read_text()))

    @property
    def device(self) -> torch.device:
        """Of this rank."""
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")

    @property
    def rank(self) -> int:
        """This process's number."""
        return int(os.environ.get("RANK", "0"))

    @property
    def size(self) -> int:
        """How many processes there are."""
        return int(os.environ.get("WORLD_SIZE", "1"))

    def model(self, **options: Any) -> Any:
        """Return the model with its first weights; `options` of transformers."""
        if not list(self.folder.glob("*.safetensors")):
            torch.manual_seed(0)
            with self.device:
                return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(self.folder), **options)
        return AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32, **options).to(self.device)

    def samples(self) -> Tensor:
        """Return the token ids of a step, [samples, length]."""
        work, seeded = self.work, torch.Generator().manual_seed(1)
        shape = (work.micro_batches * work.samples, work.length)
        return torch.randint(0, work.shape["vocab_size"], shape, generator=seeded)

    def micro_batches(self, replicas: int = 1) -> list[Tensor]:
        """Return this data-parallel rank's micro-batches of a step, each [samples, length]."""
        own = self.rank if replicas > 1 else 0
        return list(self.samples().to(self.device).split(self.work.samples))[own::replicas]

    def run(self, step: Callable[[], float]) -> None:
        """Make the steps; `step` returns its loss, the mean over all tokens of the step."""
        for _ in range(self.steps):
            if dist.is_initialized():
                dist.barrier()
            begun = time.perf_counter()
            self.losses.append(step())
            self.seconds.append(time.perf_counter() - begun)


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the mean loss of predicting each next token."""
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    """Return the optimizer of all programs."""
    return torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.0)


def mean_over_ranks(value: float) -> float:
    """Return the mean of a number of each rank."""
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def clip(parameters: list[nn.Parameter], shares: list[Tensor]) -> None:
    """Clip gradients by the norm over all ranks; `shares` are the local gradients that count on this rank."""
    squares = torch.stack([share.square().sum() for share in shares]).sum()
    dist.all_reduce(squares)
    factor = min(1.0, LARGEST_NORM / (float(squares) ** 0.5 + 1e-6))
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor)
