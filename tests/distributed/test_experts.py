"""Mixture of experts: whole experts spread over tensor-parallel ranks train as in one process, and come out unchanged.

Four ranks are launched once.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from harness import Trainer, TrainingArguments
from harness.batches.stream import BatchStream
from harness.parallel.comm import TensorParallel
from harness.parallel.plans.apply import cut
from harness.parallel.plans.experts import expert_parallel_plan
from harness.parallel.tensor.shard import shard_of
from tests.support.expert_families import FAMILIES, LATENT, SPREAD
from tests.support.ranks import on_device, run_ranks
from tests.support.training import (
    BATCH,
    STEPS,
    Curve,
    Job,
    arguments_of,
    reference,
    rows,
    steps_of,
    tiny_model,
    train_all,
    worst,
)
from tests.support.workers import refusal_of

pytestmark = pytest.mark.ranks

LOSS, NORM = 5e-6, 1e-4  # fp32 sums in another order, which also moves what the routers compare
EVAL_BATCH = 4
LOOPING: dict[str, Any] = {
    **LATENT,
    "v_head_dim": 16,
    "num_layers": 2,
    "n_routed_experts": 32,
    "zero_expert_num": 2,
    "moe_topk": 2,
    "expert_ffn_hidden_size": 16,
    "ffn_hidden_size": 32,
}


def written_and_trained(job: Job, folder: str) -> Curve:
    """Load a model in a job's layout, write it out again, and train it."""
    trainer = Trainer(job.model, arguments_of(job, folder), train_dataset=rows())
    trainer.save_model()
    curve = steps_of(trainer)
    trainer.close()
    return curve


def with_router_loss(job: Job, folder: str) -> tuple[Curve, list[float], float]:
    """Train with the model's router loss: losses and norms, router losses, and the loss of an evaluation before."""
    arguments = arguments_of(job, folder, per_device_eval_batch_size=EVAL_BATCH)
    trainer = Trainer(job.model, arguments, train_dataset=rows(), eval_dataset=rows()[:6])
    evaluation = trainer.evaluate()["eval_loss"]
    records = [trainer.training_step() for _ in range(STEPS)]
    trainer.close()
    curve = [(record.loss, record.grad_norm or 0.0) for record in records]
    return curve, [record.aux_loss or 0.0 for record in records], evaluation


def router_reference(job: Job) -> tuple[Curve, list[float], float]:
    """The same by plain torch, micro-batch by micro-batch, with the loss that the model itself returns."""
    model = AutoModelForCausalLM.from_pretrained(job.model, output_router_logits=True).train()
    if "router_aux_loss_coef" in job.arguments:
        model.router_aux_loss_coef = job.arguments["router_aux_loss_coef"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    micro = job.deepspeed_config()["train_micro_batch_size_per_gpu"]
    stream = BatchStream(rows(), seed=TrainingArguments().seed, micro_batch=micro, accumulation=BATCH // micro)
    chunks = torch.tensor([row["input_ids"] for row in rows()[:6]]).split(EVAL_BATCH)  # of 4 and 2, in any layout
    with torch.no_grad():
        evaluation = sum(len(ids) * model.eval()(input_ids=ids, labels=ids).loss.item() for ids in chunks) / 6
    model.train()
    curve, router_losses = [], []
    for _ in range(STEPS):
        micro_batches = stream.next_step()
        outputs = [model(input_ids=ids, labels=labels) for ids, labels in micro_batches]
        loss = sum(output.loss for output in outputs) / len(outputs)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        curve.append((loss.item(), norm.item()))
        router_losses.append(sum(output.aux_loss.item() for output in outputs) / len(outputs))
    return curve, router_losses, evaluation


def refusal(job: Job, folder: str) -> str:
    """What the Trainer says to a job that it refuses."""
    config = job.deepspeed_config()
    arguments = TrainingArguments(deepspeed_config=config, output_dir=folder, max_steps=1, **job.arguments)
    return refusal_of(lambda: Trainer(job.model, arguments, train_dataset=rows()))


@on_device
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
            shard = shard_of(module.down_proj)
            assert shard is not None
            ((start, stop),) = shard.pieces
            here = [*range(start, stop)]
            module.register_forward_pre_hook(
                lambda _, args, here=here: idle.append(not torch.isin(args[1], torch.tensor(here)).any())
            )
    for model in (whole, part):
        for token in range(32):
            model(input_ids=torch.tensor([[token]])).logits.square().sum().backward()
    wanted = {name: param.grad for name, param in whole.named_parameters()}
    pairs = [(p.grad, wanted[name]) for name, p in part.named_parameters() if name.endswith("gate.weight")]
    return sum(idle), max(((got - want).abs().max() / want.abs().max()).item() for got, want in pairs)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a rank brings back."""

    curves: list[Curve]
    routed: list[tuple[Curve, list[float], float]]
    refusals: list[str]
    idle: tuple[int, float]


def everything(jobs: list[Job], routed: list[Job], refused: list[Job], folder: str) -> Outcome:
    """What every rank does."""
    curves = train_all(jobs[:-2], folder)
    curves += [written_and_trained(job, f"{folder}/{job.layout}-out") for job in jobs[-2:]]
    return Outcome(
        curves=curves,
        routed=[with_router_loss(job, f"{folder}/{job.layout}-routed") for job in routed],
        refusals=[refusal(job, folder) for job in refused],
        idle=idle_ranks(jobs[-1].model),
    )


@pytest.fixture(scope="module", params=["first", pytest.param("others", marks=pytest.mark.thorough)])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("experts")
    models = {family: tiny_model(folder / family, family, False, **sizes) for family, sizes in FAMILIES.items()}
    is_first = request.param == "first"
    others = [("gpt_oss", "pp2tp2z1"), ("qwen3_moe", "tp2dp2z3"), ("deepseek_v3", "tp2dp2z2"), ("mixtral", "pp2tp2z1")]
    layouts = [*([] if is_first else others), ("mixtral", "tp2dp2z3")]
    jobs = [Job(models[family], layout, SPREAD) for family, layout in layouts]
    if is_first:
        looping = tiny_model(folder / "looping", "longcat_flash", False, **LOOPING)
        jobs = [Job(looping, "dp4z3"), *jobs]  # its ranks' tokens choose other numbers of experts
    odd = tiny_model(folder / "odd", "mixtral", False, **{**FAMILIES["mixtral"], "num_local_experts": 3})
    on = {"output_router_logits": True}
    refused = [
        Job(odd, "tp4z1", {**SPREAD, "expert_parallel": {"enabled": True, "autoep_size": 4}}),
        Job("tiny-llama", "tp2dp2z1", SPREAD),
        Job("tiny-llama", "pp2dp2z1", {}, on),
        Job(odd, "pp2dp2z1", {}, {"router_aux_loss_coef": 0.1}),
        Job(odd, "tp4z1", SPREAD),
    ]
    routed = [Job(models["mixtral"], "pp2tp2z1", SPREAD, on)]
    if not is_first:
        weighted = {**on, "router_aux_loss_coef": 0.5}
        routed.append(Job(models["qwen3_moe"], "tp2dp2z3", {}, on))
        routed.append(Job(models["mixtral"], "pp2dp2z1", {"pipeline": {"stages": 2}}, weighted))
    results = run_ranks(4, everything, jobs, routed, refused, str(folder), timeout_s=400)
    return folder, jobs, routed, results


def test_experts_spread_over_ranks_train_as_in_one_process(run: Any) -> None:
    _, jobs, _, results = run
    wanted = {job.model: reference(job.model) for job in jobs}
    for job, curve in zip(jobs, results[0].curves, strict=True):
        loss, norm = worst(curve, wanted[job.model])
        assert loss < LOSS and norm < NORM, (Path(job.model).name, job.layout, loss, norm)


def test_spread_experts_come_out_as_they_went_in(run: Any) -> None:
    folder, jobs, *_ = run
    for job in jobs[-2:]:
        went_in, came_out = (
            AutoModelForCausalLM.from_pretrained(path).state_dict()
            for path in (job.model, folder / f"{job.layout}-out")
        )
        assert went_in.keys() == came_out.keys()
        assert all(torch.equal(went_in[key], came_out[key]) for key in went_in), job.layout


def test_what_cannot_be_done_is_refused_in_one_line(run: Any) -> None:
    *_, results = run
    for outcome in results:
        odd, dense, *said, elsewhere = outcome.refusals
        assert "DS904 4 expert-parallel ranks, but the model has only 3 experts" in odd
        assert "DS906 model type 'llama' declares no expert-parallel plan" in dense
        assert said == [
            "--output_router_logits: model type 'llama' has no router loss",
            "--router_aux_loss_coef has no effect without --output_router_logits",
        ]
        assert "expert-parallel size 2 does not fit tensor-parallel size 4 x data-parallel size 1" in elsewhere


def test_a_rank_that_gets_no_token_still_takes_part(run: Any) -> None:
    *_, results = run
    for idle, difference in [outcome.idle for outcome in results]:
        assert idle > 0
        assert difference < 1e-5


def test_the_router_loss_is_the_models_own_in_every_layout(run: Any) -> None:
    _, _, routed, results = run
    for index, job in enumerate(routed):
        curve, router_losses, evaluation = router_reference(job)
        for got, got_router_losses, got_evaluation in [outcome.routed[index] for outcome in results]:
            loss, norm = worst(got, curve)
            assert loss < LOSS and norm < NORM, (job.layout, loss, norm)
            assert got_router_losses == pytest.approx(router_losses, rel=1e-4), job.layout
            assert got_evaluation == pytest.approx(evaluation, rel=LOSS), job.layout
    plain = results[0].curves[-1][0][0]
    first, router_loss = results[0].routed[0][0][0][0], results[0].routed[0][1][0]
    assert first == pytest.approx(plain + 0.02 * router_loss, rel=1e-5)
