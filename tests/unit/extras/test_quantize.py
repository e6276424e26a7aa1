"""Numbers in 8 or 4 bits: how far they are off, what comes back exactly, and what is not finite."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.extras.compression.quantization import BLOCK, dequantize, quantize, row_bytes

BITS = pytest.mark.parametrize("bits", [8, 4])


def back(blocks: torch.Tensor, bits: int) -> torch.Tensor:
    return dequantize(quantize(blocks, bits), bits)


@given(st.sampled_from([8, 4]), st.integers(1, 4), st.floats(-30, 30), st.integers(0, 2**31))
@settings(max_examples=12)
def test_a_number_is_off_by_half_a_step_at_most(bits: int, count: int, magnitude: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randn(count, BLOCK, generator=generator) * 10**magnitude
    rows = quantize(blocks, bits)
    assert rows.shape == (count, row_bytes(bits)) and rows.dtype == torch.uint8
    step = blocks.abs().amax(dim=1, keepdim=True) / (2 ** (bits - 1) - 1)
    assert bool(((dequantize(rows, bits) - blocks).abs() <= step * 0.5001).all())


@BITS
def test_a_block_on_the_wire_is_its_numbers_and_four_bytes(bits: int) -> None:
    assert row_bytes(bits) == 4 + {8: 128, 4: 64}[bits]


@BITS
def test_every_whole_step_comes_back_exactly_with_its_sign_and_place(bits: int) -> None:
    most = 2 ** (bits - 1) - 1
    steps = torch.arange(BLOCK) % (2 * most + 1) - most
    steps[-1] = most  # so that a step is 1
    assert torch.equal(back(steps.float()[None], bits), steps.float()[None])
    assert torch.equal(back(steps.float()[None] * 0.25, bits), steps.float()[None] * 0.25)


@BITS
def test_what_was_rounded_is_not_rounded_again(bits: int) -> None:
    once = back(torch.randn(3, BLOCK, generator=torch.Generator().manual_seed(1)), bits)
    assert torch.allclose(back(once, bits), once, rtol=1e-6, atol=0)


@BITS
def test_zeros_stay_zeros_and_blocks_do_not_touch_each_other(bits: int) -> None:
    blocks = torch.zeros(3, BLOCK)
    blocks[1, 5] = 1e30
    found = back(blocks, bits)
    assert torch.equal(found[0], blocks[0]) and torch.equal(found[2], blocks[2])
    assert found[1, 5] == pytest.approx(1e30) and found[1].count_nonzero() == 1


@BITS
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_a_block_with_a_number_that_is_not_finite_is_seen(bits: int, bad: float) -> None:
    blocks = torch.ones(2, BLOCK)
    blocks[0, 77] = bad
    found = back(blocks, bits)
    assert bool(found[0].isnan().all()) and torch.equal(found[1], blocks[1])


@BITS
@pytest.mark.parametrize("largest", [torch.finfo(torch.float32).tiny, 1e-45, 3.4e38])
def test_the_ends_of_float32_do_not_overflow(bits: int, largest: float) -> None:
    blocks = torch.full((1, BLOCK), largest)
    blocks[0, ::2] *= -1
    found = back(blocks, bits)
    assert bool(found.isfinite().all())
    assert bool((found.sign() * blocks.sign() >= 0).all())
