"""What the training tests run on ranks, and the plain single-process training that they are compared with."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, PreTrainedModel

from harness import Trainer, TrainingArguments, UserError
from harness.checkpoint import integrity
from harness.checkpoint.directories import Manifest, read_manifest
from harness.parallel.plans.experts import run_where_aligned
from tests.support.models import model_of

BLOCK, BATCH = 32, 8
STEPS = 3  # the third is the first whose update comes from moments of two steps

Curve = list[tuple[float, float]]
"""Loss and gradient norm of each step."""


@dataclass(frozen=True)
class Job:
    """One training run: a layout as a name (`pp2tp2z1`), changes to the config and to the arguments."""

    model: str
    layout: str
    config: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    masked: bool = False

    def size(self, axis: str) -> int:
        """The number after an axis' letters in the layout's name; 1 if it is not named."""
        _, found, tail = self.layout.partition(axis)
        return int(tail[0]) if found else 1

    def deepspeed_config(self) -> dict[str, Any]:
        """The DeepSpeed JSON of this run."""
        data = self.size("dp")
        # four micro-batches where stages wait for each other, else two: each costs the same again
        micro = BATCH // data // (4 if self.size("pp") > 1 and data < 4 else 2)
        config = {
            "train_batch_size": BATCH,
            "train_micro_batch_size_per_gpu": micro,
            "gradient_accumulation_steps": BATCH // data // micro,
            "zero_optimization": {"stage": int(self.layout[-1])},
            "pipeline": {"stages": self.size("pp"), "activation_checkpoint_interval": 1},
            "tensor_parallel": {"autotp_size": self.size("tp")},
        }
        return {**config, **self.config}


def rows(masked: bool = False) -> list[dict[str, list[int]]]:
    """One global batch of samples; with `masked` they have very different numbers of valid labels."""
    # text, not noise: Adam blows rounding up where gradients are noise themselves
    text = b"Sphinx of black quartz, judge my vow; 0123456789 + 9876543210. " * 5
    ids = [list(text[start : start + BLOCK]) for start in range(0, BATCH * BLOCK, BLOCK)]
    if not masked:
        return [{"input_ids": row} for row in ids]
    return [{"input_ids": row, "labels": [-100] * (3 * i) + row[3 * i :]} for i, row in enumerate(ids)]


def arguments_of(job: Job, output_dir: str, **more: Any) -> TrainingArguments:
    """Return the settings that the tests train with, as `by_torch` does, changed by the job's own and by `more`.

    The tiny copy is not verified unless a job asks for it: the tests compare the model itself.
    """
    settings = {"max_steps": STEPS, "learning_rate": 1e-3, "lr_scheduler_type": "constant", "adam_beta2": 0.95}
    settings |= {"save_steps": 0, "verify_plan": "off", "output_dir": output_dir, **job.arguments, **more}
    return TrainingArguments(deepspeed_config=job.deepspeed_config(), **settings)


def without_shared_memory() -> AbstractContextManager[object]:
    """Have runs that are prepared meanwhile send everything by torch.distributed, where it is counted."""
    return patch("harness.extras.host_collectives.share_memory", lambda *_: None)


def second_host() -> AbstractContextManager[object]:
    """Let rank 1 see no checkpoint before it has looked twice, as a host with NFS may."""
    looks: Counter[Path] = Counter()

    def read_late(checkpoint: Path) -> Manifest:
        looks[checkpoint] += 1
        if dist.get_rank() == 1 and looks[checkpoint] <= 2:
            raise UserError("not seen yet")
        return read_manifest(checkpoint)

    return patch.object(integrity, "read_manifest", read_late)


def steps_of(trainer: Trainer, steps: int = STEPS) -> Curve:
    """Train some steps; return the loss and gradient norm of each."""
    records = [trainer.training_step() for _ in range(steps)]
    return [(record.loss, record.grad_norm or 0.0) for record in records]


def logged(run: str | Path, file: str = "metrics") -> list[dict[str, Any]]:
    """Return the rows of a run's metrics.jsonl, one a step, or of its evaluations.jsonl or samples.jsonl."""
    return [json.loads(line) for line in Path(run, f"{file}.jsonl").read_text().splitlines()]


def train(job: Job, output_dir: str) -> Curve:
    """Run a job on these ranks; the loss and gradient norm of each step."""
    arguments = arguments_of(job, f"{output_dir}/{job.layout}")
    trainer = Trainer(job.model, arguments, train_dataset=rows(job.masked))
    curve = steps_of(trainer, arguments.max_steps)
    trainer.close()
    return curve


def train_all(jobs: list[Job], output_dir: str) -> list[Curve]:
    """Several jobs one after the other in the same processes."""
    return [train(job, output_dir) for job in jobs]


def tiny_model(path: Path, family: str, tied: bool, **changes: Any) -> str:
    """Save a tiny random model of a family, two layers with grouped-query attention; returns its directory."""
    quiet = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0) if family == "gpt2" else {}
    sizes = {"num_hidden_layers": 2, **quiet, "tie_word_embeddings": tied, **changes}
    shutil.rmtree(path, ignore_errors=True)
    model_of(family, **sizes).save_pretrained(path)
    return str(path)


def reference(model_dir: str, steps: int = STEPS, masked: bool = False, dtype: torch.dtype = torch.float32) -> Curve:
    """The same training by plain torch on the whole HuggingFace model, the whole batch at once."""
    return trained(model_dir, steps, masked, dtype)[0]


def trained(
    model_dir: str, steps: int = STEPS, masked: bool = False, dtype: torch.dtype = torch.float32
) -> tuple[Curve, PreTrainedModel]:
    """As `reference`, with the model that comes out of it."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).train()
    run_where_aligned(model, dtype)
    data = rows(masked)
    ids = torch.tensor([row["input_ids"] for row in data])
    labels = torch.tensor([row.get("labels", row["input_ids"]) for row in data])

    def loss_of_batch() -> torch.Tensor:
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            logits = model(ids).logits
        flat = logits[:, :-1].reshape(-1, logits.shape[-1]).float()
        return torch.nn.functional.cross_entropy(flat, labels[:, 1:].reshape(-1))

    return by_torch(model, loss_of_batch, steps), model


def by_torch(
    model: torch.nn.Module, loss_of_batch: Callable[[], torch.Tensor], steps: int = STEPS, rate: float = 1e-3
) -> Curve:
    """Train the parameters of `model` that are not frozen by plain torch; the loss and gradient norm of each step."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    curve = []
    for _ in range(steps):
        loss = loss_of_batch()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        curve.append((loss.item(), norm.item()))
    return curve


def worst(curve: Curve, wanted: Curve) -> tuple[float, float]:
    """The largest relative difference of the losses and of the norms."""
    pairs = list(zip(curve, wanted, strict=True))
    losses = max(abs(a[0] - b[0]) / abs(b[0]) for a, b in pairs)
    return losses, max(abs(a[1] - b[1]) / abs(b[1]) for a, b in pairs)
