"""The seconds of operations, worked by hand on a device of 1,000 operations and 100 bytes a second."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn.functional import embedding, scaled_dot_product_attention

from harness.dry_run.kernel_time import Kernel, Kernels
from harness.planner.layer_time import matmul
from tests.unit.planner.devices import device

HARDWARE = device(memory_bytes_per_second=100.0, kernel_seconds=1.0)


def kernels(compute: Callable[[], object]) -> list[Kernel]:
    """Return the kernels that a function starts."""
    found: list[Kernel] = []
    with Kernels(HARDWARE, found.append):
        compute()
    return found


def moved(compute: Callable[[], object]) -> float:
    """Return the bytes that the one kernel of a function moves."""
    (kernel,) = kernels(compute)
    assert kernel.seconds == kernel.bytes / 100 + 1
    return kernel.bytes


@pytest.fixture
def x() -> Tensor:
    return torch.ones(10, 10)


def test_an_elementwise_operation_takes_the_bytes_that_it_reads_and_writes(x: Tensor) -> None:
    assert moved(lambda: x + x.T) == 3 * 400
    assert moved(lambda: x.add_(1)) == 2 * 400
    assert moved(lambda: x.bfloat16()) == 400 + 200
    assert moved(lambda: torch._foreach_mul_([x, x], 2.0)) == 2 * 2 * 400
    assert moved(lambda: torch.neg(x, out=torch.empty(10, 10))) == 2 * 400


def test_what_is_overwritten_is_not_read_and_what_is_repeated_is_read_once(x: Tensor) -> None:
    one = torch.ones(1).expand(10, 10)
    assert moved(x.zero_) == 400
    assert moved(lambda: x.copy_(one)) == 400 + 4


def test_a_lookup_reads_the_rows_that_it_returns(x: Tensor) -> None:
    rows = torch.tensor([1, 2])
    added = torch.ones(2, 10)
    assert moved(lambda: embedding(rows, x)) == 2 * 80 + 16
    assert moved(lambda: x.index_add_(0, rows, added)) == 3 * (80 + 16)


def test_views_allocations_and_copies_onto_themselves_start_no_kernel(x: Tensor) -> None:
    def compute() -> None:
        x.view(100).t_()
        torch.empty_like(x).resize_(5)
        x.detach().split(5)
        x.copy_(x)
        x.new_empty(0).add_(1)

    assert kernels(compute) == []
    with FakeTensorMode():
        assert kernels(lambda: torch.empty(3).device) == []  # which asks an operation


def test_a_product_takes_the_planner_s_seconds(x: Tensor) -> None:
    (kernel,) = kernels(lambda: torch.addmm(x[0, :7], x, x[:, :7]))
    assert kernel.flops == 2 * 10 * 10 * 7
    assert kernel.seconds == pytest.approx(matmul(HARDWARE, "fp32", 10, 10, 7))
    (batched,) = kernels(lambda: x.expand(3, 10, 10).bmm(x[:, :7].expand(3, 10, 7)))
    assert batched.flops == 3 * kernel.flops


def test_a_causal_mask_leaves_half_of_an_attention_and_backward_takes_two_and_a_half_times_as_much() -> None:
    found: list[Kernel] = []
    with FakeTensorMode(), Kernels(HARDWARE, found.append):
        q, k, v = (torch.empty(2, 4, 64, 16, requires_grad=True) for _ in range(3))
        scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
    forward, backward = (kernel for kernel in found if "attention" in kernel.name)
    assert forward.flops == 2 * 2 * 4 * 64 * 64 * (16 + 16) / 2
    assert forward.seconds == pytest.approx(forward.flops / (1000 * HARDWARE.own_attention_efficiency(16)) + 1)
    assert backward.flops == 2.5 * forward.flops
    assert backward.name.endswith("backward")


def test_tensors_of_another_device_do_not_count(x: Tensor) -> None:
    found: list[Kernel] = []
    with Kernels(HARDWARE, found.append, device="meta"):
        assert (x + x).sum() == 200
        torch.empty(3, device="meta") + 1
    assert [kernel.name for kernel in found] == ["add"]
