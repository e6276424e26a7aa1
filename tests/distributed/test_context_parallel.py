"""Ranks that share a sequence change no number: not beside plain torch, not beside data ranks with samples of their
own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.attention.flex_attention as flex
from peft import LoraConfig
from transformers import AutoModelForCausalLM, masking_utils
from transformers.integrations import flex_attention as flex_of_transformers

from harness import Trainer, UserError
from harness.hf.layers import attention
from tests.support.ranks import here, run_ranks
from tests.support.training import BATCH, BLOCK, STEPS, Curve, Job, arguments_of, by_torch, rows, tiny_model, worst

pytestmark = pytest.mark.ranks

LOSS, NORM = 2e-6, 2e-5  # fp32 sums in another order
LORA = dict(r=4, lora_dropout=0.2, target_modules="all-linear", task_type="CAUSAL_LM")
SAVED = 2  # steps before the checkpoint from which a run goes on
WINDOW = 8
TILED = {"tiling": {"loss": 7, "feed_forward": 5, "attention": 6}}
SMALL_BUCKET = {"zero_optimization": {"stage": 3, "reduce_bucket_size": 50}}  # no gradient may be reduced too early
REFUSAL = "context_parallel.size: a sequence of 1 token cannot be split over 2 ranks: use longer samples, or remove it"


@dataclass(frozen=True)
class Case(Job):
    """A job whose `cp` ranks share each sequence; its layout names the data ranks that read different samples.

    `length`: of the samples; `packed`: each holds two documents; `drawn`: random numbers are drawn, so that the same
    ranks without context are the reference; `resumed`: it goes on without context from its checkpoint; `shared`:
    tensor-parallel ranks share each shard; `flex`: with torch's flex attention, uncompiled.
    """

    length: int = BLOCK
    interval: int = 0
    packed: bool = False
    drawn: bool = False
    resumed: bool = False
    evaluated: bool = False
    shared: bool = False
    flex: bool = False

    def deepspeed_config(self) -> dict[str, Any]:
        config = super().deepspeed_config()
        config["pipeline"]["activation_checkpoint_interval"] = self.interval
        config["tensor_parallel"]["sequence_parallel"] = self.shared
        return {**config, "context_parallel": {"size": self.size("cp")}}

    def without_context(self) -> dict[str, Any]:
        """The config of the same ranks, each of which reads samples of its own."""
        config = self.deepspeed_config()
        ranks = self.size("dp") * self.size("cp") * config["train_micro_batch_size_per_gpu"]
        sizes = {"gradient_accumulation_steps": BATCH // ranks, "context_parallel": {"size": 1}}
        return {**config, **sizes}

    def samples(self) -> list[dict[str, list[int]]]:
        ids = [row["input_ids"][: self.length] for row in rows()]
        if not self.packed:
            return [{"input_ids": row} for row in ids]
        cut = 13
        positions = [*range(cut), *range(self.length - cut)]
        return [
            {
                "input_ids": row,
                "labels": [-100 if i == cut else x for i, x in enumerate(row)],
                "position_ids": positions,
            }
            for row in ids
        ]


def reference(case: Case) -> Curve:
    """The same training by plain torch on the whole model."""
    model = AutoModelForCausalLM.from_pretrained(case.model, dtype=torch.float32).train()
    data = {name: torch.tensor([row[name] for row in case.samples()]) for name in case.samples()[0]}
    labels = data.pop("labels", data["input_ids"])

    def loss_of_batch() -> torch.Tensor:
        logits = model(**data, use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    return by_torch(model, loss_of_batch)


def curves_of(cases: list[Case], folder: str) -> list[tuple[Curve, Curve]]:
    """Of each case the curve with context ranks, and what it is to be, where that takes these ranks."""
    found = []
    for index, case in enumerate(cases):
        with flex_on_cpu() if case.flex else nullcontext():
            shared = curve(case, f"{folder}/{index}", case.deepspeed_config())
        other = curve(case, f"{folder}/{index}-whole", case.without_context()) if case.drawn or case.evaluated else []
        if case.resumed:
            other = shared[:SAVED] + curve(case, f"{folder}/{index}", case.without_context(), done=SAVED)
        found.append((shared, other))
    return found


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


def curve(case: Case, folder: str, config: dict[str, Any], *, done: int = 0) -> Curve:
    arguments = dict(case.arguments)
    lora = arguments.pop("lora", None)
    more: dict[str, Any] = {"resume_from_checkpoint": "auto"} if done else {}
    if case.flex:
        arguments["attn_implementation"] = "flex_attention"
    elif case.drawn and here().type != "cpu":
        arguments["attn_implementation"] = "eager"  # fused kernels draw masks by themselves
    settings = arguments_of(Job(case.model, case.layout, arguments=arguments), folder, **more)
    settings.deepspeed_config = config
    trainer = Trainer(case.model, settings, train_dataset=case.samples(), peft_config=lora and LoraConfig(**lora))
    records = []
    for step in range(done, STEPS):
        if case.resumed and step == SAVED and not done:
            trainer.save_checkpoint()
        record = trainer.training_step()
        records.append((record.loss, record.grad_norm or 0.0))
    if case.evaluated:
        metrics = trainer.evaluate(case.samples()[:5])
        predicted = trainer.predict(case.samples()[:5])
        records.append((metrics["eval_loss"], float(abs(predicted.predictions).sum())))
    trainer.close()
    return records


def curves_and_refusal(cases: list[Case], refused: Case | None, folder: str) -> tuple[list[tuple[Curve, Curve]], str]:
    found = curves_of(cases, folder)
    if refused is None:
        return found, REFUSAL
    with pytest.raises(UserError) as error:
        curve(refused, f"{folder}/refused", refused.deepspeed_config())
    return found, str(error.value)


def check(cases: list[Case], ranks: int, folder: Path, refused: Case | None = None) -> None:
    results = run_ranks(ranks, curves_and_refusal, cases, refused, str(folder), timeout_s=300)
    assert {said for _, said in results} == {REFUSAL}
    wrong = []
    for case, (got, wanted) in zip(cases, results[0][0], strict=True):
        loss, norm = worst(got, wanted or reference(case))
        if loss > LOSS or norm > NORM:
            wrong.append(f"{Path(case.model).name} {case.layout}: loss {loss:.1e}, norm {norm:.1e}")
    assert not wrong


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
        Case(models["mistral"], "cp2z1", packed=True, flex=True),
        Case(models["bloom"], "cp2z2"),
        Case(models["gpt2"], "cp2z0", interval=1, drawn=True, length=BLOCK - 1),
        Case(models["mixtral"], "cp2z1", drawn=True, arguments={"output_router_logits": True}),
        Case(
            models["llama"], "cp2z1", drawn=True, evaluated=True, arguments={"lora": LORA, "neftune_noise_alpha": 5.0}
        ),
    ]
    check(cases, 2, tmp_path, refused=Case(models["llama"], "cp2z1", length=1))


@pytest.mark.thorough
def test_so_do_two_ranks_of_each_stage_and_four(models: dict[str, str], tmp_path: Path) -> None:
    cases = [
        Case(models["mistral"], "pp2cp2z1", packed=True),
        Case(models["mistral"], "cp2tp2z1", interval=1, length=BLOCK - 2, config=TILED, shared=True),
        Case(models["gpt_oss"], "cp4z1"),
        Case(models["llama"], "dp2cp2z3", interval=1),
    ]
    check(cases, 4, tmp_path)
