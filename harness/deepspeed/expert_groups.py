"""Mark experts that are not on every data-parallel rank, like DeepSpeed's own MoE layers.

DeepSpeed then sums the gradients of such a parameter over the ranks that hold it and divides by the number of
data-parallel ranks. ZeRO-1 and ZeRO-2 partition its optimizer states over those ranks, and norms count it once.
"""

from __future__ import annotations

from collections.abc import Iterable

from deepspeed.utils import groups
from torch import nn
from torch.distributed import ProcessGroup

NAME = "experts"
"""DeepSpeed's name for the groups of ranks that share experts."""
EXPERT_GROUP = {"moe": True, "name": NAME}
"""Entries that mark a parameter group as holding such experts for DeepSpeed."""


def mark_experts(parameters: Iterable[nn.Parameter]) -> None:
    """Tell DeepSpeed that these parameters are not on every data-parallel rank."""
    for parameter in parameters:
        parameter.allreduce = False  # type: ignore[attr-defined]  # a parameter takes any attribute
        parameter.group_name = NAME  # type: ignore[attr-defined]  # likewise


def is_expert(parameter: nn.Parameter) -> bool:
    return not getattr(parameter, "allreduce", True)


def set_expert_groups(sharing: ProcessGroup | None, copies: ProcessGroup | None) -> None:
    """Tell DeepSpeed which ranks share experts, for the whole process; engines read it during construction.

    Args:
        sharing: the ranks over which experts are distributed; None if no experts are.
        copies: the ranks that hold the same experts as this one.
    """
    # Not by DeepSpeed's own functions, which choose the ranks of the groups themselves, and only once in a process.
    groups._EXPERT_PARALLEL_GROUP = {} if sharing is None else {NAME: sharing}
    groups._EXPERT_DATA_PARALLEL_GROUP = {} if copies is None else {NAME: copies}
