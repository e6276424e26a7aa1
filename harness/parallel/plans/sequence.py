"""Sequence parallelism: run the layer between its blocks on a shard of the sequence.

A block is a module of the layer that needs all tokens: its attention, its feed-forward network. So the hidden state is
gathered before it. Norms, dropout and activations between the blocks compute each token alone, so they run on a shard.
Any other module with parameters of its own counts as a block and computes all tokens on every rank.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map

from harness.deepspeed.zero3_parameters import unpartitioned_shape
from harness.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear, SharedColumnLinear
from harness.parallel.tensor.sequence import SequenceShare
from harness.parallel.tensor.shard import shard_of
from harness.parallel.values import Argument, Keyword, Positional

_COLUMNS = (ColumnParallelLinear, SharedColumnLinear)


def share_sequence(layer: Any, group: dist.ProcessGroup, whole: Collection[nn.Module] = ()) -> SequenceShare:
    """Make `layer` run on a shard of the sequence; return the record that each forward must enter (`forward_of`).

    Args:
        whole: blocks to gather before and split after, even if their last layer could reduce-scatter.
    """
    share = SequenceShare(group)
    layer.works_on_share = True  # see `harness.parallel.tensor.gradient_analysis`
    for block in _blocks(layer):
        row = None if block in whole else _last_row(block)
        if row is not None:
            row.sequence = share
        # A bare row-parallel layer takes columns of all tokens from the block before: there is nothing to gather.
        if block is row:
            continue
        _gather_inputs(block, share, first_alone=row is not None)
        if not _gives_columns(block):
            _split_outputs(block, share)
    return share


def _blocks(layer: nn.Module) -> Iterator[nn.Module]:
    for child in layer.children():
        # A list is never called itself, so a hook on it would never run.
        if type(child) in (nn.ModuleList, nn.ModuleDict):
            yield from _blocks(child)
        elif any(_is_matrix(param) or shard_of(param) is not None for param in child.parameters()):
            yield child


def _last_row(block: nn.Module) -> RowParallelLinear | None:
    """Return the row-parallel layer that computes the output of `block`; None if it has none, several, or experts."""
    # Its all-reduce can become a reduce-scatter, so that what follows (a dropout, a residual) runs on a shard.
    rows = [module for module in block.modules() if isinstance(module, RowParallelLinear)]
    linears = [module for module in block.modules() if isinstance(module, (*_COLUMNS, RowParallelLinear))]
    known = {id(param) for linear in linears for param in linear.parameters(recurse=False)}
    # Sharded matrices outside linear layers, like fused experts, have a partial output that this layer does not sum.
    others = (param for param in block.parameters() if id(param) not in known)
    cut_otherwise = any(_is_matrix(param) and shard_of(param) is not None for param in others)
    return rows[0] if len(rows) == 1 and not cut_otherwise else None


def _gives_columns(block: nn.Module) -> bool:
    """Return whether `block` neither reduces nor gathers: it returns some columns of all tokens."""
    columns = [module for module in block.modules() if isinstance(module, _COLUMNS)]
    sums = any(isinstance(module, RowParallelLinear) for module in block.modules())
    return bool(columns) and not sums and not any(getattr(module, "gather_output", False) for module in columns)


def _is_matrix(parameter: nn.Parameter) -> bool:
    # A parameter partitioned by ZeRO-3 is empty and has one dimension.
    return len(unpartitioned_shape(parameter)) > 1


def _gather_inputs(block: nn.Module, share: SequenceShare, *, first_alone: bool) -> None:
    """Gather the hidden states in the inputs of `block`; with `first_alone`, only the first of them."""

    def before_forward(_module: nn.Module, args: Positional, kwargs: Keyword) -> tuple[Positional, Keyword]:
        given: dict[int | str, Argument] = dict(enumerate(args)) | {**kwargs}
        hidden = [place for place, value in given.items() if share.is_share(value)]
        # The others are residuals, which the block adds to its scattered output.
        for place in hidden[:1] if first_alone else hidden:
            given[place] = share.gather(given[place])
        return tuple(given[place] for place in range(len(args))), {name: given[name] for name in kwargs}

    block.register_forward_pre_hook(before_forward, with_kwargs=True)


def _split_outputs(block: nn.Module, share: SequenceShare) -> None:
    """Keep this rank's shard of the hidden states that `block` returns for all tokens."""

    def after_forward(_module: nn.Module, _args: object, output: object) -> object:
        return tree_map(lambda value: share.split(value) if share.is_whole(value) else value, output)

    block.register_forward_hook(after_forward)
