"""Tiles of tokens change no number, and hold no more than a tile of what is inside."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harness.dry_run.ledger import Ledger
from harness.parallel.tiles import LossTiles, tile_block, tiles
from harness.topology.layout import Layout

WIDTH, INSIDE, VOCABULARY, TILE = 8, 256, 512, 16


class Block(nn.Module):
    """A feed-forward block that adds a second tensor, as some families' do, and gives a flat one too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(WIDTH, INSIDE), nn.Linear(INSIDE, WIDTH)

    def forward(self, hidden: Tensor, residual: Tensor, *, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        inside = torch.tanh(self.up(hidden))
        return residual + scale * self.down(inside), inside.view(-1, INSIDE)[:, :3].clone()


def peak_of(run) -> int:
    """The most bytes that are there at once beside those before."""
    with Ledger(Layout(), 0) as ledger:
        ledger.begin_step()
        run()
        return ledger.peak


def test_tiles_cover_all_tokens_once() -> None:
    assert list(tiles(10, 4)) == [(0, 4), (4, 8), (8, 10)]
    assert list(tiles(4, 4)) == [(0, 4)]
    assert list(tiles(0, 4)) == [(0, 0)]


@pytest.mark.parametrize("length", [1, TILE, 3 * TILE + 5])
def test_a_block_in_tiles_gives_the_same(length: int) -> None:
    whole, tiled = Block(), Block()
    tile_block(tiled, TILE)
    found = []
    for block in (whole, tiled):
        inputs = [torch.linspace(-1, 1, 2 * length * WIDTH).view(2, length, WIDTH).requires_grad_() for _ in range(2)]
        out, flat = block(*inputs, scale=0.5)
        (out.square().sum() + flat.sum()).backward()
        found.append([out, flat, *(x.grad for x in inputs), *(p.grad for p in block.parameters())])
    for a, b in zip(*found, strict=True):
        assert a is not None and b is not None
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)  # sums over tokens in another order


def block_peak(length: int, tile: int) -> int:
    """Of two recomputed blocks, forward and backward."""
    blocks = [Block(), Block()]
    for block in blocks:
        tile_block(block, tile)

    def run() -> None:
        hidden = torch.zeros(1, length, WIDTH, requires_grad=True)
        for block in blocks:
            hidden = checkpoint(lambda x, block=block: block(x, x)[0], hidden, use_reentrant=False)
        hidden.sum().backward()

    return peak_of(run)


def test_the_inside_of_a_block_is_there_for_a_tile_alone() -> None:
    short, long = (block_peak(length, TILE) for length in (32 * TILE, 64 * TILE))
    whole = block_peak(64 * TILE, 2**20) - block_peak(32 * TILE, 2**20)
    assert long - short < whole / 8, "it grows by hidden states alone"


def loss_peak(length: int, tile: int) -> int:
    head, norm = nn.Linear(WIDTH, VOCABULARY), nn.LayerNorm(WIDTH)
    loss = LossTiles(tile, lambda logits, _start, _stop: logits.logsumexp(-1).sum())

    def run() -> None:
        hidden = torch.zeros(1, length, WIDTH, requires_grad=True)
        loss.sum(hidden, lambda part: head(norm(part))).backward()

    return peak_of(run)


def test_logits_are_there_for_a_tile_alone() -> None:
    short, long = (loss_peak(length, TILE) for length in (32 * TILE, 64 * TILE))
    whole = loss_peak(64 * TILE, 2**20) - loss_peak(32 * TILE, 2**20)
    assert long - short < whole / 8, "it grows by hidden states alone"
