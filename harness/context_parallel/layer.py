"""A decoder layer that computes a shard of the tokens.

Its attention exchanges heads (`attention.py`). A *block* is a module of the layer that holds
matrices: its attention, its feed-forward network. Some blocks mix tokens in another way than transformers' attention
interface: by a recurrence, a convolution, or the model's own attention. Such a block is *gathered*: each rank gives it
all tokens, as one process would, and keeps the output of its own shard. That is exact, but on every rank the block
takes as much time and memory as in one process.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from harness.context_parallel.arguments import SplitArguments
from harness.context_parallel.attention import SharedAttention, whole_attention
from harness.hf.context.plan import MakeShardedLayer
from harness.hf.forward.outer_forward import OuterForward
from harness.hf.layers.call import LayerInputs
from harness.parallel.context.masks import MaskRows
from harness.parallel.context.sequence_shards import ContextParallel, TokenRows
from harness.parallel.values import Argument, Keyword, Positional


def sharded_layers(outer: OuterForward) -> MakeShardedLayer:
    """Return what makes the layers of a model run on a shard."""
    return partial(ContextParallelLayer, SplitArguments.of(outer))


class ContextParallelLayer:
    """Runs a layer on this rank's shard of the tokens.

    Args:
        split: cuts the layer's arguments.
        gathered: names of the blocks that need all tokens.
        index: index of the layer in the model.
    """

    def __init__(
        self, split: SplitArguments, layer: nn.Module, gathered: Collection[str], index: int, context: ContextParallel
    ) -> None:
        self._split = split
        self._index = index
        self._context = context
        self._whole: Mapping[int, Tensor] = {}
        self._rows = TokenRows(context=context, batch=0, length=0)
        self.gathered = [layer.get_submodule(name) for name in gathered]

    def gather_blocks(self) -> None:
        """Run the gathered blocks on all tokens. Call it last: its hooks need the inputs after all other hooks."""
        for block in self.gathered:
            block.register_forward_pre_hook(self._before, with_kwargs=True)
            # First of the block's hooks, as the others expect this rank's tokens; and also after an error, which would
            # otherwise leave attention without its exchange of heads.
            block.register_forward_hook(self._after, prepend=True, always_call=True)

    @contextmanager
    def forward_of(self, inputs: LayerInputs, batch: int, length: int) -> Iterator[LayerInputs]:
        """Yield `inputs`, which are for `length` tokens, cut to this rank's shard; attention exchanges heads."""
        own, whole = self._split.split(self._index, inputs, self._context, length)
        self._whole = whole
        self._rows = TokenRows(context=self._context, batch=batch, length=length)
        try:
            with SharedAttention(context=self._context, length=length, whole=whole).active():
                yield own
        finally:
            self._whole = {}

    def _before(self, _module: nn.Module, args: Positional, kwargs: Keyword) -> tuple[Positional, Keyword]:
        self._pause = whole_attention()
        self._pause.__enter__()
        given: tuple[Positional, Keyword] = tree_map_only((Tensor, MaskRows), self._join, (args, kwargs))
        return given

    def _join(self, given: Tensor | MaskRows) -> Tensor:
        if isinstance(given, MaskRows):
            return given.whole()
        return self._whole[id(given)] if id(given) in self._whole else self._rows.join(given)

    def _after(self, _module: nn.Module, _args: object, output: Argument) -> Argument:
        self._pause.__exit__(None, None, None)
        return tree_map_only(Tensor, self._rows.own, output)
