"""A place in a model where a rule of a tensor-parallel plan applies, as the functions of the styles are given it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from harness.config.errors import UserError
from harness.parallel.comm import TensorParallel
from harness.parallel.heads import Heads
from harness.parallel.plan import Rule


@dataclass(frozen=True, kw_only=True)
class Site:
    """A module that a rule of the plan names: its full name, the module that owns it and, if that is an attention, its
    heads; and this rank's place.

    `local_output`: a gathered output shall stay this rank's part.
    """

    name: str
    module: Any
    owner: Any
    heads: Heads | None
    rule: Rule
    tensor: TensorParallel
    config: Any
    local_output: bool = False


def misfit(site: Site, wanted: str) -> UserError:
    """The error for a style that is for `wanted` and stands at something else."""
    return UserError(
        f"the tensor-parallel style {site.rule.style} is for {wanted}, but {site.name} is a "
        f"{type(site.module).__name__}: set tensor_parallel.autotp_size to 1, or mend the plan"
    )
