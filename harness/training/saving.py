"""What `save_model` leaves in a directory: a HuggingFace model, or adapters as peft stores them.

Adapters name the model that they stand on. One that lies in a directory is named by its path; one that began from the
seed, or in memory, is written beside them, so that peft and `from_pretrained` find it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from harness.checkpoint.export import export_config, export_weights
from harness.checkpoint.lora import export_adapter_config, export_adapters
from harness.hf.lora import plain_name, saved_name, sorted_config

if TYPE_CHECKING:
    from harness.training.trainer import Trainer

BASE = "base_model"


def write_model(trainer: Trainer, directory: Path) -> None:
    """Write what `trainer` has trained into `directory`; all ranks call it."""
    directory.mkdir(parents=True, exist_ok=True)
    if trainer.adaptation is None:
        _write_whole(trainer, directory)
    else:
        _write_adapters(trainer, trainer.adaptation.config, directory)
    if trainer.state.is_world_process_zero and trainer.trainable.causal and trainer.processing_class is not None:
        trainer.processing_class.save_pretrained(directory)
    dist.barrier()


def _write_adapters(trainer: Trainer, config: Any, directory: Path) -> None:
    causal = trainer.trainable.causal
    assert causal is not None  # adapters stand on a HuggingFace model
    name = trainer.trainable.saved_name
    base = causal.source.weights
    if not isinstance(base, Path):
        base = directory / BASE
        base.mkdir(exist_ok=True)
        _write_whole(trainer, base)
    module = trainer.engine.deepspeed.module
    export_adapters(module, trainer.groups, directory, rename=lambda key: saved_name(name(key)))
    if trainer.state.is_world_process_zero:
        export_adapter_config(sorted_config(config), str(base.resolve()), directory)


def _write_whole(trainer: Trainer, directory: Path) -> None:
    """The model without its adapters."""
    causal, name = trainer.trainable.causal, trainer.trainable.saved_name
    module = trainer.engine.deepspeed.module
    export_weights(
        module,
        trainer.groups,
        directory,
        rename=lambda key: plain_name(name(key)),
        form=causal.form if causal else None,
    )
    if trainer.state.is_world_process_zero and causal is not None:
        export_config(causal.source, next(module.parameters()).dtype, directory)
