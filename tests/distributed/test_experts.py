"""Mixture of experts: whole experts spread over tensor-parallel ranks train as in one process, and come out unchanged.

Four ranks are launched once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from harness import Trainer, TrainingArguments, UserError
from harness.parallel.apply import cut
from harness.parallel.comm import TensorParallel
from harness.parallel.experts import expert_parallel_plan
from tests.distributed.ranks import run_ranks
from tests.distributed.training import Curve, Job, forget, reference, rows, tiny_model, train_all, worst

pytestmark = pytest.mark.ranks

LOSS, NORM = 5e-6, 1e-4  # fp32 sums in another order, which also moves what the routers compare
SMALL = {"num_experts_per_tok": 2, "moe_intermediate_size": 48, "router_aux_loss_coef": 0.02}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {**SMALL, "num_local_experts": 4},
    "qwen3_moe": {**SMALL, "num_experts": 4},
    "gpt_oss": {**SMALL, "num_local_experts": 4},  # declares no tensor-parallel plan: all but the experts stays whole
    "deepseek_v3": {
        **SMALL,
        "n_routed_experts": 4,
        "num_key_value_heads": 4,
        "first_k_dense_replace": 1,
        **dict.fromkeys(("n_group", "topk_group"), 1),
        **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim"), 8),
        "head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    },
}
SPREAD = {"expert_parallel": {"enabled": True, "autoep_size": 2}}


def round_trip(job: Job, folder: str) -> None:
    """Load a model in a job's layout and write it out again."""
    arguments = TrainingArguments(deepspeed_config=job.deepspeed_config(), output_dir=folder, max_steps=1)
    trainer = Trainer(job.model, arguments, train_dataset=rows())
    trainer.save_model()
    forget(trainer)


def refusal(job: Job, folder: str) -> str:
    """What the Trainer says to a job that it refuses."""
    arguments = TrainingArguments(deepspeed_config=job.deepspeed_config(), output_dir=folder, max_steps=1)
    try:
        Trainer(job.model, arguments, train_dataset=rows())
    except UserError as error:
        return str(error)
    return "nothing"


def idle_ranks(model_dir: str) -> tuple[int, float]:
    """Single tokens, whose two experts may both lie on the other rank: how often that was so on this rank, and the
    largest difference of a router's gradient from the whole model's."""
    group = dist.new_group([0, 1])
    if dist.get_rank() > 1:
        return 1, 0.0
    whole, part = (AutoModelForCausalLM.from_pretrained(model_dir, experts_implementation="eager") for _ in range(2))
    cut(part, "", expert_parallel_plan(part), TensorParallel.of(group), part.config)
    idle: list[bool] = []
    for module in part.modules():
        if type(module).__name__ == "MixtralExperts":
            module.register_forward_pre_hook(lambda own, args: idle.append(bool((args[1] == own.num_experts).all())))
    for model in (whole, part):
        for token in range(8):
            model(input_ids=torch.tensor([[token]])).logits.square().sum().backward()
    wanted = {name: param.grad for name, param in whole.named_parameters()}
    pairs = [(p.grad, wanted[name]) for name, p in part.named_parameters() if name.endswith("gate.weight")]
    return sum(idle), max(((got - want).abs().max() / want.abs().max()).item() for got, want in pairs)


def everything(jobs: list[Job], refused: list[Job], folder: str) -> tuple[list[Curve], list[str], tuple[int, float]]:
    """What every rank does."""
    curves = train_all(jobs, folder)
    for job in jobs[-2:]:
        round_trip(job, f"{folder}/{job.layout}-out")
    return curves, [refusal(job, folder) for job in refused], idle_ranks(jobs[-1].model)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("experts")
    models = {family: tiny_model(folder / family, family, False, **sizes) for family, sizes in FAMILIES.items()}
    layouts = [("qwen3_moe", "tp2dp2z3"), ("gpt_oss", "pp2tp2z1"), ("deepseek_v3", "tp2dp2z2")]
    layouts += [("mixtral", "pp2tp2z1"), ("mixtral", "tp2dp2z3")]
    jobs = [Job(models[family], layout, SPREAD) for family, layout in layouts]
    odd = tiny_model(folder / "odd", "mixtral", False, **{**FAMILIES["mixtral"], "num_local_experts": 3})
    refused = [Job(odd, "tp2dp2z1", SPREAD), Job("tiny-llama", "tp2dp2z1", SPREAD), Job(odd, "tp4z1", SPREAD)]
    results = run_ranks(4, everything, jobs, refused, str(folder), timeout_s=400)
    return folder, jobs, results


def test_experts_spread_over_ranks_train_as_in_one_process(run: Any) -> None:
    _, jobs, results = run
    wanted = {job.model: reference(job.model) for job in jobs}
    for job, curve in zip(jobs, results[0][0], strict=True):
        loss, norm = worst(curve, wanted[job.model])
        assert loss < LOSS and norm < NORM, (Path(job.model).name, job.layout, loss, norm)


def test_spread_experts_come_out_as_they_went_in(run: Any) -> None:
    folder, jobs, _ = run
    for job in jobs[-2:]:
        went_in, came_out = (
            AutoModelForCausalLM.from_pretrained(path).state_dict()
            for path in (job.model, folder / f"{job.layout}-out")
        )
        assert went_in.keys() == came_out.keys()
        assert all(torch.equal(went_in[key], came_out[key]) for key in went_in), job.layout


def test_what_cannot_be_spread_is_refused_in_one_line(run: Any) -> None:
    *_, results = run
    for _, said, _ in results:
        assert said == [
            "expert_parallel.autoep_size 2 does not divide the 3 experts of model.layers.0.mlp.experts: "
            "use one of 1, 3",
            "model type 'llama' declares no expert-parallel plan: "
            "leave expert_parallel.autoep_size out, so that each expert is cut",
            said[2],
        ]
        assert "experts over 2 ranks, and tensor parallelism over 4" in said[2]


def test_a_rank_that_gets_no_token_still_takes_part(run: Any) -> None:
    *_, results = run
    for _, _, (idle, difference) in results:
        assert idle > 0
        assert difference < 1e-5
