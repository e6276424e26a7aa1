"""Experts that are not on every data-parallel rank, by the marks and groups with which DeepSpeed knows its own.

Such a parameter's gradients are summed over the ranks that hold it and divided by the number of data-parallel ranks;
ZeRO-1 and ZeRO-2 divide its optimizer states over those ranks; norms count it once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import groups
from torch import nn
from torch.distributed import ProcessGroup

NAME = "experts"
"""Of the one group of ranks that share out experts."""
EXPERT_GROUP = {"moe": True, "name": NAME}
"""What tells DeepSpeed that a parameter group holds such experts."""


def mark_experts(parameters: Iterable[nn.Parameter]) -> None:
    """Tell DeepSpeed that these are not on every data-parallel rank."""
    for parameter in parameters:
        parameter.allreduce = False  # type: ignore[attr-defined]  # a parameter takes any attribute
        parameter.group_name = NAME  # type: ignore[attr-defined]  # likewise


def is_expert(parameter: nn.Parameter) -> bool:
    """Whether a parameter is marked so."""
    return not getattr(parameter, "allreduce", True)


@contextmanager
def knowing_experts(sharing: ProcessGroup | None, copies: ProcessGroup | None, *, marked: bool) -> Iterator[None]:
    """Let an engine that is built meanwhile know of experts that are marked.

    DeepSpeed looks for layers of its own classes, and keeps the groups for the whole process.

    Args:
        sharing: the ranks among which experts are dealt; None where there are none.
        copies: the ranks with the same ones.
        marked: whether any parameter of this rank is.
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
