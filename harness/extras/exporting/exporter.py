"""Export the trained model as files (HuggingFace's, or peft's adapters), or gather it into one model in memory.

Adapters name their base model: its path if it came from a directory. A base model that was initialised from the seed,
or given in memory, is written beside them, so that peft and `from_pretrained` find it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from harness.atomic import replaced_files
from harness.checkpoint.directories import set_aside
from harness.checkpoint.exporting.model_files import hide_secrets
from harness.checkpoint.exporting.weights import (
    export_adapters,
    export_config,
    export_weights,
    gather_tp,
    gather_zero3,
)
from harness.checkpoint.tensors.local_shard import saved_tensors
from harness.checkpoint.tensors.not_saved import NotSaved, all_save
from harness.errors import UserError
from harness.extras.merging.merge import BASE
from harness.extras.merging.whole_model import whole_model
from harness.hf.adapters import plain_name, saved_name
from harness.hf.causal import CausalModel
from harness.hf.weights.conversion import untie
from harness.topology.groups import Groups
from harness.training.parts.data import AnyTokenizer
from harness.training.prepare.run import Run

TEXT = "unfinished-text"  # holds the text decoder until the larger model around it is written


@dataclass(frozen=True)
class Exporter:
    """Exports the model of a run."""

    run: Run

    def write_configs(self, folder: Path) -> None:
        """Write the files that HuggingFace needs besides the weights of a checkpoint; one rank calls it."""
        run = self.run
        causal = run.trainable.causal
        adaptation = run.spec.adaptation
        if causal is None:
            return
        if adaptation is not None:
            base = causal.source.weights
            adaptation.write_config(str(base) if isinstance(base, Path) else "", folder)
        else:
            export_config(causal.source, next(run.module.parameters()).dtype, folder)
        if run.data.tokenizer is not None:
            run.data.tokenizer.save_pretrained(folder)
            hide_secrets(folder)

    def write(self, directory: Path) -> None:
        """Write the trained model, or its adapters, into `directory`; all ranks call it.

        Raises NotSaved, on all ranks, if a file cannot be written.
        """
        try:
            _write_model(self.run, directory)
        except NotSaved as error:
            text = str(error)  # it may name a path itself
            where = "" if text.startswith("/") or str(directory) in text else f" to {directory}"
            raise NotSaved(f"the model cannot be written{where}: {text}") from error

    @torch.no_grad()
    def gather(self) -> PreTrainedModel | None:
        """Gather the whole model on the CPU of rank 0; return None on other ranks. All ranks call it.

        Raises UserError for a list of layers, and for a model with adapters.
        """
        run = self.run
        causal = run.trainable.causal
        engine = run.engine
        groups = run.groups
        if causal is None:
            raise UserError(
                "trained_model() supports HuggingFace models only: save_model() writes the tensors of a list of layers"
            )
        if run.spec.adaptation is not None:
            raise UserError(
                "trained_model() does not support adapters: call save_model(), then PeftModel.from_pretrained"
            )
        module = run.module
        model = _target(causal, next(module.parameters()).dtype) if groups.rank == 0 else None
        own = {} if model is None else model.state_dict(keep_vars=True)
        # Go stage by stage, so that rank 0 receives from one rank at a time. Gathering is collective within a stage.
        for stage in range(groups.layout.pp_size):
            leader = groups.layout.rank(stage=stage, dp_rank=0, tp_rank=0)
            mine = _whole_tensors(module, groups) if groups.coordinate.stage == stage else iter(())
            for name, tensor in _to_first_rank(mine, leader, groups, engine.device):
                own[run.trainable.saved_name(name)].data.copy_(tensor)
        return model


def save_tokenizer(tokenizer: AnyTokenizer, directory: Path) -> None:
    """Write the tokenizer's files; a full disk leaves earlier files intact.

    A chat template of an earlier tokenizer is renamed, because it would override this tokenizer's.
    """
    with replaced_files(directory) as folder:
        tokenizer.save_pretrained(folder)
        hide_secrets(folder)
        if not getattr(tokenizer, "chat_template", None):  # it has not overwritten the earlier template
            set_aside(directory / "chat_template.jinja")


def _write_model(run: Run, directory: Path) -> None:
    all_save(partial(directory.mkdir, parents=True, exist_ok=True))
    causal = run.trainable.causal
    whole = None if causal is None or run.spec.adaptation is not None else whole_model(causal.source)
    if whole is not None:
        text = directory / TEXT
        all_save(partial(text.mkdir, exist_ok=True))
        _write_weights(run, text)
        _on_first_rank(run, lambda: whole.write(text, directory))
        _on_first_rank(run, partial(shutil.rmtree, text, ignore_errors=True))
    elif run.spec.adaptation is None:
        _write_weights(run, directory)
    else:
        assert causal is not None  # only HuggingFace models have adapters
        base = causal.source.weights
        if not isinstance(base, Path):
            base = directory / BASE
            all_save(partial(base.mkdir, exist_ok=True))
            _write_weights(run, base)
        name = run.trainable.saved_name
        adaptation = run.spec.adaptation
        at = str(base.resolve())
        export_adapters(run.module, run.groups, directory, rename=lambda key: saved_name(name(key)))
        _on_first_rank(run, lambda: adaptation.write_config(at, directory))
    tokenizer = run.data.tokenizer
    _on_first_rank(run, lambda: save_tokenizer(tokenizer, directory) if tokenizer is not None else None)


def _write_weights(run: Run, directory: Path) -> None:
    """Write the model's weights without adapters, and its config."""
    causal, name = run.trainable.causal, run.trainable.saved_name
    form = causal.form if causal else None
    export_weights(run.module, run.groups, directory, rename=lambda key: plain_name(name(key)), form=form)
    if causal is not None:
        source = causal.source
        dtype = next(run.module.parameters()).dtype
        _on_first_rank(run, lambda: export_config(source, dtype, directory))


def _on_first_rank(run: Run, write: Callable[[], object]) -> None:
    """Call `write` on rank 0; all ranks call this, and all raise NotSaved if it fails."""
    all_save(lambda: write() if run.groups.rank == 0 else None)


def _target(causal: CausalModel, dtype: torch.dtype) -> PreTrainedModel:
    """Return the model to fill with weights: the user's, or a new one from the config."""
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
    """Yield (name, tensor) of a stage, gathered on its first rank; all ranks of the stage iterate together."""
    for name, tensor in saved_tensors(module, each_name=True):
        with gather_zero3([tensor]):
            yield name, gather_tp(tensor, groups)


def _to_first_rank(
    tensors: Iterator[tuple[str, Tensor]], leader: int, groups: Groups, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Send the tensors of rank `leader` to rank 0 one at a time; only rank 0 yields them.

    All ranks of the stage must iterate, as gathering their tensors is collective.
    """
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
