"""LoRA in every layout, against plain torch with peft's own model in one process; adapters out, and in by peft."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from harness import Trainer
from harness.extras.lora import Adaptation, lora_config
from harness.hf.skeleton import read_source
from harness.parallel.tensor.shard import shard_of
from tests.support.expert_families import FAMILIES as EXPERTS
from tests.support.expert_families import SPREAD
from tests.support.layers import build, prepare
from tests.support.ranks import run_ranks
from tests.support.training import STEPS, Curve, Job, arguments_of, by_torch, rows, tiny_model, worst

pytestmark = pytest.mark.ranks

LOSS, NORM = 2e-6, 3e-5
MOE_LOSS, MOE_NORM = 5e-6, 2e-4  # fp32 sums in another order also move what routers compare
RATE, SEED = 1e-2, 42
MIXED = ("mixtral", "deepseek_v3")
NF4 = {"bnb_4bit_quant_type": "nf4"}
DOUBLE = {**NF4, "bnb_4bit_use_double_quant": True}
ALL = {"r": 4, "lora_alpha": 16, "target_modules": "all-linear"}
DORA = {**ALL, "use_dora": True}
SOME = {"r": 4, "target_modules": ["q_proj", "down_proj", "lm_head"], "modules_to_save": ["input_layernorm"]}
TIED = {"r": 4, "target_modules": "all-linear", "modules_to_save": ["lm_head"], "ensure_weight_tying": True}
NOWHERE_WHOLE = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}


@dataclass(frozen=True)
class LoraJob(Job):
    """A job that trains adapters; `resumed`: it is stopped after two steps and goes on from its checkpoint; `bits`:
    transformers' settings of a base in 4 bits; `loss`, `norm`: relative differences that are allowed."""

    peft: dict[str, Any] = field(default_factory=lambda: ALL)
    bits: dict[str, Any] | None = None
    resumed: bool = False
    loss: float = LOSS
    norm: float = NORM

    @property
    def replicas(self) -> int:
        """Ranks that train one copy of what is not spread."""
        return self.size("dp") * self.size("cp")


@dataclass(frozen=True)
class Outcome:
    """What a run came to: its curve, the loss after it, the directory of its adapters, elements that this rank updates,
    elements of optimizer state for them, whether tensor-parallel ranks still agree on what all of them hold."""

    curve: Curve
    final: float
    directory: str
    updated: float
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
            trainer.close()
            trainer = _trainer(job, output_dir, resume_from_checkpoint="auto")
        record = trainer.training_step()
        curve.append((record.loss, record.grad_norm or 0.0))
    trainer.save_model()
    module = trainer.engine.deepspeed.module
    trained = [p for p in module.parameters() if p.requires_grad]
    # Every optimizer here is spread over the data ranks and those that share sequences; experts are spread already.
    updated = sum(
        getattr(p, "ds_numel", p.numel()) / (job.replicas if getattr(p, "allreduce", True) else 1) for p in trained
    )
    state = _state_elements(trainer.engine.deepspeed.basic_optimizer)
    final = trainer.evaluate(rows())["eval_loss"]
    outcome = Outcome(curve, final, output_dir, updated, state, _ranks_agree(module, trainer.run.groups.tp_group))
    trainer.close()
    return outcome


def _trainer(job: LoraJob, output_dir: str, **more: Any) -> Trainer:
    config = arguments_of(job, output_dir, **{"learning_rate": RATE, "seed": SEED, **job.arguments, **more})
    peft, bits = LoraConfig(**job.peft), quantization(job)
    return Trainer(job.model, config, train_dataset=rows(), peft_config=peft, quantization_config=bits)


def quantization(job: LoraJob) -> BitsAndBytesConfig | None:
    """transformers' config of the base in 4 bits; None for a whole one."""
    return None if job.bits is None else BitsAndBytesConfig(load_in_4bit=True, **job.bits)


def base_model(job: LoraJob) -> Any:
    """The base as transformers loads it, in 4 bits if the job has it so."""
    return AutoModelForCausalLM.from_pretrained(
        job.model, dtype=torch.float32, quantization_config=quantization(job), device_map="cpu" if job.bits else None
    )


def _state_elements(optimizer: Any) -> int:
    """Elements of AdamW's moments on this rank."""
    return sum(
        v.numel() for entry in optimizer.state.values() for v in entry.values() if torch.is_tensor(v) and v.dim()
    )


def _ranks_agree(module: torch.nn.Module, group: Any) -> bool:
    """Whether trained parameters that every tensor-parallel rank holds whole are the same on all of them."""
    whole = [p for p in module.parameters() if p.requires_grad and shard_of(p) is None and not hasattr(p, "ds_id")]
    if group is None or not whole:  # ZeRO-3 spreads them
        return True
    sums = torch.stack([p.detach().double().sum() for p in whole])
    both = [torch.empty_like(sums) for _ in range(dist.get_world_size(group))]
    dist.all_gather(both, sums, group=group)
    return all(torch.equal(both[0], other) for other in both)


def reference(job: LoraJob) -> Curve:
    """The same training by plain torch on peft's model, from the harness's initial adapters."""
    model: Any = get_peft_model(base_model(job), LoraConfig(**job.peft)).train()
    initial = initial_adapters(job)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.copy_(initial[name.removeprefix("base_model.model.")])
    ids = torch.tensor([row["input_ids"] for row in rows()])
    return by_torch(model, lambda: cross_entropy(model(ids).logits, ids), STEPS, RATE)


def initial_adapters(job: LoraJob) -> dict[str, torch.Tensor]:
    """The adapters with which a run starts, by their names in the model."""
    adaptation = Adaptation(config=lora_config(LoraConfig(**job.peft)))
    built = build(prepare(read_source(job.model), seed=SEED, adaptation=adaptation))
    return {name: p.detach() for module in built.modules.values() for name, p in module.named_parameters()}


def check(jobs: list[LoraJob], ranks: int, folder: Path) -> None:
    """Every job: the reference's curve, adapters that give peft the trained model's loss, state for them alone."""
    outcomes = run_ranks(ranks, train_adapters, jobs, str(folder), timeout_s=400)
    wrong = []
    for job, *ours in zip(jobs, *outcomes, strict=True):
        loss, norm = worst(ours[0].curve, reference(job))
        away = abs(exported_loss(job, ours[0].directory) / ours[0].final - 1)
        held, needed = sum(outcome.state for outcome in ours), round(sum(2 * outcome.updated for outcome in ours))
        agree = all(outcome.agree for outcome in ours)
        if loss > job.loss or norm > job.norm or away > LOSS or held != needed or not agree:
            name = f"{Path(job.model).name} {job.layout} {job.config}"
            differs = f"loss {loss:.1e}, norm {norm:.1e}, exported {away:.1e}, state {held} of {needed}"
            wrong.append(f"{name}: {differs}, {'' if agree else 'not '}the same on all tensor-parallel ranks")
    assert not wrong


@torch.no_grad()
def exported_loss(job: LoraJob, directory: str) -> float:
    """The loss of the exported adapters as peft reads them; as transformers reads them, they are the same model."""
    loaded = PeftModel.from_pretrained(base_model(job), directory).eval()
    ids = torch.tensor([row["input_ids"] for row in rows()])
    logits = loaded(ids).logits
    assert job.bits is not None or torch.equal(AutoModelForCausalLM.from_pretrained(directory)(ids).logits, logits)
    return cross_entropy(logits, ids).item()


def cross_entropy(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The mean over next tokens."""
    return torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    families = {"llama": True, "qwen3": False, "gpt2": True, "bloom": True}
    dense = {family: tiny_model(folder / family, family, tied) for family, tied in families.items()}
    quiet = {"router_aux_loss_coef": 0.0}
    mixed = {family: tiny_model(folder / family, family, False, **EXPERTS[family] | quiet) for family in MIXED}
    return dense | mixed


@pytest.mark.thorough
def test_adapters_train_alike_on_four_ranks(models: dict[str, str], tmp_path: Path) -> None:
    zero_bubble = {"pipeline": {"stages": 2, "activation_checkpoint_interval": 1, "schedule": "zero-bubble"}}
    jobs = [LoraJob(models["llama"], "pp2tp2z1", zero_bubble)]
    jobs += [LoraJob(models["gpt2"], "tp4z1", peft=DORA), LoraJob(models["bloom"], "tp2dp2z2")]
    jobs += [LoraJob(models["llama"], "tp2dp2z3", NOWHERE_WHOLE, peft=DORA)]
    cut_twice = [(family, "pp2tp2z1", SPREAD) for family in MIXED]
    for family, layout, config in (*cut_twice, ("deepseek_v3", "tp2dp2z3", NOWHERE_WHOLE)):
        jobs.append(LoraJob(models[family], layout, config, loss=MOE_LOSS, norm=MOE_NORM))
    check(jobs, 4, tmp_path)


def test_adapters_train_alike_on_two_ranks(models: dict[str, str], tmp_path: Path) -> None:
    check([LoraJob(models["llama"], "pp2z1", resumed=True)], 2, tmp_path)


@pytest.mark.thorough
def test_adapters_train_alike_in_other_layouts_of_two_ranks(models: dict[str, str], tmp_path: Path) -> None:
    llama = models["llama"]
    on_host = {name: {"device": "cpu"} for name in ("offload_optimizer", "offload_param")}
    whole = {"pipeline": {"stages": 1, "activation_checkpoint_interval": 0}}
    jobs = [LoraJob(llama, "tp2z1"), LoraJob(llama, "tp2z1", peft=TIED)]
    jobs += [LoraJob(llama, "dp2z3", {**whole, "zero_optimization": {"stage": 3, **on_host}})]
    jobs += [LoraJob(models["qwen3"], "pp2z1", peft=SOME), LoraJob(llama, "pp2z1", peft=TIED)]
    jobs += [LoraJob(llama, "dp2z3", resumed=True, peft=DORA), LoraJob(models["qwen3"], "dp2z3", peft=SOME)]
    jobs += [LoraJob(llama, "dp2z3", peft=DORA)]
    check(jobs, 2, tmp_path)


@pytest.mark.thorough
def test_adapters_over_weights_in_4_bits_train_alike_on_two_ranks(models: dict[str, str], tmp_path: Path) -> None:
    llama = models["llama"]
    zero_bubble = {"pipeline": {"stages": 2, "activation_checkpoint_interval": 0, "schedule": "zero-bubble"}}
    context = {"context_parallel": {"size": 2}}
    jobs = [LoraJob(llama, "dp2z1", bits=DOUBLE), LoraJob(llama, "dp2z2", bits=NF4, resumed=True)]
    jobs += [LoraJob(llama, "dp2z3", NOWHERE_WHOLE, bits=DOUBLE, resumed=True)]
    jobs += [LoraJob(llama, "pp2z1", bits=NF4), LoraJob(llama, "pp2z1", zero_bubble, bits=NF4, resumed=True)]
    jobs += [LoraJob(llama, "tp2z1", bits=DOUBLE), LoraJob(models["gpt2"], "tp2z1", bits=NF4)]
    jobs += [LoraJob(llama, layout, context, bits=NF4) for layout in ("cp2z1", "cp2z3")]
    spread = {"config": SPREAD, "bits": NF4, "loss": MOE_LOSS, "norm": MOE_NORM}
    jobs += [LoraJob(models["mixtral"], "dp2z1", **spread), LoraJob(models["deepseek_v3"], "dp2z2", **spread)]
    check(jobs, 2, tmp_path)


@pytest.mark.thorough
def test_adapters_over_weights_in_4_bits_train_alike_on_four_ranks(models: dict[str, str], tmp_path: Path) -> None:
    zero_bubble = {"pipeline": {"stages": 2, "activation_checkpoint_interval": 0, "schedule": "zero-bubble"}}
    jobs = [LoraJob(models["llama"], "pp2tp2z1", zero_bubble, bits=DOUBLE)]
    jobs += [LoraJob(models["llama"], "tp2dp2z2", bits=NF4), LoraJob(models["mixtral"], "pp2tp2z1", SPREAD, bits=NF4)]
    check(jobs, 4, tmp_path)
