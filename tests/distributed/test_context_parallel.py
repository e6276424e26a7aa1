"""Ranks that share a sequence change no number: not beside plain torch, not beside data ranks with samples of their
own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.attention.flex_attention as flex
from transformers import masking_utils
from transformers.integrations import flex_attention as flex_of_transformers

from harness.hf.layers import attention
from tests.support.ranks import here
from tests.support.shared_sequences import LORA, SharedJob, check
from tests.support.training import BATCH, BLOCK, tiny_model

pytestmark = pytest.mark.ranks

WINDOW = 8
TILED = {"tiling": {"loss": 7, "feed_forward": 5, "attention": 6}}
SMALL_BUCKET = {"zero_optimization": {"stage": 3, "reduce_bucket_size": 50}}  # no gradient may be reduced too early
REFUSAL = "context_parallel.size: a sequence of 1 token cannot be split over 2 ranks: use longer samples, or remove it"


@dataclass(frozen=True)
class Case(SharedJob):
    """A job whose `cp` ranks share each sequence; its layout names the data ranks that read different samples.

    `shared`: tensor-parallel ranks share each shard; `flex`: with torch's flex attention, uncompiled.
    """

    shared: bool = False
    flex: bool = False

    def deepspeed_config(self) -> dict[str, Any]:
        config = super().deepspeed_config()
        config["pipeline"]["activation_checkpoint_interval"] = self.interval
        config["tensor_parallel"]["sequence_parallel"] = self.shared
        return {**config, "context_parallel": {"size": self.size("cp")}}

    def unshared_config(self) -> dict[str, Any]:
        """The config of the same ranks, each of which reads samples of its own."""
        config = self.deepspeed_config()
        ranks = self.size("dp") * self.size("cp") * config["train_micro_batch_size_per_gpu"]
        sizes = {"gradient_accumulation_steps": BATCH // ranks, "context_parallel": {"size": 1}}
        return {**config, **sizes}

    def training(self) -> AbstractContextManager[object]:
        return flex_on_cpu() if self.flex else nullcontext()


@contextmanager
def flex_on_cpu() -> Iterator[None]:
    """Train with flex attention by its plain formula: torch compiles none with a backward for a CPU."""

    def plain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **given: Any) -> torch.Tensor:
        return flex.flex_attention(query, key, value, **{k: v for k, v in given.items() if k != "training"})

    def mask(**given: Any) -> flex.BlockMask:
        return flex.create_block_mask(**{**given, "_compile": False})

    with ExitStack() as patches:
        patches.enter_context(patch.object(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True))
        patches.enter_context(patch.object(flex, "_validate_device", lambda *_: None))
        patches.enter_context(patch.object(flex_of_transformers, "compile_friendly_flex_attention", plain))
        patches.enter_context(patch.object(masking_utils, "create_block_mask", mask))
        patches.enter_context(patch.object(attention, "FLEX_DEVICES", (here().type,)))
        yield


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    made = {name: tiny_model(folder / name, name, name == "llama") for name in ("llama", "bloom", "gpt_oss")}
    made["mistral"] = tiny_model(folder / "mistral", "mistral", False, sliding_window=WINDOW)
    made["gpt2"] = tiny_model(folder / "gpt2", "gpt2", True, resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)
    made["mixtral"] = tiny_model(folder / "mixtral", "mixtral", False, num_local_experts=4, router_jitter_noise=0.1)
    return made


def test_two_ranks_share_each_sequence(models: dict[str, str], tmp_path: Path) -> None:
    cases = [
        Case(models["llama"], "cp2z1", interval=1, resumed=True, arguments={"verify_plan": "on"}),
        Case(models["mistral"], "cp2z3", packed=True, interval=1, config={**TILED, **SMALL_BUCKET}),
    ]
    check(cases, 2, tmp_path, refused=Case(models["llama"], "cp2z1", length=1), refusal=REFUSAL)


@pytest.mark.thorough
def test_two_ranks_share_sequences_of_other_models(models: dict[str, str], tmp_path: Path) -> None:
    noise = {"lora": LORA, "neftune_noise_alpha": 5.0}
    cases = [
        Case(models["mistral"], "cp2z1", packed=True, flex=True, arguments={"attn_implementation": "flex_attention"}),
        Case(models["bloom"], "cp2z2"),
        Case(models["gpt2"], "cp2z0", interval=1, drawn=True, length=BLOCK - 1),
        Case(models["mixtral"], "cp2z1", drawn=True, arguments={"output_router_logits": True}),
        Case(models["llama"], "cp2z1", drawn=True, evaluated=True, arguments=noise),
    ]
    check(cases, 2, tmp_path)


@pytest.mark.thorough
def test_so_do_two_ranks_of_each_stage_and_four(models: dict[str, str], tmp_path: Path) -> None:
    cases = [
        Case(models["mistral"], "pp2cp2z1", packed=True),
        Case(models["mistral"], "cp2tp2z1", interval=1, length=BLOCK - 2, config=TILED, shared=True),
        Case(models["gpt_oss"], "cp4z1"),
        Case(models["llama"], "dp2cp2z3", interval=1),
    ]
    check(cases, 4, tmp_path)
