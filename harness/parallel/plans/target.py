"""The argument of the style functions: a module or parameter of a model, and the rule of the plan for it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import nn
from transformers import PretrainedConfig

from harness.config.model.sharding import Heads, Range
from harness.errors import UserError
from harness.parallel.comm import TensorParallel
from harness.parallel.plans.heads import Attention, blocks_of, deal
from harness.parallel.plans.plan import PlanRule
from harness.parallel.tensor.shard import Shard, share_of
from harness.parallel.token_exchange import NO_NEIGHBOURS, Neighbours

KEYS_OR_VALUES = re.compile(r"(^|_)w?(k|v|kv|keys?|values?)(_|$)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class PlanTarget:
    """A module or parameter that a rule of the plan names.

    Attributes:
        name: its full name.
        module: the module, or, if the rule names a parameter, its owner.
        owner: the module that owns it.
        attention: the attention that it belongs to, or None.
        tensor: this rank's place in the tensor-parallel group.
        local_output: keep only this rank's shard of an output that the style would gather.
        neighbours: the data-parallel ranks that hold other experts.
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
        """The rule's number of consecutive outputs that must stay together."""
        return 1 if self.rule.unit is None else int(getattr(self.owner, self.rule.unit))

    @property
    def heads(self) -> Heads | None:
        """The heads to split: all heads of the attention, or of each block. Raises UserError for unequal blocks."""
        if self.attention is None:
            return None
        return blocks_of(self.attention.heads, self.rule.blocks, self.name)

    def deal(self, width: int, *, unit: int | None = None) -> list[Range]:
        """Return each rank's range of `width` entries. Raises UserError if a rank would have none."""
        heads = self.heads
        key_values = set()
        if heads is not None and self.attention is not None and self.attention.inside:
            key_values = {heads.key_value * dim for dim in self.attention.head_dims}
            # A query projection may happen to be as wide as the key/value heads: its name decides.
            if not KEYS_OR_VALUES.search(self.name.rpartition(".")[2]):
                key_values -= {heads.query * dim for dim in (1, *self.attention.head_dims)}
        name = self.name if self.rule.blocks == 1 else f"each block of {self.name}"
        return deal(width, self.tensor.size, name, heads=heads, key_values=key_values, unit=unit or self.unit)

    def share(
        self, shape: tuple[int, ...], dim: int, *, parts: int = 1, unit: int | None = None, multiple: int = 1
    ) -> Shard:
        """Return this rank's shard of a tensor of `shape` whose `dim` holds `parts` parts side by side; see `share_of`.

        Raises UserError if the parts are not equal or a rank would have nothing.
        """
        if shape[dim] % parts:
            raise UserError(f"the {shape[dim]} entries of {self.name} are not {parts} equal parts: correct the plan")
        ranges = self.deal(shape[dim] // parts, unit=unit)
        return share_of(shape, dim, self.tensor.rank, ranges=ranges, parts=parts, multiple=multiple)

    def widths(self, width: int) -> list[int]:
        """Return each rank's number of `width` values. Raises UserError if ranks would share some."""
        ranges = self.deal(width)
        if len(set(ranges)) < len(ranges):
            raise UserError(
                f"{self.name} has fewer key/value heads than tensor_parallel.autotp_size {self.tensor.size}, and they "
                f"cannot be shared by ranks: use at most {len(set(ranges))}"
            )
        return [stop - start for start, stop in ranges]


def style_error(target: PlanTarget, wanted: str) -> UserError:
    """Return the error for a style that fits only `wanted`, but is given for something else."""
    return UserError(
        f"the tensor-parallel style {target.rule.style} is for {wanted}, but {target.name} is a "
        f"{type(target.module).__name__}: set tensor_parallel.autotp_size to 1, or correct the plan"
    )
