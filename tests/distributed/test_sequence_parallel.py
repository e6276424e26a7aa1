"""Sequence parallelism changes no number: not beside plain torch, not beside the same layout without it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.shared_sequences import LORA, SharedJob, check
from tests.support.training import BLOCK, tiny_model

pytestmark = pytest.mark.ranks

REFUSAL = (
    "tensor_parallel.sequence_parallel: a sequence of 1 token cannot be split over 2 ranks: use longer samples, or "
    "remove it"
)
HEADS = dict(num_key_value_heads=4, head_dim=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16)
LATENT = dict(q_lora_rank=16, kv_lora_rank=16)
EXPERTS = dict(n_routed_experts=4, n_group=1, topk_group=1, num_experts_per_tok=2, moe_intermediate_size=16)


@dataclass(frozen=True)
class Case(SharedJob):
    """A job with sequence parallelism."""

    schedule: str = "1f1b"

    def deepspeed_config(self) -> dict[str, Any]:
        config = self.unshared_config()
        return {**config, "tensor_parallel": {**config["tensor_parallel"], "sequence_parallel": True}}

    def unshared_config(self) -> dict[str, Any]:
        pipeline = {"activation_checkpoint_interval": self.interval, "schedule": self.schedule}
        return {**super().deepspeed_config(), "pipeline": {"stages": self.size("pp"), **pipeline}}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    made = {name: tiny_model(folder / name, name, name == "llama") for name in ("llama", "qwen3", "gemma2", "bloom")}
    sizes = {**HEADS, **LATENT, **EXPERTS, "first_k_dense_replace": 1}
    made["deepseek_v3"] = tiny_model(folder / "deepseek_v3", "deepseek_v3", False, **sizes)
    made["gpt2"] = tiny_model(folder / "gpt2", "gpt2", True, resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)
    made["mixtral"] = tiny_model(folder / "mixtral", "mixtral", False, num_local_experts=4, router_jitter_noise=0.1)
    return made


def test_two_ranks_share_the_sequence(models: dict[str, str], tmp_path: Path) -> None:
    cases = [
        Case(models["llama"], "tp2z1", interval=1, resumed=True, arguments={"verify_plan": "auto"}),
        Case(models["deepseek_v3"], "tp2z3"),  # its attention is not cut, and has empty parameters when it is prepared
    ]
    check(cases, 2, tmp_path, refused=Case(models["llama"], "tp2z1", length=1), refusal=REFUSAL)


@pytest.mark.thorough
def test_two_ranks_share_the_sequence_of_other_models(models: dict[str, str], tmp_path: Path) -> None:
    cases = [
        Case(models["bloom"], "tp2z2"),
        Case(models["gpt2"], "tp2z0", interval=1, drawn=True, length=31),
        Case(models["mixtral"], "tp2z1", drawn=True, arguments={"output_router_logits": True}),
        Case(models["llama"], "tp2z1", drawn=True, arguments={"lora": LORA, "neftune_noise_alpha": 5.0}),
    ]
    check(cases, 2, tmp_path)


@pytest.mark.thorough
def test_so_do_two_ranks_of_each_stage_and_four(models: dict[str, str], tmp_path: Path) -> None:
    cases = [
        Case(models["qwen3"], "pp2tp2z1", schedule="zero-bubble"),
        Case(models["gemma2"], "tp2dp2z3", interval=1),
        Case(models["gpt2"], "pp2tp2z1", interval=1, drawn=True, length=31),
        Case(models["llama"], "tp4z1", drawn=True, length=BLOCK - 2),
    ]
    check(cases, 4, tmp_path)
