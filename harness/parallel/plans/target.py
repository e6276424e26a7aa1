"""A place in a model where a rule of a tensor-parallel plan applies, as the functions of the styles are given it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import nn
from transformers import PretrainedConfig

from harness.config.model.shares import Heads, Stretch
from harness.errors import UserError
from harness.parallel.comm import TensorParallel
from harness.parallel.plans.heads import Attention, blocks_of, deal
from harness.parallel.plans.plan import PlanRule
from harness.parallel.tensor.shard import Shard, share_of
from harness.parallel.token_exchange import NO_NEIGHBOURS, Neighbours

KEYS_OR_VALUES = re.compile(r"(^|_)w?(k|v|kv|keys?|values?)(_|$)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class PlanTarget:
    """A module or parameter that a rule of the plan names: its full name, the module that owns it and the attention to
    which it belongs, if to any; and this rank's place, in the tensor-parallel group and among the `neighbours` on the
    data axis that hold other experts.

    `module`: the owner, where the rule names a parameter. `local_output`: a gathered output shall stay this rank's
    part.
    """

    name: str
    module: nn.Module
    owner: nn.Module
    attention: Attention | None
    rule: PlanRule
    tensor: TensorParallel
    config: PretrainedConfig
    local_output: bool = False
    neighbours: Neighbours = NO_NEIGHBOURS

    @property
    def unit(self) -> int:
        """How many neighbouring outputs stay together, as the rule says."""
        return 1 if self.rule.unit is None else int(getattr(self.owner, self.rule.unit))

    @property
    def heads(self) -> Heads | None:
        """The heads that the ranks share: those of the attention, or of each block that they lie in. UserError where
        the blocks are not equal."""
        if self.attention is None:
            return None
        return blocks_of(self.attention.heads, self.rule.blocks, self.name)

    def deal(self, width: int, *, unit: int | None = None) -> list[Stretch]:
        """Every rank's stretch of `width` entries; UserError where a rank would have none."""
        heads, key_values = self.heads, set()
        if heads is not None and self.attention is not None and self.attention.inside:
            key_values = {heads.key_value * dim for dim in self.attention.head_dims}
            if not KEYS_OR_VALUES.search(self.name.rpartition(".")[2]):  # as wide, by chance, as the query heads are
                key_values -= {heads.query * dim for dim in (1, *self.attention.head_dims)}
        name = self.name if self.rule.blocks == 1 else f"each block of {self.name}"
        return deal(width, self.tensor.size, name, heads=heads, key_values=key_values, unit=unit or self.unit)

    def share(
        self, shape: tuple[int, ...], dim: int, *, parts: int = 1, unit: int | None = None, multiple: int = 1
    ) -> Shard:
        """Return this rank's shard of a tensor of `shape`, whose `dim` holds `parts` parts side by side: see
        `share_of`."""
        if shape[dim] % parts:
            raise UserError(f"the {shape[dim]} entries of {self.name} are not {parts} equal parts: correct the plan")
        stretches = self.deal(shape[dim] // parts, unit=unit)
        return share_of(shape, dim, self.tensor.rank, stretches=stretches, parts=parts, multiple=multiple)

    def widths(self, width: int) -> list[int]:
        """How many of `width` values each rank has; UserError where ranks have the same ones."""
        stretches = self.deal(width)
        if len(set(stretches)) < len(stretches):
            raise UserError(
                f"{self.name} has fewer key/value heads than tensor_parallel.autotp_size {self.tensor.size}, and they "
                f"cannot be shared by ranks: use at most {len(set(stretches))}"
            )
        return [stop - start for start, stop in stretches]


def style_error(target: PlanTarget, wanted: str) -> UserError:
    """Return the error for a style that is for `wanted` and stands at something else."""
    return UserError(
        f"the tensor-parallel style {target.rule.style} is for {wanted}, but {target.name} is a "
        f"{type(target.module).__name__}: set tensor_parallel.autotp_size to 1, or correct the plan"
    )
