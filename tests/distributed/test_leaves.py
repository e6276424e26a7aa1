"""ZeRO-3 with modules called as tokens choose: right on ranks with different tokens, whatever fits a bucket."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from harness import Trainer, TrainingArguments
from harness.parallel.pipeline.staged_module import build_layers
from tests.support.experts import WIDTH, ByRow, Listed, ReadByParent, Residual, Stacked
from tests.support.ranks import run_ranks
from tests.support.training import Curve, Job, by_torch, reference, steps_of, train, worst

pytestmark = pytest.mark.ranks

STEPS, BATCH, SEED = 2, 4, 42
BUCKETS = (50, 100_000)  # elements: smaller than any matrix, larger than all together


def config(bucket: int) -> dict[str, Any]:
    zero = {"stage": 3, "reduce_bucket_size": bucket, "stage3_param_persistence_threshold": 0}
    return {"zero_optimization": zero}


def rows() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Rows of numbers, larger from one to the next, so that they choose other experts."""
    drawn = [torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(i)) * (i + 1) + i for i in range(BATCH)]
    return [(x, x.sum(-1, keepdim=True).sin()) for x in drawn]


def layers() -> list[Any]:
    torch.manual_seed(0)  # the experts draw their weights here
    kinds = (Listed, ByRow, Stacked, ReadByParent)
    middle = [LayerSpec(Residual, nn.Sequential(nn.LayerNorm(WIDTH), kind())) for kind in kinds]
    return [LayerSpec(nn.Linear, WIDTH, WIDTH), *middle, LayerSpec(nn.Linear, WIDTH, 1)]


def train_own(bucket: int, folder: str) -> Curve:
    settings = {"max_steps": STEPS, "learning_rate": 1e-3, "save_steps": 0, "lr_scheduler_type": "constant"}
    settings["adam_beta2"] = 0.95  # as `by_torch` has
    batch = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": BATCH // 2}
    arguments = TrainingArguments(
        deepspeed_config={**config(bucket), **batch}, output_dir=folder, **settings, seed=SEED
    )
    trainer = Trainer(layers(), arguments, train_dataset=rows(), loss_fn=nn.functional.mse_loss)
    curve = steps_of(trainer, STEPS)
    trainer.close()
    return curve


def train_all(dbrx: str, folder: str) -> list[Curve]:
    curves = [train_own(bucket, folder) for bucket in BUCKETS]
    return curves + [train(Job(dbrx, "dp2z3", config(bucket)), folder) for bucket in BUCKETS]


@pytest.mark.thorough
def test_experts_of_every_form_train_as_in_one_process(tmp_path: Path) -> None:
    torch.manual_seed(0)
    experts = {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64}
    attention = {"kv_n_heads": 2, "rope_theta": 10_000.0, "clip_qkv": 8.0}
    sizes = {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 128, "vocab_size": 320}
    dbrx = CONFIG_MAPPING["dbrx"](**sizes, ffn_config=experts, attn_config=attention)
    AutoModelForCausalLM.from_config(dbrx).save_pretrained(tmp_path / "dbrx")
    model = nn.Sequential(*build_layers(layers(), 0, 6, SEED).calls)
    inputs, labels = (torch.stack(tensors) for tensors in zip(*rows(), strict=True))
    own = by_torch(model, lambda: nn.functional.mse_loss(model(inputs), labels), STEPS)
    decoder = reference(str(tmp_path / "dbrx"))
    curves = run_ranks(2, train_all, str(tmp_path / "dbrx"), str(tmp_path / "out"), timeout_s=200)[0]
    for curve, wanted in zip(curves, (own, own, decoder, decoder), strict=True):
        loss, norm = worst(curve, wanted)
        assert loss < 5e-6 and norm < 5e-5, (curve, wanted)
