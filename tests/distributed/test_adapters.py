"""LoRA in every layout, against plain torch with peft's own model in one process; adapters out, and in by peft."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from harness import Trainer, TrainingArguments
from harness.models.adapters import Adaptation, lora_config
from harness.models.causal import assemble
from harness.models.skeleton import read_source
from harness.parallel.comm import TensorParallel
from harness.parallel.shard import shard_of
from harness.parallel.staged import build_layers
from tests.distributed.ranks import run_ranks
from tests.distributed.training import STEPS, Curve, Job, forget, rows, tiny_model, worst

pytestmark = pytest.mark.ranks

LOSS, NORM = 2e-6, 3e-5
LOGITS = 1e-4  # after five steps at a high rate; the export itself is exact
RATE, SEED = 1e-2, 42
ALL = {"r": 4, "lora_alpha": 16, "target_modules": "all-linear"}


@dataclass(frozen=True)
class LoraJob(Job):
    """A job that trains adapters; `resumed`: it is stopped after two steps and goes on from its checkpoint."""

    peft: dict[str, Any] = field(default_factory=lambda: ALL)
    resumed: bool = False


@dataclass(frozen=True)
class Outcome:
    """What a run came to: its curve, the directory of its adapters, elements that it trains on this rank, elements of
    optimizer state for them, whether tensor-parallel ranks still agree on what all of them hold."""

    curve: Curve
    directory: str
    trained: int
    state: int
    agree: bool


def train_adapters(jobs: list[LoraJob], output_dir: str) -> list[Outcome]:
    """Several jobs one after the other in the same processes."""
    return [_train(job, f"{output_dir}/{index}-{job.layout}") for index, job in enumerate(jobs)]


def _train(job: LoraJob, output_dir: str) -> Outcome:
    trainer = _trainer(job, output_dir)
    curve = []
    for step in range(STEPS):
        if job.resumed and step == 2:
            trainer.save_checkpoint()
            forget(trainer)
            trainer = _trainer(job, output_dir, resume_from_checkpoint="auto")
        record = trainer.training_step()
        curve.append((record.loss, record.grad_norm or 0.0))
    trainer.save_model()
    module = trainer.engine.deepspeed.module
    trained = sum(getattr(p, "ds_numel", p.numel()) for p in module.parameters() if p.requires_grad)
    state = _state_elements(trainer.engine.deepspeed.basic_optimizer)
    outcome = Outcome(curve, output_dir, trained, state, _ranks_agree(module, trainer.groups.tensor))
    forget(trainer)
    return outcome


def _trainer(job: LoraJob, output_dir: str, **more: Any) -> Trainer:
    arguments = {"max_steps": STEPS, "learning_rate": RATE, "lr_scheduler_type": "constant", "adam_beta2": 0.95}
    arguments |= {"save_steps": 0, "seed": SEED, "output_dir": output_dir, **job.arguments, **more}
    config = TrainingArguments(deepspeed_config=job.deepspeed_config(), **arguments)
    return Trainer(job.model, config, train_dataset=rows(), peft_config=LoraConfig(**job.peft))


def _state_elements(optimizer: Any) -> int:
    """Elements of AdamW's moments on this rank."""
    return sum(
        v.numel() for entry in optimizer.state.values() for v in entry.values() if torch.is_tensor(v) and v.dim()
    )


def _ranks_agree(module: torch.nn.Module, group: Any) -> bool:
    """Whether trained parameters that every tensor-parallel rank holds whole are the same on all of them."""
    if group is None:
        return True
    whole = [p for p in module.parameters() if p.requires_grad and shard_of(p) is None and not hasattr(p, "ds_id")]
    sums = torch.stack([p.detach().double().sum() for p in whole])
    both = [torch.empty_like(sums) for _ in range(dist.get_world_size(group))]
    dist.all_gather(both, sums, group=group)
    return all(torch.equal(both[0], other) for other in both)


def reference(job: LoraJob) -> tuple[Curve, Any]:
    """The same training by plain torch on peft's model, from the harness's initial adapters; curve and model."""
    model: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(job.model).float(), LoraConfig(**job.peft)).train()
    initial = initial_adapters(job)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.copy_(initial[name.removeprefix("base_model.model.")])
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    ids = torch.tensor([row["input_ids"] for row in rows()])
    curve = []
    for _ in range(STEPS):
        logits = model(ids).logits
        flat = logits[:, :-1].reshape(-1, logits.shape[-1])
        loss = torch.nn.functional.cross_entropy(flat, ids[:, 1:].reshape(-1))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        curve.append((loss.item(), norm.item()))
    return curve, model.eval()


def initial_adapters(job: LoraJob) -> dict[str, torch.Tensor]:
    """The adapters with which a run starts, by their names in the model."""
    causal = assemble(
        read_source(job.model),
        tensor=TensorParallel.of(None),
        device=torch.device("cpu"),
        dtype=torch.float32,
        seed=SEED,
        finish=lambda layer: None,
        adaptation=Adaptation(config=lora_config(LoraConfig(**job.peft))),
    )
    built = build_layers(causal.layers, 0, len(causal.layers), seed=0)
    return {name: p.detach() for module in built.modules.values() for name, p in module.named_parameters()}


def check(jobs: list[LoraJob], ranks: int, folder: Path) -> None:
    """Every job: the curve of the reference, adapters that give peft the reference's logits, state for them alone."""
    outcomes = run_ranks(ranks, train_adapters, jobs, str(folder), timeout_s=400)
    wrong = []
    for job, *ours in zip(jobs, *outcomes, strict=True):
        curve, model = reference(job)
        loss, norm = worst(ours[0].curve, curve)
        away = distance(job, ours[0].directory, model)
        held, needed = sum(outcome.state for outcome in ours), sum(2 * outcome.trained for outcome in ours)
        needed //= job.size("dp")  # every optimizer here is spread over the data-parallel ranks
        if loss > LOSS or norm > NORM or away > LOGITS or held != needed or not all(o.agree for o in ours):
            name = f"{Path(job.model).name} {job.layout} {job.config}"
            wrong.append(f"{name}: loss {loss:.1e}, norm {norm:.1e}, logits {away:.1e}, state {held} of {needed}")
    assert not wrong


@torch.no_grad()
def distance(job: LoraJob, directory: str, model: Any) -> float:
    """How far the logits of the exported adapters, read by peft and by transformers, are from those of `model`."""
    ids = torch.tensor([row["input_ids"] for row in rows()])
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(job.model), directory).eval()
    logits = loaded(ids).logits
    assert torch.equal(AutoModelForCausalLM.from_pretrained(directory)(ids).logits, logits)
    return (logits - model(ids).logits).abs().max().item()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    families = (("llama", True), ("qwen3", False), ("gpt2", True), ("bloom", True))
    return {family: tiny_model(folder / family, family, tied) for family, tied in families}


def test_adapters_train_alike_on_four_ranks(models: dict[str, str], tmp_path: Path) -> None:
    jobs = [LoraJob(model, layout) for model in models.values() for layout in ("pp2tp2z1", "tp2dp2z3")]
    check(jobs, 4, tmp_path)


def test_adapters_train_alike_on_two_ranks(models: dict[str, str], tmp_path: Path) -> None:
    stored = {"pipeline": {"stages": 2, "activation_checkpoint_interval": 0}}
    whole = {"pipeline": {"stages": 1, "activation_checkpoint_interval": 0}}
    on_host = {name: {"device": "cpu"} for name in ("offload_optimizer", "offload_param")}
    some = {"r": 4, "target_modules": ["q_proj", "down_proj", "lm_head"], "modules_to_save": ["input_layernorm"]}
    llama, qwen3 = models["llama"], models["qwen3"]
    jobs = [LoraJob(llama, layout) for layout in ("pp2z0", "tp2z0", "dp2z2")]
    jobs += [LoraJob(llama, layout, resumed=True) for layout in ("pp2z1", "dp2z2", "dp2z3", "tp2z1")]
    jobs += [LoraJob(llama, "pp2z1", stored), LoraJob(llama, "dp2z3", whole)]
    jobs += [LoraJob(llama, "dp2z3", {"zero_optimization": {"stage": 3, **on_host}})]
    jobs += [LoraJob(qwen3, layout, peft=some) for layout in ("pp2z1", "tp2z1", "dp2z3")]
    check(jobs, 2, tmp_path)
