"""The trained model as one HuggingFace model in memory, gathered from all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from harness.checkpoint.exporting.weights import gather_tp, gather_zero3
from harness.checkpoint.tensors.local_shard import saved_tensors
from harness.errors import UserError
from harness.hf.causal import CausalModel
from harness.hf.weights.conversion import untie
from harness.topology.groups import Groups
from harness.training.run import Run


def with_config(run: Run) -> nn.Module:
    """Return this rank's layers, with the model's `config`."""
    module: Any = run.module
    if run.trainable.causal is not None:
        module.config = run.trainable.causal.source.config
    return run.module


@torch.no_grad()
def gather_model(run: Run) -> PreTrainedModel | None:
    """Return the whole model on the CPU of rank 0, None on the others; all ranks call it. See
    `Trainer.trained_model`."""
    causal, engine, groups = run.trainable.causal, run.engine, run.groups
    if causal is None:
        raise UserError(
            "trained_model() supports HuggingFace models only: save_model() writes the tensors of a list of layers"
        )
    if run.adaptation is not None:
        raise UserError("trained_model() does not support adapters: call save_model(), then PeftModel.from_pretrained")
    module = run.module
    model = _target(causal, next(module.parameters()).dtype) if groups.rank == 0 else None
    own = {} if model is None else model.state_dict(keep_vars=True)
    for stage in range(groups.layout.pp_size):
        leader = groups.layout.rank(stage=stage, dp_rank=0, tp_rank=0)
        mine = _whole_tensors(module, groups) if groups.coordinate.stage == stage else iter(())
        for name, tensor in _to_first_rank(mine, leader, groups, engine.device):
            own[run.trainable.saved_name(name)].data.copy_(tensor)
    return model


def _target(causal: CausalModel, dtype: torch.dtype) -> PreTrainedModel:
    """Return what the weights are put into: the user's own model, or one made from the config."""
    source = causal.source
    if source.model is not None:
        return source.model
    model: PreTrainedModel = AutoModelForCausalLM.from_config(source.config, dtype=dtype)
    untie(model, model.all_tied_weights_keys.keys() - causal.outer.model.all_tied_weights_keys.keys())
    if source.generation is not None:
        model.generation_config = source.generation
    model.eval()
    return model


def _whole_tensors(module: nn.Module, groups: Groups) -> Iterator[tuple[str, Tensor]]:
    """Name and whole tensor of what a stage holds; all of its ranks iterate together, its first one gets them whole."""
    for name, tensor in saved_tensors(module, each_name=True):
        with gather_zero3([tensor]):
            yield name, gather_tp(tensor, groups)


def _to_first_rank(
    tensors: Iterator[tuple[str, Tensor]], leader: int, groups: Groups, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Send what `leader` iterates over to rank 0, one tensor at a time, which gets it; other ranks get nothing."""
    if groups.rank == 0 and leader != 0:
        while (message := _receive_object(leader)) is not None:
            name, shape, dtype = message
            tensor = torch.empty(shape, dtype=dtype, device=device)
            dist.recv(tensor, src=leader)
            yield name, tensor
        return
    for name, tensor in tensors:
        if groups.rank == 0:
            yield name, tensor
        elif groups.rank == leader:
            dist.send_object_list([(name, tuple(tensor.shape), tensor.dtype)], dst=0)
            dist.send(tensor.contiguous(), dst=0)
    if groups.rank == leader != 0:
        dist.send_object_list([None], dst=0)


def _receive_object(source: int) -> tuple[str, tuple[int, ...], torch.dtype] | None:
    received: list[tuple[str, tuple[int, ...], torch.dtype] | None] = [None]
    dist.recv_object_list(received, src=source)
    return received[0]
