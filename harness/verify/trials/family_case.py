"""A tiny model of a family and its training in one process, with which the cells of the matrix are compared."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import CONFIG_MAPPING, PretrainedConfig

from harness.errors import UserError
from harness.hf.causal import CausalModel, assemble
from harness.hf.skeleton import ModelSource, text_decoder
from harness.parallel.comm import TensorParallel
from harness.topology.agreement import broadcast_object
from harness.verify.comparison import NOT_CAUSAL, looks_ahead
from harness.verify.tiny_copy import tiny_config
from harness.verify.trials.composition import Composition
from harness.verify.trials.subject import Subject, make_subject
from harness.verify.trials.trial import Judge

CPU = torch.device("cpu")


class NotTried(Exception):
    """No tiny model of the family runs."""


@dataclass(frozen=True, kw_only=True)
class FamilyCase:
    """A tiny model of a family with its training data, and the judge that compares a training with one process."""

    config: PretrainedConfig
    subject: Subject
    composition: Composition
    judge: Judge

    @property
    def directory(self) -> Path:
        """The directory of the model."""
        return self.subject.base


def build_case(family: str, work: Path) -> FamilyCase:
    """Return a family's tiny model, with the losses and gradient norms of one process already computed on rank 0.

    Both ranks must call it. Raises UserError for a family that no layout can train, and NotTried if no tiny model runs.
    """
    text_decoder(CONFIG_MAPPING[family]())
    composition = Composition(model=family)
    try:
        config = tiny_config(family, tensor=2)
    except UserError as error:
        raise NotTried(str(error)) from error
    fault = ""
    if dist.get_rank() == 0:
        try:
            make_subject(composition, work)
        except Exception as error:  # rank 1 must get every error
            fault = str(error)
    if fault := broadcast_object(fault):
        raise NotTried(fault)
    subject = make_subject(composition, work)
    judge = Judge()
    if looks_ahead(config, CPU):
        # with other settings it might not look ahead; so a reason that holds for all settings comes first
        cut_family(ModelSource(name=family, config=config, weights=None), TensorParallel())
        raise UserError(NOT_CAUSAL)
    if dist.get_rank() == 0:
        judge.reference(composition, subject)  # first: a ZeRO-3 engine replaces torch's `functional.linear` for good
    dist.barrier()
    return FamilyCase(config=config, subject=subject, composition=composition, judge=judge)


def needs_is_decoder(config: PretrainedConfig) -> bool:
    """Return whether a family attends to later tokens unless its config.json sets `is_decoder`."""
    if getattr(type(config)(), "is_decoder", True):
        return False
    encoder = copy.deepcopy(config)
    encoder.is_decoder = False
    try:
        return looks_ahead(encoder, CPU)
    except Exception:  # as an encoder it does not run at all
        return True


def cut_family(source: ModelSource, place: TensorParallel) -> CausalModel:
    """Return the model of a tiny config, cut for this rank's place in a tensor-parallel group."""
    return assemble(source, tensor=place, device=CPU, dtype=torch.float32, seed=0, finish=lambda _layer: None)
