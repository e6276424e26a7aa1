"""Mark experts that are not on every data-parallel rank as DeepSpeed marks those of its own MoE layers.

DeepSpeed then sums the gradients of such a parameter over the ranks that hold it and divides by the number of
data-parallel ranks. ZeRO-1 and ZeRO-2 divide its optimizer states over those ranks, and norms count it once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import groups
from torch import nn
from torch.distributed import ProcessGroup

NAME = "experts"
"""The name under which DeepSpeed keeps the groups of ranks that share experts."""
EXPERT_GROUP = {"moe": True, "name": NAME}
"""Entries of a parameter group that tell DeepSpeed that it holds such experts."""


def mark_experts(parameters: Iterable[nn.Parameter]) -> None:
    """Tell DeepSpeed that these parameters are not on every data-parallel rank."""
    for parameter in parameters:
        parameter.allreduce = False  # type: ignore[attr-defined]  # a parameter takes any attribute
        parameter.group_name = NAME  # type: ignore[attr-defined]  # likewise


def is_expert(parameter: nn.Parameter) -> bool:
    """Return whether a parameter was marked by `mark_experts`."""
    return not getattr(parameter, "allreduce", True)


@contextmanager
def knowing_experts(sharing: ProcessGroup | None, copies: ProcessGroup | None, *, marked: bool) -> Iterator[None]:
    """Have an engine that is built in this context treat the marked parameters as experts.

    By itself DeepSpeed recognises only layers of its own MoE classes. It keeps the groups for the whole process, so
    they stay set after the context.

    Args:
        sharing: the ranks over which experts are distributed; None if no experts are.
        copies: the ranks that hold the same experts as this one.
        marked: whether any parameter of this rank is marked.
    """
    groups._EXPERT_PARALLEL_GROUP = {} if sharing is None else {NAME: sharing}
    groups._EXPERT_DATA_PARALLEL_GROUP = {} if copies is None else {NAME: copies}
    original = DeepSpeedEngine._configure_distributed_model

    def configure(engine: DeepSpeedEngine, model: nn.Module) -> None:
        original(engine, model)
        engine.has_moe_layers = True

    if not marked:
        yield
        return
    DeepSpeedEngine._configure_distributed_model = configure
    try:
        yield
    finally:
        DeepSpeedEngine._configure_distributed_model = original
