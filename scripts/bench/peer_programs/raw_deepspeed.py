"""DeepSpeed alone: its PipelineEngine, ZeRO-1, ZeRO-3 and AutoTP, driven as its documentation shows."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from torch import Tensor, nn
from transformers import LlamaForCausalLM
from transformers.utils import output_capturing

from peer_programs.task import LARGEST_NORM, RATE, Task, Work, adamw, loss_of, mean_over_ranks


def config(work: Work, replicas: int, **sections: Any) -> dict[str, Any]:
    """Return a DeepSpeed config for a step that some replicas share."""
    return {
        "train_micro_batch_size_per_gpu": work.samples,
        "gradient_accumulation_steps": work.micro_batches // replicas,
        "gradient_clipping": LARGEST_NORM,
        "bf16": {"enabled": work.dtype == "bfloat16"},
        **sections,
    }


def zero1(task: Task) -> None:
    """Run ZeRO-1."""
    _train(task, task.size, {"zero_optimization": {"stage": 1}})


def zero3(task: Task) -> None:
    """Run ZeRO-3."""
    _train(task, task.size, {"zero_optimization": {"stage": 3}})


def autoep(task: Task) -> None:
    """Run AutoEP with ZeRO-1. DeepSpeed must make the optimizer itself."""
    optimizer = {"type": "AdamW", "params": {"lr": RATE, "weight_decay": 0.0, "torch_adam": True}}
    experts = {"enabled": True, "autoep_size": task.size, "preset_model": task.work.family}
    _read_names()
    experts["use_grouped_mm"] = task.device.type != "cpu"  # with grouped products it activates by a kernel for GPUs
    _train(
        task,
        task.size,
        {"zero_optimization": {"stage": 1}, "expert_parallel": experts, "optimizer": optimizer},
        optimizer=None,
    )


def _read_names() -> None:
    """Let DeepSpeed 0.19.8's AutoEP ask a registry of transformers 5.23, which takes models alone, for names."""
    kind: Any = type(output_capturing._CAN_RECORD_REGISTRY)  # noqa: SLF001  # DeepSpeed reads it, too
    of_model = kind.get

    def get(registry: dict[str, Any], key: object, default: Any = None) -> Any:
        return dict.get(registry, key, default) if isinstance(key, str) else of_model(registry, key)

    kind.get = get


def autotp(task: Task) -> None:
    """Cut the layers by DeepSpeed's own search for linear layers."""
    _train(task, 1, {"zero_optimization": {"stage": 0}, "tensor_parallel": {"autotp_size": task.size}})


def _train(task: Task, replicas: int, sections: dict[str, Any], optimizer: Any = adamw) -> None:
    deepspeed.init_distributed("gloo")
    model, batches = task.model(), task.micro_batches(replicas)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=None if optimizer else model.parameters(),
        optimizer=optimizer and optimizer(model.parameters()),
        config=config(task.work, replicas, **sections),
    )

    def step() -> float:
        total = 0.0
        for ids in batches:
            loss = loss_of(engine(ids, use_cache=False).logits, ids)
            engine.backward(loss)
            engine.step()
            total += float(loss.detach()) / len(batches)
        return mean_over_ranks(total)

    task.run(step)


class Embedding(nn.Module):
    """Token ids to hidden states."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.embedding = model.model.embed_tokens

    def forward(self, ids: Tensor) -> Tensor:
        """Return the hidden states."""
        found: Tensor = self.embedding(ids)
        return found


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, model: LlamaForCausalLM, index: int) -> None:
        super().__init__()
        self.layer, self.rotary = model.model.layers[index], model.model.rotary_emb

    def forward(self, x: Tensor) -> Tensor:
        """Return the hidden states."""
        places = torch.arange(x.shape[1]).unsqueeze(0)
        found: Tensor = self.layer(x, position_ids=places, position_embeddings=self.rotary(x, places))
        return found


class Head(nn.Module):
    """Hidden states to logits."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.norm, self.head = model.model.norm, model.lm_head

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        found: Tensor = self.head(self.norm(x))
        return found


def pipeline(task: Task) -> None:
    """Two stages, cut by their parameters."""
    deepspeed.init_distributed("gloo")
    model = task.model()
    layers = [Layer(model, index) for index in range(len(model.model.layers))]
    module = PipelineModule([Embedding(model), *layers, Head(model)], num_stages=task.size, loss_fn=loss_of)
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=adamw(parameter for parameter in module.parameters() if parameter.requires_grad),
        config=config(task.work, 1, zero_optimization={"stage": 0}),
    )
    batches = [(ids, ids) for ids in task.micro_batches()]
    task.run(lambda: float(engine.train_batch(iter(batches))))
    dist.barrier()
