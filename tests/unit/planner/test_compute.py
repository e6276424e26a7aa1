"""Matrix products: tiles, waves, short inner dimensions and memory, worked by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.planner.hardware import load_hardware, names
from harness.planner.layer_time import START_UP, UNALIGNED_RATE, Seconds, matmul, product
from tests.unit.planner.devices import device

HARDWARE = device()  # one processor at 1,000 operations a second


def full(rows: int, inner: int, columns: int) -> float:
    """Seconds of the operations alone, where the start and the end of each tile are counted."""
    return 2 * rows * (inner + START_UP) * columns / 1000


@pytest.mark.parametrize(
    ("rows", "columns", "waste"),
    [
        pytest.param(256, 128, 1, id="one large tile"),
        pytest.param(512, 384, 1, id="whole large tiles"),
        pytest.param(64, 64, 1 / 0.55, id="one small tile, which is slower"),
        pytest.param(1, 1, 64 * 64 / 0.55, id="a tile for one entry"),
        pytest.param(65, 64, 128 * 64 / 0.75 / (65 * 64), id="a row too many for the smallest tile"),
        pytest.param(257, 64, 3 * 128 / 0.75 / 257, id="three tiles rather than five of the smallest"),
    ],
)
def test_a_product_takes_as_long_as_its_tiles(rows: int, columns: int, waste: float) -> None:
    assert matmul(HARDWARE, "bf16", rows, 128, columns) == pytest.approx(full(rows, 128, columns) * waste)


def test_a_wave_that_is_not_full_takes_as_long_as_one_that_is() -> None:
    four = device(compute_units=4)
    whole = matmul(four, "bf16", 4 * 256, 256, 128)
    assert whole == pytest.approx(full(4 * 256, 256, 128))
    assert matmul(four, "bf16", 5 * 256, 256, 128) > 1.3 * whole  # smaller tiles fill the second wave in part
    copied = matmul(four, "bf16", 256, 256, 128, copies=4)  # one kernel: copies share the processors
    assert copied == pytest.approx(whole)


@pytest.mark.parametrize(("inner", "columns"), [(129, 128), (128, 129), (4, 128)])
def test_odd_sizes_are_left_to_slow_kernels_on_an_accelerator_only(inner: int, columns: int) -> None:
    host, accelerator = device(), device(compute_units=2)  # all tiles of 512 rows fill both
    assert matmul(accelerator, "bf16", 512, 128, 128) == matmul(host, "bf16", 512, 128, 128)
    odd = matmul(host, "bf16", 512, inner, columns)
    assert matmul(accelerator, "bf16", 512, inner, columns) == pytest.approx(odd / UNALIGNED_RATE)


def test_what_computes_little_takes_as_long_as_its_bytes() -> None:
    slow = device(memory_bytes_per_second=1.0, flops={"bf16": 1e30, "fp8": 1e30})
    assert matmul(slow, "bf16", 1, 8, 16) == pytest.approx(2 * 8 * (1 + 16) + 2 * 16)
    assert matmul(slow, "fp8", 1, 8, 16) == pytest.approx(
        8 * (1 + 16) + 2 * 16
    )  # the output has two bytes all the same
    assert matmul(slow, "bf16", 1, 8, 16, copies=3) == pytest.approx(3 * (2 * 8 * 17 + 2 * 16))


def test_a_product_has_two_gradients_and_each_kernel_its_start() -> None:
    started = device(kernel_seconds=7.0)
    seconds = product(started, "bf16", 256, 512, 128)
    assert seconds.forward == pytest.approx(full(256, 512, 128) + 7)
    of_input, of_weight = matmul(started, "bf16", 256, 128, 512), matmul(started, "bf16", 512, 256, 128)
    assert seconds.backward == pytest.approx(of_input + of_weight)


@pytest.mark.parametrize("sizes", [(0, 8, 8), (8, 0, 8), (8, 8, 0), (8, 8, 8, 0)])
def test_an_empty_product_takes_no_time_not_even_a_start(sizes: tuple[int, ...]) -> None:
    assert product(device(kernel_seconds=7.0), "bf16", *sizes) == Seconds(0.0, 0.0)


@given(st.sampled_from(names()), *[st.integers(1, 20_000)] * 3)
def test_no_product_is_faster_than_the_device(name: str, rows: int, inner: int, columns: int) -> None:
    hardware = load_hardware(name)
    least = 2 * rows * inner * columns / hardware.reached_flops("bf16")
    assert matmul(hardware, "bf16", rows, inner, columns) > least * (1 - 1e-9)


@given(*[st.floats(0, 1e6)] * 4)
def test_seconds_are_summed_apart(a: float, b: float, c: float, d: float) -> None:
    assert Seconds(a, b).plus(Seconds(c, d)) == Seconds(a + c, b + d)
