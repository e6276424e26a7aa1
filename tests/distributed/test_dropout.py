"""Dropout and other noise in training: the same numbers in every layout, with or without recomputation, and resumed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig

from harness import Trainer
from tests.support.ranks import here, run_ranks
from tests.support.training import BATCH, STEPS, Curve, Job, arguments_of, rows, tiny_model, worst

pytestmark = pytest.mark.ranks

LOSS, NORM = 2e-6, 2e-5  # as without dropout: fp32 sums in another order
BROKEN = 2  # steps before a run is broken off and resumed
LORA = dict(r=4, lora_dropout=0.2, target_modules="all-linear", task_type="CAUSAL_LM")


def models(folder: Path) -> dict[str, tuple[str, dict[str, Any]]]:
    """Name -> directory and arguments of models that draw random numbers in different ways."""
    gpt2 = tiny_model(folder / "gpt2", "gpt2", True, resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)
    llama = tiny_model(folder / "llama", "llama", False, attention_dropout=0.2)
    experts = tiny_model(folder / "mixtral", "mixtral", False, num_local_experts=4, router_jitter_noise=0.1)
    return {
        "dropout": (gpt2, {}),
        "eager": (gpt2, {"attn_implementation": "eager"}),
        "attention": (llama, {}),
        "jitter": (experts, {"output_router_logits": True}),
        "lora": (llama, {"lora": LORA, "neftune_noise_alpha": 5.0}),
        "neftune": (gpt2, {"neftune_noise_alpha": 5.0}),
    }


def job(model: tuple[str, dict[str, Any]], layout: str, interval: int) -> Job:
    directory, arguments = model
    job = Job(directory, layout, arguments=arguments)
    schedule = "zero-bubble" if job.size("tp") > 1 else "1f1b"
    pipeline = {"stages": job.size("pp"), "activation_checkpoint_interval": interval, "schedule": schedule}
    config: dict[str, Any] = {"pipeline": pipeline}
    if "output_router_logits" in arguments:  # each micro-batch has a router loss: its size must stay the same
        config |= {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": BATCH // job.size("dp") // 2}
    return replace(job, config=config)


def whole_and_resumed(jobs: list[Job], output_dir: str) -> list[tuple[Curve, Curve]]:
    """Of each job the curve; of the first also what follows once the run is broken off and resumed."""
    found = []
    for index, each in enumerate(jobs):
        whole = curve(each, f"{output_dir}/{index}", 0)
        resumed = whole[BROKEN:] if index else curve(each, f"{output_dir}/{index}", BROKEN)
        found.append((whole, resumed))
    return found


def curve(job: Job, output_dir: str, done: int) -> Curve:
    """Train, saving a checkpoint after `BROKEN` steps; with `done` steps from that checkpoint on."""
    arguments = dict(job.arguments)
    lora = arguments.pop("lora", None)
    if here().type != "cpu":
        arguments["attn_implementation"] = "eager"  # fused kernels draw masks by themselves
    if done:
        arguments["resume_from_checkpoint"] = "auto"
    settings = arguments_of(replace(job, arguments=arguments), output_dir)
    trainer = Trainer(job.model, settings, train_dataset=rows(), peft_config=lora and LoraConfig(**lora))
    records = []
    for step in range(done, STEPS):
        if step == BROKEN and not done:
            trainer.save_checkpoint()
        record = trainer.training_step()
        records.append((record.loss, record.grad_norm or 0.0))
    trainer.close()
    return records


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, dict[str, Any]]]:
    return models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def alone(made: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Curve]:
    """The curve of each model in one process, without recomputation; and that of the first without dropout."""
    folder = tmp_path_factory.mktemp("alone")
    curves = run_ranks(1, whole_and_resumed, [job(model, "pp1z0", 0) for model in made.values()], str(folder))[0]
    return {name: whole for name, (whole, _) in zip(made, curves, strict=True)}


def check(made: Any, alone: Any, cases: list[tuple[str, str, int]], ranks: int, folder: Path) -> None:
    jobs = [job(made[name], layout, interval) for name, layout, interval in cases]
    results = run_ranks(ranks, whole_and_resumed, jobs, str(folder), timeout_s=400)[0]
    wrong = []
    for case, (whole, rest) in zip(cases, results, strict=True):
        for what, off in (("", worst(whole, alone[case[0]])), ("resumed", worst(rest, whole[BROKEN:]))):
            if off[0] > LOSS or off[1] > NORM:
                wrong.append(f"{case} {what}: loss {off[0]:.1e}, norm {off[1]:.1e}")
    assert not wrong


def test_the_layout_changes_no_mask_on_two_ranks(made: Any, alone: Any, tmp_path: Path) -> None:
    assert worst(alone["dropout"], alone["eager"]) < (LOSS, NORM), "the implementation of attention changes masks"
    # the compositions have dropout in more layouts, and resumed in another one
    cases = [("attention", "pp2z0", 2), ("eager", "tp2z1", 0), ("jitter", "dp2z3", 1)]
    check(made, alone, cases, 2, tmp_path)


@pytest.mark.thorough
def test_nor_does_another_layout_or_one_of_four(made: Any, alone: Any, tmp_path: Path) -> None:
    cases = [("attention", "tp2z2", 1), ("jitter", "pp2z1", 1), ("jitter", "tp2z1", 1), ("lora", "dp2z3", 0)]
    cases += [("neftune", "pp2z1", 1), ("lora", "tp2z1", 1)]
    check(made, alone, cases, 2, tmp_path / "two")
    check(made, alone, [("dropout", "pp2tp2z1", 1), ("lora", "tp2dp2z3", 1)], 4, tmp_path / "four")
