"""Every tensor-parallel layer against the layer that it replaces: output, gradients of input, weight and
bias.

Four ranks are launched once. They run every case twice: in groups of two, and in one group of four. A rank's
share of a gradient is put back through the parameter's shard. In float64 what is left is the order of the
sums.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from harness.config.model.sharding import shard_range
from harness.extras.host_memory import HostMemory
from harness.parallel.collectives import leave_memory, share_memory
from harness.parallel.comm import (
    copy_tail_to_group,
    copy_to_group,
    gather_from_group,
    reduce_from_group,
    split_to_group,
)
from harness.parallel.tensor import shared_input
from harness.parallel.tensor.cross_entropy import vocab_parallel_cross_entropy
from harness.parallel.tensor.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    overlap_sums,
)
from tests.support.cut_layers import TOLERANCE, Errors, compare, difference, share, whole_grad
from tests.support.ranks import on_device, run_ranks

pytestmark = pytest.mark.ranks
TOLERANCE_F32 = 2e-6
IN, OUT, TOKENS, VOCABULARY = 9, 14, (2, 5), 13  # two ranks and four share none of them equally, but 14 by two


def widths(total: int, group: dist.ProcessGroup) -> list[int]:
    size = dist.get_world_size(group)
    return [stop - start for start, stop in (shard_range(total, rank, size) for rank in range(size))]


def column(group: dist.ProcessGroup) -> Errors:
    whole = nn.Linear(IN, OUT)
    return compare(
        whole, ColumnParallelLinear.from_linear(whole, group), torch.randn(*TOKENS, IN), group, split_out=True
    )


def column_gathered(group: dist.ProcessGroup) -> Errors:
    whole = nn.Linear(IN, VOCABULARY)
    cut = ColumnParallelLinear.from_linear(whole, group, gather_output=True)
    return compare(whole, cut, torch.randn(*TOKENS, IN), group)


def column_transposed(group: dist.ProcessGroup) -> Errors:
    whole = Conv1D(OUT, IN)
    cut = ColumnParallelLinear.from_linear(whole, group, weight_transposed=True)
    return compare(whole, cut, torch.randn(*TOKENS, IN), group, split_out=True)


def row(group: dist.ProcessGroup) -> Errors:
    whole = nn.Linear(IN, OUT)
    return compare(whole, RowParallelLinear.from_linear(whole, group), torch.randn(*TOKENS, IN), group, split_in=True)


def row_that_splits_its_input(group: dist.ProcessGroup) -> Errors:
    whole = nn.Linear(IN, OUT)
    cut = RowParallelLinear.from_linear(whole, group, input_is_parallel=False)
    return compare(whole, cut, torch.randn(*TOKENS, IN), group)


def row_transposed(group: dist.ProcessGroup) -> Errors:
    whole = Conv1D(OUT, IN)
    cut = RowParallelLinear.from_linear(whole, group, weight_transposed=True)
    return compare(whole, cut, torch.randn(*TOKENS, IN), group, split_in=True)


def made_alone(group: dist.ProcessGroup) -> Errors:
    """A block of the user's own, made of the layers themselves, from the same random state."""
    torch.manual_seed(7)
    whole = nn.Sequential(nn.Linear(IN, OUT), nn.GELU(), nn.Linear(OUT, IN))
    torch.manual_seed(7)
    cut = nn.Sequential(ColumnParallelLinear(IN, OUT, group=group), nn.GELU(), RowParallelLinear(OUT, IN, group=group))
    return compare(whole, cut, torch.randn(*TOKENS, IN), group)


def embedding(group: dist.ProcessGroup) -> Errors:
    torch.manual_seed(7)
    whole = nn.Embedding(VOCABULARY, OUT, padding_idx=12)
    torch.manual_seed(7)
    cut = VocabParallelEmbedding(VOCABULARY, OUT, padding_idx=12, group=group)
    return compare(whole, cut, torch.arange(VOCABULARY).repeat(2, 2), group)


class ScaledEmbedding(nn.Embedding):
    """An embedding with a forward of its own, as several families have."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * 3.0


def embedding_of_a_subclass(group: dist.ProcessGroup) -> Errors:
    whole = ScaledEmbedding(VOCABULARY, OUT)
    return compare(
        whole,
        VocabParallelEmbedding.from_embedding(whole, group),
        torch.arange(VOCABULARY).repeat(3, 1),
        group,
    )


def one_input_of_three_layers(group: dist.ProcessGroup) -> Errors:
    """Query, key and value, say: their gradients of the input are summed over the group in one all-reduce."""
    layers = [nn.Linear(IN, OUT) for _ in range(3)]
    cut = [ColumnParallelLinear.from_linear(layer, group) for layer in layers]
    x = torch.randn(*TOKENS, IN, requires_grad=True)
    own = x.detach().clone().requires_grad_()
    sum((layer(x).square().sum() for layer in layers), torch.zeros(())).backward()
    with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as calls:
        sum((layer(own).square().sum() for layer in cut), torch.zeros(())).backward()
    first, own.grad = own.grad, None
    sum((layer(own).square().sum() for layer in cut), torch.zeros(())).backward()
    return {
        "gradient": difference(first, x.grad),
        "gradient again": difference(own.grad, x.grad),
        "all-reduces too many": calls.call_count - 1.0,
    }


def overlapped(group: dist.ProcessGroup) -> Errors:
    """Weight gradients are computed between the start of the sum and its end, and are none the worse for it."""
    layers = [nn.Linear(IN, OUT) for _ in range(2)]
    block = nn.ModuleList(ColumnParallelLinear.from_linear(layer, group) for layer in layers)
    overlap_sums(block)
    x = torch.randn(*TOKENS, IN, requires_grad=True)
    own = x.detach().clone().requires_grad_()
    sum((layer(x).square().sum() for layer in layers), torch.zeros(())).backward()
    events: list[str] = []
    for number, layer in enumerate(block):
        layer.get_parameter("weight").register_post_accumulate_grad_hook(
            lambda weight, at=number: None if weight.grad is None else events.append(f"{at}")
        )
    with recorded(events, group):
        sum((layer(own).square().sum() for layer in block), torch.zeros(())).backward()
    parts = [whole_grad(layer.get_parameter("weight"), group) for layer in block]
    return {
        "order": float(events != ["sum begins", "1", "0", "sum is awaited"]),
        "input gradient": difference(own.grad, x.grad),
        "weight gradients": max(map(difference, parts, [layer.weight.grad for layer in layers])),
    }


@contextmanager
def recorded(events: list[str], group: dist.ProcessGroup) -> Iterator[None]:
    """Note when a sum over the group begins, and when it is awaited; four ranks share memory, two do not."""
    begin = shared_input.start_all_reduce

    def start(x: Tensor, over: dist.ProcessGroup) -> Callable[[], Tensor]:
        assert over is group
        events.append("sum begins")
        end = begin(x, over)

        def awaited() -> Tensor:
            events.append("sum is awaited")
            return end()

        return awaited

    if group is dist.group.WORLD:
        share_memory([group], HostMemory.open)
    try:
        with patch.object(shared_input, "start_all_reduce", start):
            yield
    finally:
        leave_memory()


def gather_then_split(group: dist.ProcessGroup) -> Errors:
    """Whole in the middle, as between a gathered column-parallel and a splitting row-parallel layer."""
    x = torch.randn(*TOKENS, OUT, requires_grad=True)
    own = share(x, group).requires_grad_()
    y = split_to_group(gather_from_group(own, group, widths(OUT, group)).square(), group, widths(OUT, group))
    x.square().sum().backward()
    y.sum().backward()
    return {
        "output": difference(y, share(x.square(), group)),
        "gradient": difference(own.grad, share(x.grad, group)),
    }


def copy_then_reduce(group: dist.ProcessGroup) -> Errors:
    x = torch.randn(*TOKENS, OUT, requires_grad=True)
    size = dist.get_world_size(group)
    y = reduce_from_group(copy_to_group(x, group) * (dist.get_rank(group) + 1.0), group)
    y.sum().backward()
    factor = size * (size + 1) / 2
    return {"output": difference(y, x * factor), "gradient": difference(x.grad, torch.full_like(x, factor))}


def cross_entropy(group: dist.ProcessGroup, dtype: torch.dtype = torch.float32) -> Errors:
    logits = (20 * torch.randn(3, 7, VOCABULARY)).to(dtype)
    labels = torch.randint(VOCABULARY, (3, 7))
    labels[0, :3] = -100
    whole = logits.clone().requires_grad_()
    expected = F.cross_entropy(whole.float().flatten(0, 1), labels.flatten(), reduction="none").view(3, 7)
    own = share(logits, group).requires_grad_()
    losses = vocab_parallel_cross_entropy(own, labels, group, VOCABULARY)
    weights = torch.rand(3, 7)
    (expected * weights).sum().backward()
    (losses * weights).sum().backward()
    assert whole.grad is not None
    return {"loss": difference(losses, expected), "gradient": difference(own.grad, share(whole.grad, group))}


def cross_entropy_in_bfloat16(group: dist.ProcessGroup) -> Errors:
    return cross_entropy(group, torch.bfloat16)


def copied_tail(group: dist.ProcessGroup) -> Errors:
    """The last entries go to each rank's own heads, the first ones to a layer that copies by itself."""
    x = torch.randn(*TOKENS, OUT, requires_grad=True)
    weight = torch.ones(OUT)
    weight[-4:] = dist.get_rank(group) + 1.0
    (copy_tail_to_group(x, 4, group) * weight).sum().backward()
    size = dist.get_world_size(group)
    expected = torch.ones(*TOKENS, OUT)
    expected[..., -4:] = size * (size + 1) / 2
    return {"gradient": difference(x.grad, expected)}


CASES: dict[str, Callable[[dist.ProcessGroup], Errors]] = {
    case.__name__: case
    for case in (
        column,
        column_gathered,
        column_transposed,
        row,
        row_that_splits_its_input,
        row_transposed,
        made_alone,
        embedding,
        embedding_of_a_subclass,
        gather_then_split,
        one_input_of_three_layers,
        overlapped,
        copy_then_reduce,
        cross_entropy,
        cross_entropy_in_bfloat16,
        copied_tail,
    )
}


@on_device
def run_cases() -> dict[str, dict[int, Errors]]:
    """What every rank does: every case, in its group of two and in the group of all four."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    groups = {2: pairs[dist.get_rank() // 2], 4: dist.group.WORLD}
    results: dict[str, dict[int, Errors]] = {}
    torch.set_default_dtype(torch.float64)
    for name, case in CASES.items():
        torch.manual_seed(1)
        results[name] = {size: case(group) for size, group in groups.items()}
    return results


@pytest.fixture(scope="module")
def results() -> list[dict[str, dict[int, Errors]]]:
    return run_ranks(4, run_cases)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_a_cut_layer_gives_what_the_whole_one_gives(results: Any, case: str, size: int) -> None:
    tolerance = TOLERANCE_F32 if case.startswith("cross_entropy") else TOLERANCE
    if case.endswith("bfloat16"):
        tolerance = 2**-8  # one rounding of the gradient
    for rank, result in enumerate(results):
        errors = result[case][size]
        assert errors, f"{case} compared nothing"
        wrong = {what: error for what, error in errors.items() if not error <= tolerance}
        assert not wrong, f"{case} on rank {rank} of {size}: {wrong}"
