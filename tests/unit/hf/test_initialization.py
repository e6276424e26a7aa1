"""Initial values: drawn in pieces, the same whichever part is asked for, as the family's own code draws them."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import PreTrainedModel

from harness.hf.skeleton import build_skeleton
from harness.hf.weights import initialization, layer_weights
from harness.hf.weights.initialization import _pieces, changes_of
from harness.hf.weights.layer_weights import Initialiser, fill
from harness.parallel.tensor.shard import mark, share_of
from harness.parallel.zero import Zero3Partition
from tests.support.models import config

SMALL = 1 << 12  # bytes of a piece: less than a row of experts, more than a vector
ON_CPU = torch.device("cpu")


@given(shape=st.lists(st.integers(1, 7), max_size=4).map(tuple), most=st.integers(1, 40))
def test_pieces_are_runs_of_memory_that_cover_a_tensor_once(shape: tuple[int, ...], most: int) -> None:
    numbers = torch.arange(prod(shape)).view(shape)
    seen = [numbers[tuple(slice(*span) for span in box)].flatten().tolist() for box in _pieces(shape, most)]
    assert all(len(piece) <= most for piece in seen)
    assert [number for piece in seen for number in piece] == list(range(prod(shape)))


def in_small_pieces(monkeypatch: pytest.MonkeyPatch, family: str, **changes: Any) -> tuple[PreTrainedModel, Any]:
    monkeypatch.setattr(layer_weights, "PIECE_BYTES", SMALL)
    monkeypatch.setattr(initialization, "PIECE_BYTES", SMALL)
    model = build_skeleton(config(family, **changes))
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return model, Initialiser(model=model, seed=3).values(model, names, ON_CPU)


def read(lazy: Tensor) -> Tensor:
    return torch.full(lazy.shape, torch.nan).copy_(lazy)


@torch.no_grad()
def test_every_part_of_a_tensor_has_the_same_values(monkeypatch: pytest.MonkeyPatch) -> None:
    model, values = in_small_pieces(monkeypatch, "mixtral", num_local_experts=4)
    large = [name for name, parameter in model.named_parameters() if parameter.nbytes > 3 * SMALL]
    assert any(values[name].dim() == 3 for name in large)
    for name in large:
        whole = read(values[name])
        assert not whole.isnan().any()
        for dim, rank in ((dim, rank) for dim in range(whole.dim()) for rank in range(2)):
            shard = share_of(tuple(whole.shape), dim, rank, 2, parts=2 if dim else 1)
            local = mark(nn.Parameter(torch.empty(shard.local_shape)), shard)
            fill(local, values[name], None)
            assert torch.equal(local, shard.take(whole)), (name, dim)
        spread = nn.Parameter(torch.full(whole.shape, torch.nan))
        for index in range(3):
            fill(spread, values[name], Zero3Partition(index=index, count=3))
        assert torch.equal(spread, whole), name


@torch.no_grad()
def test_pieces_and_tensors_have_random_numbers_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    model, values = in_small_pieces(monkeypatch, "mixtral", num_local_experts=4)
    drawn = torch.cat([read(values[n]).flatten() for n, p in model.named_parameters() if p.dim() > 1])
    assert len(drawn.unique()) > 0.95 * len(drawn)  # of 32-bit numbers some are equal by chance
    assert drawn.std().item() == pytest.approx(0.02, rel=0.02) and abs(drawn.mean().item()) < 0.0005


@torch.no_grad()
def test_large_tensors_are_drawn_as_the_family_draws_them(monkeypatch: pytest.MonkeyPatch) -> None:
    _, values = in_small_pieces(monkeypatch, "gpt2", num_hidden_layers=8, hidden_size=256)
    attention = "transformer.h.0.attn."
    assert read(values[attention + "c_proj.weight"]).std().item() == pytest.approx(0.02 / 16**0.5, rel=0.05)
    assert read(values[attention + "c_attn.weight"]).std().item() == pytest.approx(0.02, rel=0.05)
    _, values = in_small_pieces(monkeypatch, "llama", pad_token_id=200)
    embedding = read(values["model.embed_tokens.weight"])
    assert not embedding[200].any() and embedding[199].all() and embedding[201].all()


def initialised(fill_it: Any) -> Any:
    return changes_of(torch.empty(300, 40, device="meta"), fill_it)


def test_what_can_be_done_in_pieces_is_recorded() -> None:
    changes = initialised(lambda p: (nn.init.trunc_normal_(p, std=3.0, a=-1.0, b=1.0), nn.init.zeros_(p[7])))
    assert [(change.start, change.stop) for change in changes] == [(0, 12_000), (280, 320)]
    piece = torch.full((1000,), torch.nan)
    for change in changes:
        change.apply(piece, 100)
    assert piece.min() >= -1 and piece.max() <= 1 and not piece[180:220].any() and piece[220:].std() > 0.5
    bound = (6 / 340) ** 0.5  # Xavier: by the widths of the whole matrix
    (change,) = initialised(nn.init.xavier_uniform_)
    change.apply(piece, 100)
    assert 0.98 * bound < piece.abs().max() <= bound


@pytest.mark.parametrize(
    "fill_it",
    [
        nn.init.orthogonal_,
        lambda p: (nn.init.normal_(p), nn.init.sparse_(p, 0.5)),
        lambda p: p[:, 3].zero_(),
        lambda p: p.copy_(torch.ones(300, 1).expand(300, 40)),
        lambda p: p.normal_().mul_(p.sum()),
        lambda p: None,
    ],
)
def test_what_cannot_is_not(fill_it: Any) -> None:
    assert initialised(fill_it) is None
