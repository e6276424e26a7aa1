"""Compute parts of a model for one *tile* of the tokens at a time, to save activation memory.

This is exact for parts that compute each token alone: the output layer with the loss, feed-forward blocks, norms. Only
the input and the output of a tile are kept, and the backward recomputes the tile (Bekman et al. 2025, Arctic Long
Sequence Training, arXiv 2506.13996, section 3.1). So logits, or the activations inside a feed-forward block, never
exist for more than one tile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from harness.errors import UserError
from harness.hf.context.plan import TokenSplit, kind_of_layer
from harness.hf.forward.outer_forward import OuterForward
from harness.parallel.dropout import has_dropout
from harness.parallel.tiles import OfTile
from harness.parallel.values import Argument


def tiles(length: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield start and stop of each tile of at most `size` tokens; for a length of 0, one empty tile."""
    yield from ((start, min(start + size, length)) for start in range(0, max(length, 1), size))


@dataclass
class TiledLoss:
    """A loss in tiles of `tokens` tokens."""

    tokens: int
    loss: OfTile | None = None

    def sum(self, hidden: Tensor, logits_of: Callable[[Tensor], Tensor]) -> Tensor:
        loss = self.loss
        assert loss is not None
        total = torch.zeros((), device=hidden.device)
        # The backward of one `split` joins the gradients of all tiles. A slice per tile would allocate a gradient of
        # the length of `hidden` for each.
        for (start, stop), tile in zip(tiles(hidden.shape[1], self.tokens), hidden.split(self.tokens, 1), strict=True):
            total = total + computed_again(partial(_loss_of, loss, logits_of, start, stop), tile)
        return total


def _loss_of(loss: OfTile, logits_of: Callable[[Tensor], Tensor], start: int, stop: int, hidden: Tensor) -> Tensor:
    return loss(logits_of(hidden.contiguous()), start, stop)


def loss_tiles(outer: OuterForward, apart: TokenSplit, *, whole_logits: bool) -> TiledLoss | None:
    """Return the switch by which the epilogue computes the loss in tiles; None if it always returns logits.

    Raises UserError for tiles of the loss, of blocks or of attention that would change numbers.
    """
    if outer.uses_rng and (apart.attention_tile or apart.block_tile):
        drawing = "attention" if apart.attention_tile else "feed_forward"
        raise UserError(
            f"tiling.{drawing}: the model uses dropout or other random numbers, which tiles would change; set its "
            "dropout rates and --neftune_noise_alpha to 0, or remove it"
        )
    if not apart.loss_tile:
        return None
    if whole_logits:
        raise UserError(
            "tiling.loss does not work with your own loss or label smoothing, which need all logits: remove tiling.loss"
        )
    if apart.plan.obstacle:
        raise UserError(
            f"tiling.loss: {outer.described} {apart.plan.obstacle}, so the loss cannot be computed in tiles: remove "
            "tiling.loss"
        )
    if any(map(has_dropout, outer.epilogue.values())):
        raise UserError("tiling.loss: the model uses dropout after its last layer, which tiles would change: remove it")
    return TiledLoss(apart.loss_tile)


def idle_tiles(apart: TokenSplit, layers: Sequence[nn.Module], attention: str | None) -> Iterator[str]:
    """Yield the keys of tile sizes that have no effect on `layers`, each with the reason, as a clause.

    Args:
        attention: the model's attention implementation.
    """
    plan = apart.plan
    if apart.block_tile and not any(map(plan.alone_in, layers)):
        yield "tiling.feed_forward has no effect: no block of its layers computes each token by itself"
    if not apart.attention_tile:
        return
    if attention not in (None, "sdpa", "eager"):
        yield f"tiling.attention has no effect: {attention} builds no mask of all pairs of tokens"
    elif plan.whole:
        yield "tiling.attention has no effect: its layers pass on more than a hidden state and build whole masks"
    elif not any(kind_of_layer(layer) in plan.attending for layer in layers):
        yield "tiling.attention has no effect: its layers do not use transformers' attention interface"


def tile_block(block: nn.Module, tokens: int) -> None:
    """Make a module that computes each token alone process `tokens` tokens at a time.

    Arguments [batch, sequence, ...] are cut; any other argument is passed unchanged to every tile. Outputs [batch,
    tile, ...] or [batch * tile, size] are concatenated; for any other output, the first tile's is returned.
    """
    whole = block.forward

    def forward(*args: Argument, **kwargs: Argument) -> Argument:
        given, spec = tree_flatten((args, kwargs))
        hidden = next(value for value in given if isinstance(value, Tensor))
        batch, length = hidden.shape[:2]
        if hidden.dim() < 3 or length <= tokens:
            return whole(*args, **kwargs)
        cut = [isinstance(x, Tensor) and x.dim() > 2 and tuple(x.shape[:2]) == (batch, length) for x in given]
        count = -(-length // tokens)
        columns = (x.split(tokens, 1) if rows else [x] * count for x, rows in zip(given, cut, strict=True))
        # Pass tensors as arguments: tensors in a closure would stay in memory until the backward.
        of_tile = partial(_of_tile, whole, spec, cut)
        return _joined([computed_again(of_tile, *tile) for tile in zip(*columns, strict=True)], batch)

    block.forward = forward


def _of_tile(whole: Callable[..., Argument], spec: TreeSpec, cut: list[bool], *given: Argument) -> Argument:
    """Call `whole` with the arguments of a tile; `cut` says which of them are slices."""
    tile = [value.contiguous() if rows else value for value, rows in zip(given, cut, strict=True)]
    args, kwargs = tree_unflatten(tile, spec)
    return whole(*args, **kwargs)


def computed_again(run: Callable[..., Argument], *given: Argument) -> Argument:
    """Return `run(*given)`; keep only `given` for the backward, which recomputes the rest.

    `early_stop` is off, because torch would end the recomputation with an exception, whose frames hold tensors.
    """
    if not torch.is_grad_enabled():
        return run(*given)
    # Models with dropout are not tiled, so there is no RNG state to restore, which on a GPU would make the host wait.
    return checkpoint(run, *given, use_reentrant=False, preserve_rng_state=False, early_stop=False)


def _joined(outputs: list[Argument], batch: int) -> Argument:
    """Join the outputs of tiles; tensors are concatenated along the tokens."""
    leaves = [tree_flatten(output) for output in outputs]
    columns = zip(*(flat for flat, _ in leaves), strict=True)
    return tree_unflatten([_rows(list(column), batch) for column in columns], leaves[0][1])


def _rows(parts: list[Argument], batch: int) -> Argument:
    if not isinstance(parts[0], Tensor):
        return parts[0]
    if parts[0].dim() > 2:
        return torch.cat(parts, dim=1)
    return torch.cat([part.unflatten(0, (batch, -1)) for part in parts], dim=1).flatten(0, 1)
