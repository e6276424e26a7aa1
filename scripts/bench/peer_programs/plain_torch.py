"""PyTorch alone: one process, two without exchange, DDP, FSDP2, DTensor, 1F1B of `torch.distributed.pipelining`."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from transformers import LlamaForCausalLM

from peer_programs.task import LARGEST_NORM, Task, adamw, clip, loss_of, mean_over_ranks


def one_process(task: Task, **options: str) -> None:
    """Train in one process on all cores; `options` of the model, as transformers has them."""
    model, batches = task.model(**options), task.micro_batches()
    optimizer = adamw(model.parameters())

    def step() -> float:
        total = 0.0
        for ids in batches:
            with torch.autocast(
                task.device.type, getattr(torch, task.work.dtype), enabled=task.work.dtype != "float32"
            ):
                loss = loss_of(model(ids, use_cache=False).logits, ids) / len(batches)
            loss.backward()
            total += float(loss.detach())
        clip_grad_norm_(model.parameters(), LARGEST_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return total

    task.run(step)


def compiled_with_masters(task: Task) -> None:
    """Train in one process, model and loss compiled as one; weights in 16 bits, sums and masters in float32."""
    model, batches = task.model(), task.micro_batches()
    masters = [parameter.detach().float().requires_grad_() for parameter in model.parameters()]
    model.to(getattr(torch, task.work.dtype))
    weights = list(model.parameters())
    optimizer = adamw(masters)
    for master in masters:
        master.grad = torch.zeros_like(master)
    sums = [master.grad for master in masters if master.grad is not None]

    @torch.compile
    def forward(ids: Tensor) -> Tensor:
        return loss_of(model(ids, use_cache=False).logits, ids) / len(batches)

    def step() -> float:
        total = torch.zeros((), device=task.device)
        torch._foreach_zero_(sums)
        for ids in batches:
            loss = forward(ids)
            grads = torch.autograd.grad(loss, weights)
            torch._foreach_add_(sums, list(grads))
            total += loss.detach()
        clip_grad_norm_(masters, LARGEST_NORM)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(weights, masters)
        return float(total)

    task.run(step)


one_by_one = partial(one_process, experts_implementation="eager")


def ddp(task: Task) -> None:
    """Reduce gradients once a step, in the backward of the last micro-batch."""
    dist.init_process_group("gloo")
    model, batches = DistributedDataParallel(task.model()), task.micro_batches(task.size)
    optimizer = adamw(model.parameters())

    def step() -> float:
        total = 0.0
        for number, ids in enumerate(batches, 1):
            with nullcontext() if number == len(batches) else model.no_sync():
                loss = loss_of(model(ids, use_cache=False).logits, ids) / len(batches)
                loss.backward()
                total += float(loss.detach())
        clip_grad_norm_(model.parameters(), LARGEST_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return mean_over_ranks(total)

    task.run(step)


def apart(task: Task) -> None:
    """Have each rank train on its data, and update and clip its share of the parameters, without any exchange: a bound.

    The replicas drift apart, so its losses mean nothing. Ranks synchronise only before each step.
    """
    dist.init_process_group("gloo")
    model, batches = task.model(), task.micro_batches(task.size)
    own = sorted(model.parameters(), key=lambda parameter: parameter.numel())[task.rank :: task.size]
    optimizer = adamw(own)

    def step() -> float:
        total = 0.0
        for ids in batches:
            loss = loss_of(model(ids, use_cache=False).logits, ids) / len(batches)
            loss.backward()
            total += float(loss.detach())
        clip_grad_norm_(own, LARGEST_NORM)
        optimizer.step()
        model.zero_grad()
        return total

    task.run(step)


def fsdp2(task: Task) -> None:
    """Shard each layer and the rest; gradients are reduced with the last micro-batch alone."""
    mesh = init_device_mesh("cpu", (task.size,))
    model, batches = task.model(), task.micro_batches(task.size)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = adamw(model.parameters())

    def step() -> float:
        total = 0.0
        for number, ids in enumerate(batches, 1):
            model.set_requires_gradient_sync(number == len(batches))
            loss = loss_of(model(ids, use_cache=False).logits, ids) / len(batches)
            loss.backward()
            total += float(loss.detach())
        clip_grad_norm_(model.parameters(), LARGEST_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return mean_over_ranks(total)

    task.run(step)


LAYER_PLAN = {
    "self_attn.q_proj": ColwiseParallel(),
    "self_attn.k_proj": ColwiseParallel(),
    "self_attn.v_proj": ColwiseParallel(),
    "self_attn.o_proj": RowwiseParallel(),
    "mlp.gate_proj": ColwiseParallel(),
    "mlp.up_proj": ColwiseParallel(),
    "mlp.down_proj": RowwiseParallel(),
}


def dtensor(task: Task) -> None:
    """Cut linear layers, embedding and head by torch's own plan; no sequence parallelism."""
    mesh = init_device_mesh("cpu", (task.size,))
    model, batches = task.model(), task.micro_batches()
    ends = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, ends)
    for layer in model.model.layers:
        parallelize_module(layer, mesh, LAYER_PLAN)
    parameters = list(model.parameters())
    optimizer = adamw(parameters)

    def step() -> float:
        total = 0.0
        for ids in batches:
            loss = loss_of(model(ids, use_cache=False).logits, ids) / len(batches)
            loss.backward()
            total += float(loss.detach())
        clip(parameters, [_counted(parameter, task.rank) for parameter in parameters])
        optimizer.step()
        optimizer.zero_grad()
        return total

    task.run(step)


def _counted(parameter: nn.Parameter, rank: int) -> Tensor:
    """Return the part of a gradient that this rank counts: its shard; of what all ranks hold, rank 0 alone."""
    gradient = parameter.grad
    assert gradient is not None
    if isinstance(gradient, DTensor):
        local = gradient.to_local()
        if any(isinstance(placement, Shard) for placement in gradient.placements):
            return local
        gradient = local
    return gradient if rank == 0 else torch.zeros(1)


class StageOfLlama(nn.Module):
    """Half of the layers, with the embedding or the head."""

    def __init__(self, model: LlamaForCausalLM, stage: int, stages: int) -> None:
        super().__init__()
        layers, each = model.model.layers, len(model.model.layers) // stages
        self.embedding = model.model.embed_tokens if stage == 0 else None
        self.rotary, self.layers = model.model.rotary_emb, layers[stage * each : (stage + 1) * each]
        is_last = stage == stages - 1
        self.norm, self.head = (model.model.norm, model.lm_head) if is_last else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        """Return hidden states, or the logits."""
        x = x if self.embedding is None else self.embedding(x)
        places = torch.arange(x.shape[1]).unsqueeze(0)
        tables = self.rotary(x, places)
        for layer in self.layers:
            x = layer(x, position_ids=places, position_embeddings=tables)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def pipelining(task: Task) -> None:
    """Two stages under 1F1B."""
    dist.init_process_group("gloo")
    module = StageOfLlama(task.model(), task.rank, task.size)
    parameters = list(module.parameters())
    optimizer, ids = adamw(parameters), task.samples()
    stage = PipelineStage(module, task.rank, task.size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, task.work.micro_batches, loss_fn=loss_of)

    def step() -> float:
        losses: list[Tensor] = []
        if task.rank == 0:
            schedule.step(ids)
        else:
            schedule.step(target=ids, losses=losses)
        clip(parameters, [parameter.grad for parameter in parameters if parameter.grad is not None])
        optimizer.step()
        optimizer.zero_grad()
        mean = float(torch.stack(losses).mean()) if losses else 0.0
        return mean_over_ranks(mean) * task.size

    task.run(step)
