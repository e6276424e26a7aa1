"""What a run can do besides its layout, on a device as strict as a GPU: the numbers of one process on a CPU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.simulated_device.features import Run, make, make_all
from tests.support.ranks import run_ranks
from tests.support.rollback import in_layouts
from tests.support.training import Job, tiny_model

pytestmark = pytest.mark.ranks

UNEVEN = {"pipeline": {"stages": 2, "partition": "type:Epilogue", "activation_checkpoint_interval": 1}}
EAGER = {"attn_implementation": "eager"}  # fused kernels of a GPU draw masks by themselves
SPREAD = {"expert_parallel": {"enabled": True, "autoep_size": 2}}
TILES = {"tiling": {"loss": 7, "feed_forward": 5, "attention": 6}, "context_parallel": {"size": 2}}
HALF = {"bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4}
FLASH, FLEX = {"attn_implementation": "flash_attention_2"}, {"attn_implementation": "flex_attention"}
MUON = {"optimizer": {"type": "Muon", "params": {"lr": 0.01, "adam_lr": 1e-3, "momentum": 0.9}}}
PACKING = {"packing": True, "block_size": 32}
FOUR = {"max_steps": 4}
BESIDE = {**FOUR, "save_steps": 2}  # training goes on while a checkpoint is written

LIKE = {  # runs with the numbers of another one
    "resumed": "saved",
    "profiled": "plain",
    "rebalanced": "plain",
    "adapters, ZeRO-3": "adapters, tensor",
    "dropout, tensor": "dropout, stages",
    "dropout, fused": "dropout, stages",
    "dropout, fused, data": "dropout, stages",
    "experts spread, data": "experts, tensor",
    "experts, ZeRO-3": "experts, tensor",
    "packed, tiles": "packed",
    "packed, flash": "packed",
    "packed, flex": "packed",
    "flash": "plain",
}
KERNELS = {"flash": "flash", "packed, flash": "flash, documents", "packed, flex": "flex"}
"""Kernels of attention that a run must have called."""

FIRST = ("experts spread, data", "saved", "resumed")
"""Runs whose tensors come from elsewhere or go there: exchanged, saved, and read."""

OTHER_LAYOUTS = (
    *("dropout, stages", "dropout, tensor", "dropout, fused, data"),
    *("adapters, tensor", "experts, tensor", "experts, ZeRO-3", "packed"),
)
"""Runs that differ from others only by a layout, which the tests on a CPU have with them as well."""


def runs_of(folder: Path) -> dict[str, Run]:
    llama = tiny_model(folder / "llama", "llama", False)
    gpt2 = tiny_model(folder / "gpt2", "gpt2", True, resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)
    experts = tiny_model(folder / "mixtral", "mixtral", False, num_local_experts=4)
    fresh = tiny_model(folder / "fresh", "llama", False)
    Path(fresh, "model.safetensors").unlink()  # its weights are drawn, on the device
    prompts = folder / "prompts.txt"
    prompts.write_text("Sphinx of black\n")
    samples = {**FOUR, "eval_steps": 2, "sample_prompts": str(prompts), "sample_tokens": 4}
    return {
        "dropout, stages": Run(Job(gpt2, "pp2z1"), EAGER),
        "dropout, tensor": Run(Job(gpt2, "tp2z1"), EAGER),
        "dropout, fused": Run(Job(gpt2, "pp2z1"), within=2e-3),  # as far off as other masks are
        "dropout, fused, data": Run(Job(gpt2, "dp2z1"), within=2e-3),
        "adapters, tensor": Run(Job(llama, "tp2z1"), lora=True, exports=True),
        "adapters, ZeRO-3": Run(Job(llama, "dp2z3"), lora=True, exports=True),
        "experts, tensor": Run(Job(experts, "tp2z1"), exports=True),
        "experts spread, data": Run(Job(experts, "dp2z1", SPREAD), {"verify_plan": "on"}, exports=True),
        "experts, ZeRO-3": Run(Job(experts, "dp2z3")),
        "packed": Run(Job(llama, "pp2z1"), PACKING, packed=True),
        "packed, tiles": Run(Job(llama, "cp2z1", TILES), {**PACKING, "verify_plan": "on"}, packed=True),
        "packed, flash": Run(Job(llama, "dp2z1", HALF), {**PACKING, **FLASH}, packed=True, within=0.01),
        "packed, flex": Run(Job(llama, "cp2z1", {"context_parallel": {"size": 2}}), {**PACKING, **FLEX}, packed=True),
        "flash": Run(Job(llama, "tp2z1", {"bf16": HALF["bf16"]}), FLASH, within=0.01),
        "Muon": Run(Job(llama, "tp2z1", MUON), {"learning_rate": 0.01}, within=6e-5),
        "samples": Run(Job(llama, "pp2z1"), samples, evaluates=True, exports=True),
        "saved": Run(Job(llama, "dp2z1"), {**BESIDE, "eval_steps": 3, "lr_scheduler_type": "cosine"}, evaluates=True),
        "resumed": Run(Job(llama, "tp2z2"), {**FOUR, "lr_scheduler_type": "cosine"}, resumes="on a CPU", exports=True),
        "drawn weights": Run(Job(fresh, "dp2z2")),
        "profiled": Run(Job(llama, "dp2z3"), {"profile": 2}, in_memory=True),
        "rebalanced": Run(Job(llama, "pp2z1", UNEVEN), {"rebalance_steps": 2}),
        "signalled": Run(Job(llama, "pp2z1"), signal_at=2),
    }


def alone(run: Run) -> Run:
    """The same in one process, which has neither stages nor other ranks."""
    layout = f"z{run.job.layout[-1]}"
    settings = {name: value for name, value in run.settings.items() if name not in ("profile", "rebalance_steps")}
    sizes = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
    sizes |= {name: section for name, section in run.job.config.items() if name == "optimizer"}
    return replace(run, job=Job(run.job.model, layout, sizes), settings=settings, resumes=None, signal_at=None)


def off(found: list[float], wanted: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True))


def require_alike(found: Path, wanted: Path) -> None:
    found_tensors, wanted_tensors = load_file(found), load_file(wanted)
    assert found_tensors.keys() == wanted_tensors.keys()
    for name, values in wanted_tensors.items():
        torch.testing.assert_close(found_tensors[name], values, rtol=1e-4, atol=1e-5)


def compared(runs: dict[str, Run], chosen: Iterable[str], folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Results by the name of a run: those of one process, and those of two ranks, whose losses and models are alike."""
    cpu, device = str(folder / "cpu"), folder / "device"
    in_one_process = {**runs, "plain": Run(runs["profiled"].job)}
    names = sorted({LIKE.get(name, name) for name in chosen} - {"signalled"})
    wanted = {name: make(name, alone(in_one_process[name]), cpu) for name in names}
    device.mkdir()
    if "saved" in wanted:
        Path(cpu, "saved").rename(device / "on a CPU")
    ((found, reports), _) = run_ranks(2, make_all, {name: runs[name] for name in chosen}, str(device), timeout_s=400)
    assert reports == []
    for name, got in found.items():
        assert got["brought"] and got["keeps generators"], name
        if name != "signalled":
            losses = wanted[LIKE.get(name, name)]["losses"]
            assert off(got["losses"], losses[-len(got["losses"]) :]) < runs[name].within, (name, got["losses"], losses)
        if runs[name].evaluates:
            assert off(got["eval"], wanted[name]["eval"]) < 2e-6, name
        assert KERNELS.get(name) in (None, *got["attention"]), name
        file = "adapter_model.safetensors" if runs[name].lora else "model.safetensors"
        if runs[name].exports and name != "resumed":
            require_alike(device / name / file, Path(cpu, LIKE.get(name, name), file))
    return wanted, found


def test_what_a_run_can_do(tmp_path: Path) -> None:
    runs = runs_of(tmp_path)
    wanted, found = compared(runs, FIRST, tmp_path)
    device = tmp_path / "device"
    for step in (2, 4):  # one is written while training goes on, the other at its end
        require_alike(*(device / run / f"checkpoint-{step}/model.safetensors" for run in ("saved", "on a CPU")))
    require_alike(device / "resumed/model.safetensors", device / "on a CPU/checkpoint-4/model.safetensors")
    assert found["saved"]["checkpoints"] == ["checkpoint-2", "checkpoint-4"]
    back = replace(alone(runs["saved"]), resumes="saved")
    resumed = make("back on a CPU", back, str(device))
    assert off(resumed["losses"], wanted["saved"]["losses"][2:]) < 2e-6


@pytest.mark.thorough
def test_what_else_a_run_can_do(tmp_path: Path) -> None:
    runs = runs_of(tmp_path)
    wanted, found = compared(runs, [name for name in runs if name not in (*FIRST, *OTHER_LAYOUTS)], tmp_path)
    assert found["samples"]["samples"] == wanted["samples"]["samples"] != ""
    assert found["profiled"]["profile"]
    assert found["signalled"]["checkpoints"] == ["checkpoint-2"] and found["signalled"]["ended"]


@pytest.mark.thorough
def test_what_a_run_can_do_in_other_layouts(tmp_path: Path) -> None:
    _, found = compared(runs_of(tmp_path), ["dropout, fused", *OTHER_LAYOUTS], tmp_path)
    fused, on_data_ranks = (found[name]["losses"] for name in ("dropout, fused", "dropout, fused, data"))
    assert off(on_data_ranks, fused) < 2e-6  # drawn once more alike


@pytest.mark.thorough
def test_compressed_gradients(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "llama", "llama", False)
    bits = Run(Job(model, "dp2z0", {"gradient_compression": {"bits": 8}}), BESIDE)
    runs = {"plain": Run(Job(model, "dp2z0"), FOUR), "compressed": bits, "goes on": replace(bits, resumes="compressed")}
    found, reports = run_ranks(2, make_all, runs, str(tmp_path), timeout_s=200)[0]
    assert reports == []
    assert 0 < off(found["compressed"]["losses"], found["plain"]["losses"]) < 1e-2
    assert found["goes on"]["losses"] == found["compressed"]["losses"][2:]  # its rounding errors were saved


@pytest.mark.thorough
@pytest.mark.parametrize("layout", ["dp2z3", "pp2z1"])
def test_fp16_learns_once_its_scale_fits(layout: str, tmp_path: Path) -> None:
    scaled = {"fp16": {"enabled": True, "initial_scale_power": 19, "hysteresis": 1, "loss_scale_window": 100}}
    run = Run(Job(tiny_model(tmp_path / "llama", "llama", False), layout, scaled), {"max_steps": 8})
    found, reports = run_ranks(2, make_all, {"fp16": run}, str(tmp_path), timeout_s=200)[0]
    assert reports == []
    assert found["fp16"]["skipped"] > 0
    assert found["fp16"]["losses"][-1] < found["fp16"]["losses"][0] - 0.3


@pytest.mark.thorough
def test_a_step_that_is_not_finite_is_rolled_back(tmp_path: Path) -> None:
    (found, _) = run_ranks(2, in_layouts, [(2, 0), (1, 2)], str(tmp_path), timeout_s=200)
    for message, back, never in found:
        assert message == "" and back == never
