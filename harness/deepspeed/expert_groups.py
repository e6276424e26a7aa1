"""Mark experts that are not on every data-parallel rank as DeepSpeed marks those of its own MoE layers.

DeepSpeed then sums the gradients of such a parameter over the ranks that hold it and divides by the number of
data-parallel ranks. ZeRO-1 and ZeRO-2 divide its optimizer states over those ranks, and norms count it once.
"""

from __future__ import annotations

from collections.abc import Iterable

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


def set_expert_groups(sharing: ProcessGroup | None, copies: ProcessGroup | None) -> None:
    """Tell DeepSpeed which ranks share experts, for the whole process; its engines read it while they are built.

    Args:
        sharing: the ranks over which experts are distributed; None if no experts are.
        copies: the ranks that hold the same experts as this one.
    """
    groups._EXPERT_PARALLEL_GROUP = {} if sharing is None else {NAME: sharing}
    groups._EXPERT_DATA_PARALLEL_GROUP = {} if copies is None else {NAME: copies}
