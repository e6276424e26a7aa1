"""The parts of a model that can compute a subset of the tokens at a time, and the interfaces to do so.

`harness/verify/token_split.py` finds the former by trial on a tiny copy; `harness/context_parallel/` runs them so.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from torch import nn

from harness.hf.forward.outer_forward import OuterForward
from harness.hf.layers.call import LayerInputs
from harness.parallel.context.sequence_shards import ContextParallel
from harness.parallel.tiles import LossTiles


class ShardedLayer(Protocol):
    """Runs a layer on this rank's shard of the tokens."""

    @property
    def gathered(self) -> Sequence[nn.Module]:
        """The blocks of the layer that need all tokens."""

    def gather_blocks(self) -> None:
        """Run the gathered blocks on all tokens. Call it last: its hooks need the inputs after all other hooks."""

    def forward_of(self, inputs: LayerInputs, batch: int, length: int) -> AbstractContextManager[LayerInputs]:
        """Return a context for the layer's forward; it yields `inputs`, of `length` tokens, cut to the shard."""


MakeShardedLayer: TypeAlias = Callable[[nn.Module, Collection[str], int, ContextParallel], ShardedLayer]
"""Arguments: the layer, the names of its blocks that need all tokens, its index, and the context-parallel group."""


class Tiling(Protocol):
    """Computes parts of a model for one tile of the tokens at a time."""

    def loss_tiles(self, outer: OuterForward, apart: TokenSplit, *, whole_logits: bool) -> LossTiles | None:
        """Return what computes the loss in tiles; None if it needs no tiles.

        `whole_logits`: whether the loss needs all logits. Raises UserError if tiles would change numbers.
        """

    def tile_block(self, block: nn.Module, tokens: int) -> None:
        """Make a module that computes each token alone process `tokens` tokens at a time."""

    def idle_tiles(self, apart: TokenSplit, layers: Sequence[nn.Module], attention: str | None) -> Iterator[str]:
        """Yield the keys of tile sizes that have no effect on `layers`, each with the reason, as a clause."""


@dataclass(frozen=True, kw_only=True)
class TokenSplitSupport:
    """Which parts of a model can compute a shard of the tokens.

    Attributes:
        gathered: kind of layer that can -> its blocks that need all tokens. A missing kind cannot.
        alone: kind of layer -> its blocks and norms that compute each token by itself, without attention.
        attending: the kinds of layers whose attention can compute some queries at a time.
        prologue: whether the modules before the layers can.
        obstacle: why the modules after the layers cannot, to follow the name of the model; "" if they can.
        whole: whether every rank computes all tokens in all layers, because the model passes on more than a hidden
            state.
        sharded_layers: returns what runs the layers on a shard; None if nothing was tried.
        tiling: computes the loss and blocks in tiles; None if nothing was tried.
    """

    gathered: Mapping[Hashable, frozenset[str]] = field(default_factory=dict)
    alone: Mapping[Hashable, frozenset[str]] = field(default_factory=dict)
    attending: frozenset[Hashable] = frozenset()
    prologue: bool = False
    obstacle: str = "was not tried on a tiny copy"
    whole: bool = False
    sharded_layers: Callable[[OuterForward], MakeShardedLayer] | None = None
    tiling: Tiling | None = None

    @property
    def epilogue(self) -> bool:
        """Whether the modules after the layers can compute a shard of the tokens."""
        return not self.obstacle

    def blocks_of(self, layer: nn.Module) -> frozenset[str] | None:
        """Return the blocks of a layer that need all tokens; None if the whole layer does."""
        # A kind that the trial has not seen is missing too: then all tokens are right for any layer.
        return None if self.whole else self.gathered.get(kind_of_layer(layer))

    def alone_in(self, layer: nn.Module) -> frozenset[str]:
        """Return the blocks and norms of a layer that compute each token by itself."""
        return self.alone.get(kind_of_layer(layer), frozenset())


@dataclass(frozen=True, kw_only=True)
class TokenSplit:
    """How this rank computes a subset of the tokens at a time.

    Attributes:
        plan: the parts of the model that support this.
        context: context-parallel group; None if its size is 1.
        loss_tile: number of tokens whose logits and loss are computed at a time; 0 for all.
        block_tile: number of tokens that feed-forward blocks and norms compute at a time; 0 for all.
        attention_tile: number of queries whose mask and attention are computed at a time, if masked; 0 for all.
    """

    plan: TokenSplitSupport = field(default_factory=TokenSplitSupport)
    context: ContextParallel | None = None
    loss_tile: int = 0
    block_tile: int = 0
    attention_tile: int = 0

    @property
    def is_any(self) -> bool:
        """Whether any part computes a subset of the tokens at a time."""
        return self.context is not None or bool(self.loss_tile or self.block_tile or self.attention_tile)


UNSPLIT = TokenSplit()
"""All tokens are computed together."""


def named_blocks(layer: nn.Module, least: int = 2, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost modules of a layer that hold parameters of at least `least` dimensions, with their names."""
    for name, child in layer.named_children():
        # A container is never called, so no hook on it would run.
        if type(child) in (nn.ModuleList, nn.ModuleDict):
            yield from named_blocks(child, least, f"{prefix}{name}.")
        elif any(param.dim() >= least for param in child.parameters()):
            yield f"{prefix}{name}", child


def kind_of_layer(layer: nn.Module) -> Hashable:
    """Return a key that is equal for a layer, with or without adapters, and the same layer of a tiny copy."""
    # Without shapes, which a tiny copy does not share. Adapters wrap a block, so the class inside decides.
    return type(layer).__name__, tuple(
        (name, type(getattr(block, "base_layer", block)).__name__) for name, block in named_blocks(layer)
    )
