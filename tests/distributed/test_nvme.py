"""With the optimizer's state on NVMe a run has the losses of one in memory, and resumes to the bit.

DeepSpeed builds its reader and writer at the first use, in minutes: set TEST_NVME=1, with libaio and a compiler.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import LlamaConfig

from harness import Trainer, TrainingArguments
from tests.support.ranks import run_ranks
from tests.support.training import BATCH, logged, rows

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(os.environ.get("TEST_NVME") != "1", reason="takes minutes: set TEST_NVME=1, with libaio"),
]

# wide enough that a rank's share is not kept in memory: DeepSpeed leaves less than 1 MiB there
MODEL = LlamaConfig(
    vocab_size=258,
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=4,
    tie_word_embeddings=False,
)


def config(offload: dict[str, Any]) -> dict[str, Any]:
    return {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": BATCH // 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 3, "offload_optimizer": offload},
    }


def train(place: Path, offload: dict[str, Any], resume: str | None = None) -> list[float]:
    arguments = TrainingArguments(
        deepspeed_config=config(offload),
        output_dir=str(place),
        max_steps=4,
        save_steps=2,
        resume_from_checkpoint=resume,
    )
    trainer = Trainer(MODEL, arguments, rows())
    trainer.train()
    trainer.close()
    return [row["loss"] for row in logged(place)]


def train_everywhere(folder: str) -> dict[str, list[float]]:
    """The losses with the state on NVMe, resumed there, in CPU memory, and resumed there from NVMe and back again."""
    place, nvme = Path(folder), {"device": "nvme", "nvme_path": str(Path(folder) / "nvme")}
    return {
        "nvme": train(place / "nvme-run", nvme),
        "cpu": train(place / "cpu-run", {"device": "cpu"}),
        "nvme again": train(place / "again", nvme, str(place / "nvme-run/checkpoint-2")),
        "cpu from nvme": train(place / "to-cpu", {"device": "cpu"}, str(place / "nvme-run/checkpoint-2")),
        "nvme from cpu": train(place / "to-nvme", nvme, str(place / "cpu-run/checkpoint-2")),
    }


def test_the_state_on_nvme_is_saved_and_loaded(tmp_path: Path) -> None:
    losses, *_ = run_ranks(2, train_everywhere, str(tmp_path), timeout_s=1400)
    whole = losses.pop("nvme")
    assert losses.pop("cpu") == whole and len(set(whole)) == 4
    assert all(found == whole[2:] for found in losses.values()), losses
    for name in ("model", "exp_avg", "exp_avg_sq"):
        saved, *others = (
            load_file(tmp_path / run / f"checkpoint-4/{name}.safetensors") for run in ("nvme-run", "again", "to-nvme")
        )
        assert all(values.abs().sum() > 0 for values in saved.values()), name
        assert all(saved[key].equal(other[key]) for other in others for key in saved), name
