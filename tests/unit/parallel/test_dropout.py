"""Random numbers in layers depend on the sample, not on the layout."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harness.parallel.comm import TensorParallel
from harness.parallel.dropout import RngKeys, RngMode, ShapeRecorder, expect_shapes, rng_of_layer, separate_rng
from harness.parallel.generators import own_generators, seed_of

CPU = torch.device("cpu")
SAMPLES, HEADS, LENGTH = 8, 4, 6


def keys(micro_batch: int = 2, data: tuple[int, int] = (0, 1), tensor: TensorParallel | None = None) -> RngKeys:
    rank, size = data
    tensor = tensor or TensorParallel()
    return RngKeys(seed=7, micro_batch=micro_batch, batch_rank=rank, batch_ranks=size, tensor=tensor, device=CPU)


def dropout(rows: int) -> Tensor:
    return F.dropout(torch.ones(rows, HEADS, LENGTH), 0.5)


def flattened(rows: int) -> Tensor:
    return nn.Dropout(0.5)(torch.ones(rows * HEADS, LENGTH))


def jitter(rows: int) -> Tensor:
    return torch.ones(rows, LENGTH) * torch.empty(rows, LENGTH).uniform_(0.9, 1.1)


def attention(rows: int) -> Tensor:
    x = torch.linspace(-1, 1, HEADS * LENGTH * 4).view(1, HEADS, LENGTH, 4).expand(rows, -1, -1, -1)
    return F.scaled_dot_product_attention(x, x, x, dropout_p=0.5, is_causal=True)


def like(rows: int) -> Tensor:
    return torch.rand_like(torch.ones(rows, LENGTH)) + torch.randn_like(torch.ones(rows, LENGTH))


DRAWS = [dropout, flattened, jitter, attention, like]


def drawn(draw: Callable[[int], Tensor], micro_batch: int, batch_ranks: int, layer: int = 1) -> Tensor:
    """What the samples of one step draw, in their order, dealt out to data-parallel ranks as the stream does."""
    parts: dict[int, Tensor] = {}
    for rank in range(batch_ranks):
        source = keys(micro_batch, (rank, batch_ranks))
        source.begin_step(40)
        for number in range(SAMPLES // micro_batch // batch_ranks):
            with source.next().layer(layer):
                draw(micro_batch)
                parts[number * batch_ranks + rank] = draw(micro_batch)
    return torch.cat([parts[index] for index in sorted(parts)])


@pytest.mark.parametrize("draw", DRAWS, ids=lambda draw: draw.__name__)
def test_a_sample_draws_the_same_in_every_micro_batch_and_on_every_data_rank(draw: Any) -> None:
    one = drawn(draw, 8, 1)
    assert len(set(map(repr, one.view(SAMPLES, -1).tolist()))) == SAMPLES, "samples draw alike"
    for micro_batch, batch_ranks in ((4, 1), (2, 2), (1, 1), (1, 4)):
        assert torch.equal(drawn(draw, micro_batch, batch_ranks), one), (micro_batch, batch_ranks)
    assert not torch.equal(drawn(draw, 8, 1, layer=2), one)


def test_draws_differ_between_steps_calls_and_seeds_and_drop_the_right_share() -> None:
    source = keys(4)
    masks = []
    for consumed in (0, 4):
        source.begin_step(consumed)
        with source.next().layer(0):
            masks += [F.dropout(torch.ones(4, 100, 100), 0.3) for _ in range(2)]
    for index, mask in enumerate(masks):
        assert (mask == 0).float().mean().item() == pytest.approx(0.3, abs=0.01)
        assert mask.mean().item() == pytest.approx(1.0, abs=0.01)
        for other in masks[:index]:
            assert ((mask == 0) & (other == 0)).float().mean().item() == pytest.approx(0.09, abs=0.01)
    assert seed_of(1, "a") != seed_of(2, "a") != seed_of(1, "b")


def test_a_rank_drops_its_part_of_what_the_whole_layer_drops() -> None:
    def layer(heads: int, width: int) -> list[Tensor]:
        whole = F.dropout(torch.ones(2, LENGTH, 16), 0.5)
        flat = torch.ones(2 * heads, LENGTH)
        return [
            whole,
            F.dropout(torch.ones(2, heads, LENGTH), 0.5),
            nn.Dropout(0.5)(torch.ones(2, width)),
            jittered(flat),
        ]

    def jittered(x: Tensor) -> Tensor:
        return x * torch.empty_like(x).exponential_()

    with ShapeRecorder() as uncut:
        layer(HEADS, 16)
    with keys().next().layer(3):
        whole = layer(HEADS, 16)
    parts = []
    for rank in range(2):
        with keys(tensor=TensorParallel(rank=rank, size=2)).next().layer(3):
            expect_shapes(lambda: uncut.shapes)
            parts.append(layer(HEADS // 2, 8))
    assert torch.equal(parts[0][0], whole[0]) and torch.equal(parts[1][0], whole[0])
    for index in (1, 2):
        assert torch.equal(torch.cat([part[index] for part in parts], dim=1), whole[index])
    heads = torch.cat([part[3].view(2, 2, LENGTH) for part in parts], dim=1)
    assert torch.equal(heads, whole[3].view(2, HEADS, LENGTH))


def test_unequal_shares_are_parts_of_the_whole() -> None:
    """7 heads of 3 entries on two ranks, among widths that are shared otherwise."""
    with keys().next().layer(0):
        whole = F.dropout(torch.ones(2, 7, 50), 0.5)
    parts = []
    for rank in range(2):
        with keys(tensor=TensorParallel(rank=rank, size=2)).next().layer(0):
            expect_shapes(lambda: [torch.Size((2, 7, 50))], [(3, 2), (12, 9)])
            parts.append(F.dropout(torch.ones(2, 4 - rank, 50), 0.5))
    assert torch.equal(torch.cat(parts, dim=1), whole)


def test_unequal_shares_that_are_not_known_draw_apart() -> None:
    masks = []
    for rank in range(2):
        with keys(tensor=TensorParallel(rank=rank, size=2)).next().layer(0):
            expect_shapes(lambda: [torch.Size((2, 7, 50))])
            masks.append(F.dropout(torch.ones(2, 4 - rank, 50), 0.5))
    assert not torch.equal(masks[0][:, :3], masks[1])


class KeepAll(RngMode):
    """Drops nothing."""

    def fill(self, out: Tensor, method: str, *args: Any, **options: Any) -> Tensor:
        return out.zero_()

    def seed_kernel(self, shape: torch.Size, device: torch.device) -> None:
        pass


@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True}, {"attn_mask": "bool"}, {"attn_mask": "float", "scale": 0.3}]
)
def test_attention_with_dropout_is_torchs_but_for_the_mask(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, heads, LENGTH, 8) for heads in (4, 2, 2))
    masks = {"bool": torch.ones(LENGTH, LENGTH).tril().bool(), "float": torch.randn(2, 1, LENGTH, LENGTH)}
    if "attn_mask" in options:
        options = {**options, "attn_mask": masks[options["attn_mask"]]}
    wanted = F.scaled_dot_product_attention(query, key, value, enable_gqa=True, **options)
    with KeepAll():
        got = F.scaled_dot_product_attention(query, key, value, dropout_p=0.5, enable_gqa=True, **options)
    torch.testing.assert_close(got * 0.5, wanted)


def test_a_layer_that_runs_again_draws_the_same_and_leaves_no_trace() -> None:
    def noisy(x: Tensor) -> Tensor:
        return F.dropout(x, 0.5) * torch.rand(()) * np.random.rand() * random.random()

    def run(x: Tensor) -> Tensor:
        with keys().next().layer(0):
            return noisy(noisy(x))

    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    x = torch.ones(2, 100, requires_grad=True)
    first, again = run(x), checkpoint(run, x, use_reentrant=False)
    assert torch.equal(first, again)
    (plain,), (recomputed,) = (torch.autograd.grad(y.sum(), x) for y in (first, again))
    assert torch.equal(plain, recomputed)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before[1:]


def test_what_is_computed_besides_a_layer_does_not_change_its_draws() -> None:
    def run(besides: bool) -> list[Tensor]:
        with keys().next().layer(5):
            first = dropout(2)
            if besides:
                with separate_rng(0):
                    dropout(2)
            with rng_of_layer(0):
                outer = dropout(2)
            return [first, outer, dropout(2)]

    assert all(map(torch.equal, run(True), run(False)))
    with keys().next().layer(0):
        assert torch.equal(dropout(2), run(False)[1])


def test_nothing_is_drawn_where_nothing_is_dropped_and_no_tokens_come() -> None:
    with ShapeRecorder() as seen:
        (
            F.dropout(torch.ones(3), 0.0),
            F.dropout(torch.ones(3), 0.5, training=False),
            nn.Dropout(0.5).eval()(torch.ones(3)),
        )
    assert not seen.shapes
    with keys().next().layer(0):
        assert F.dropout(torch.ones(0, 4), 0.5).shape == (0, 4)
        x = torch.ones(4, 4)
        assert F.dropout(x, 0.5, inplace=True) is x and F.dropout(torch.ones(3), 1.0).eq(0).all()
        generator = torch.Generator().manual_seed(3)
        assert torch.equal(
            torch.empty(3).uniform_(generator=generator), torch.rand(3, generator=generator.manual_seed(3))
        )


def test_own_generators_put_everything_back_after_an_error() -> None:
    state = torch.get_rng_state()
    with pytest.raises(ValueError), own_generators(3):
        torch.rand(3)
        raise ValueError
    assert torch.equal(torch.get_rng_state(), state)


def test_a_kernel_that_draws_by_itself_is_seeded_by_the_part_that_it_computes() -> None:
    """The meta device stands for a GPU: what would seed its kernel seeds the CPU's generator."""

    def seeded(rank: int, heads: int) -> float:
        x = torch.empty(2, heads, LENGTH, 4, device="meta")
        with keys(tensor=TensorParallel(rank=rank, size=2)).next().layer(0):
            expect_shapes(lambda: [torch.Size((2, HEADS, LENGTH, LENGTH))])
            F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
            return torch.rand(()).item()

    assert seeded(0, HEADS // 2) == seeded(0, HEADS // 2) != seeded(1, HEADS // 2)
    assert seeded(0, HEADS) == seeded(1, HEADS)
