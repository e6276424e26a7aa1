"""Tiles of tokens change no number, and hold no more than a tile of what is inside."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig

from harness.context_parallel.tiles import TiledLoss, tile_block, tiles
from harness.dry_run.ledger import Ledger
from harness.hf.causal import assemble
from harness.hf.context.plan import TokenSplit
from harness.hf.skeleton import ModelSource
from harness.parallel.comm import TensorParallel
from harness.parallel.pipeline.staged_module import build_layers
from harness.parallel.tensor.cross_entropy import vocab_parallel_cross_entropy
from harness.topology.layout import Layout
from harness.verify.token_split import token_split_support

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


def growth_of_peak(run: Callable[[Tensor, int], object], tile: int) -> int:
    """How many bytes more the peak of `run(hidden state, tile)` has with 64 tiles of tokens than with 32."""
    hidden = [torch.zeros(1, length * TILE, WIDTH, requires_grad=True) for length in (32, 64)]
    short, long = (peak_of(partial(run, each, tile)) for each in hidden)
    return long - short


def test_the_inside_of_a_block_is_there_for_a_tile_alone() -> None:
    def forward_and_backward(hidden: Tensor, tile: int) -> None:
        for block in (Block(), Block()):
            tile_block(block, tile)
            hidden = checkpoint(lambda x, block=block: block(x, x)[0], hidden, use_reentrant=False)
        hidden.sum().backward()

    whole = growth_of_peak(forward_and_backward, 2**20)
    assert growth_of_peak(forward_and_backward, TILE) < whole / 8, "it grows by hidden states alone"


def test_logits_are_there_for_a_tile_alone() -> None:
    head, norm = nn.Linear(WIDTH, VOCABULARY), nn.LayerNorm(WIDTH)

    def forward_and_backward(hidden: Tensor, tile: int) -> None:
        loss = TiledLoss(tile, lambda logits, _start, _stop: logits.logsumexp(-1).sum())
        loss.sum(hidden, lambda part: head(norm(part))).backward()

    whole = growth_of_peak(forward_and_backward, 2**20)
    assert growth_of_peak(forward_and_backward, TILE) < whole / 8, "it grows by hidden states alone"


def test_logits_are_computed_twice_and_let_go() -> None:
    """Once for the loss, once for its gradient: what the graph has saved is not looked at before."""
    calls, norm, head = [], nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
    labels = torch.arange(4 * TILE)[None]

    def logits_of(hidden: Tensor) -> Tensor:
        calls.append(hidden.shape[1])
        return head(norm(hidden))

    def loss_of(logits: Tensor, start: int, stop: int) -> Tensor:
        return vocab_parallel_cross_entropy(logits, labels[:, start:stop], None, VOCABULARY).sum()

    hidden = torch.randn(1, 4 * TILE, WIDTH, requires_grad=True)
    TiledLoss(TILE, loss_of).sum(hidden, logits_of).backward()
    assert calls == [TILE] * 8
    found, hidden.grad = hidden.grad, None
    torch.nn.functional.cross_entropy(head(norm(hidden))[0], labels[0], reduction="sum").backward()
    torch.testing.assert_close(found, hidden.grad)


SMALL = LlamaConfig(
    hidden_size=64,
    intermediate_size=224,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    vocab_size=2048,
)
RUNGS = {  # hidden states of all tokens in bf16 that a step of `SMALL` adds to the peak, as counted
    "nothing": 136,
    "recomputed": 54,
    "loss": 35,
    "blocks": 10,
}


def step_peak(length: int, rung: str) -> int:
    """The peak of a forward and backward of `SMALL` in bf16, up to a rung of the ladder."""
    depth, tile = list(RUNGS).index(rung), 32
    apart = TokenSplit(plan=token_split_support(SMALL), loss_tile=tile * (depth > 1), block_tile=tile * (depth > 2))
    causal = assemble(
        ModelSource(config=SMALL, weights=None, name="small"),
        tensor=TensorParallel(),
        device=torch.device("cpu"),
        dtype=torch.bfloat16,
        seed=0,
        finish=lambda _: None,
        apart=apart,
    )
    ids = torch.zeros(1, length, dtype=torch.long)

    def loss_of(logits: Tensor, start: int, stop: int) -> Tensor:
        return vocab_parallel_cross_entropy(logits, ids[:, start:stop], None, SMALL.vocab_size).sum()

    if causal.loss_tiles is not None:
        causal.loss_tiles.loss = loss_of
    calls = build_layers(causal.layers, 0, len(causal.layers), 0).calls

    def run() -> None:
        value = ids
        for layer in calls:
            recomputed = depth > 0 and getattr(layer, "recompute", False)
            value = checkpoint(layer, value, use_reentrant=False) if recomputed else layer(value)
        (value if value.dim() == 0 else loss_of(value, 0, length)).backward()

    return peak_of(run)


@pytest.mark.parametrize(
    "rung", ["nothing", "loss", *(pytest.param(rung, marks=pytest.mark.thorough) for rung in ("recomputed", "blocks"))]
)
def test_each_step_of_the_ladder_has_its_peak(rung: str) -> None:
    length = 512
    added = (step_peak(2 * length, rung) - step_peak(length, rung)) / (length * SMALL.hidden_size * 2)
    assert added == pytest.approx(RUNGS[rung], rel=0.05)
