"""Families of mixtures of experts in tiny sizes, for jobs with expert parallelism."""

from __future__ import annotations

from typing import Any

SMALL = {"num_experts_per_tok": 2, "moe_intermediate_size": 48, "router_aux_loss_coef": 0.02}
LATENT = dict.fromkeys(("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "head_dim", "qk_rope_head_dim"), 8)
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {**SMALL, "num_local_experts": 4},
    "qwen3_moe": {**SMALL, "num_experts": 4},
    "gpt_oss": {**SMALL, "num_local_experts": 4},  # its tensor-parallel plan is a file
    "deepseek_v3": {
        **SMALL,
        "n_routed_experts": 4,
        "num_key_value_heads": 4,
        "first_k_dense_replace": 1,
        **dict.fromkeys(("n_group", "topk_group"), 1),
        **LATENT,
        "v_head_dim": 16,
    },
}
SPREAD = {"expert_parallel": {"enabled": True, "autoep_size": 2}}
