"""Sequence parallelism changes no number: not beside plain torch, not beside the same layout without it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig

from harness import Trainer, UserError
from tests.support.ranks import run_ranks
from tests.support.training import BLOCK, STEPS, Curve, Job, arguments_of, rows, tiny_model, worst
from tests.support.training import reference as by_torch

pytestmark = pytest.mark.ranks

LOSS, NORM = 2e-6, 2e-5  # fp32 sums in another order
LORA = dict(r=4, lora_dropout=0.2, target_modules="all-linear", task_type="CAUSAL_LM")
REFUSAL = (
    "tensor_parallel.sequence_parallel: a sequence of 1 token cannot be split over 2 ranks: use longer samples, or "
    "remove it"
)
HEADS = dict(num_key_value_heads=4, head_dim=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16)
LATENT = dict(q_lora_rank=16, kv_lora_rank=16)
EXPERTS = dict(n_routed_experts=4, n_group=1, topk_group=1, num_experts_per_tok=2, moe_intermediate_size=16)
SAVED = 2  # steps before the checkpoint from which a run goes on


@dataclass(frozen=True)
class Case(Job):
    """A job with sequence parallelism.

    `length`: of the samples; `drawn`: random numbers are drawn, so that the same layout without sequence parallelism is
    the reference; `resumed`: it goes on without it from its checkpoint.
    """

    length: int = BLOCK
    interval: int = 0
    schedule: str = "1f1b"
    drawn: bool = False
    resumed: bool = False

    def deepspeed_config(self) -> dict[str, Any]:
        pipeline = {"activation_checkpoint_interval": self.interval, "schedule": self.schedule}
        tensor = {"autotp_size": self.size("tp"), "sequence_parallel": True}
        config = super().deepspeed_config()
        return {**config, "pipeline": {"stages": self.size("pp"), **pipeline}, "tensor_parallel": tensor}


def curves_of(cases: list[Case], folder: str) -> list[tuple[Curve, Curve]]:
    """Of each case the curve with sequence parallelism, and what it is to be, where that takes these ranks."""
    found = []
    for index, case in enumerate(cases):
        whole = curve(case, f"{folder}/{index}", shared=True)
        other = curve(case, f"{folder}/{index}-whole", shared=False) if case.drawn else []
        if case.resumed:
            other = whole[:SAVED] + curve(case, f"{folder}/{index}", shared=False, done=SAVED)
        found.append((whole, other))
    return found


def curve(case: Case, folder: str, *, shared: bool, done: int = 0) -> Curve:
    arguments = dict(case.arguments)
    lora = arguments.pop("lora", None)
    more: dict[str, Any] = {"resume_from_checkpoint": "auto"} if done else {}
    settings = arguments_of(Job(case.model, case.layout, arguments=arguments), folder, **more)
    config = case.deepspeed_config()
    config["tensor_parallel"]["sequence_parallel"] = shared
    settings.deepspeed_config = config
    data = [{"input_ids": row["input_ids"][: case.length]} for row in rows()]
    trainer = Trainer(case.model, settings, train_dataset=data, peft_config=lora and LoraConfig(**lora))
    records = []
    for step in range(done, STEPS):
        if case.resumed and step == SAVED and not done:
            trainer.save_checkpoint()
        record = trainer.training_step()
        records.append((record.loss, record.grad_norm or 0.0))
    trainer.close()
    return records


def curves_and_refusal(cases: list[Case], refused: Case | None, folder: str) -> tuple[list[tuple[Curve, Curve]], str]:
    found = curves_of(cases, folder)
    if refused is None:
        return found, REFUSAL
    with pytest.raises(UserError) as error:
        curve(refused, f"{folder}/refused", shared=True)
    return found, str(error.value)


def check(cases: list[Case], ranks: int, folder: Path, refused: Case | None = None) -> None:
    results = run_ranks(ranks, curves_and_refusal, cases, refused, str(folder), timeout_s=300)
    assert {said for _, said in results} == {REFUSAL}
    found = results[0][0]
    wrong = []
    for case, (got, wanted) in zip(cases, found, strict=True):
        loss, norm = worst(got, wanted or by_torch(case.model))
        if loss > LOSS or norm > NORM:
            wrong.append(f"{Path(case.model).name} {case.layout}: loss {loss:.1e}, norm {norm:.1e}")
    assert not wrong


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
        Case(models["bloom"], "tp2z2"),
        Case(models["gpt2"], "tp2z0", interval=1, drawn=True, length=31),
        Case(models["mixtral"], "tp2z1", drawn=True, arguments={"output_router_logits": True}),
        Case(models["llama"], "tp2z1", drawn=True, arguments={"lora": LORA, "neftune_noise_alpha": 5.0}),
    ]
    check(cases, 2, tmp_path, refused=Case(models["llama"], "tp2z1", length=1))


def test_so_do_two_ranks_of_each_stage_and_four(models: dict[str, str], tmp_path: Path) -> None:
    cases = [
        Case(models["qwen3"], "pp2tp2z1", schedule="zero-bubble"),
        Case(models["gemma2"], "tp2dp2z3", interval=1),
        Case(models["gpt2"], "pp2tp2z1", interval=1, drawn=True, length=31),
        Case(models["llama"], "tp4z1", drawn=True, length=BLOCK - 2),
    ]
    check(cases, 4, tmp_path)
