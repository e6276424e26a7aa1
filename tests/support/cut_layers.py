"""A layer that is cut over a group of ranks, held to the whole one: outputs, and gradients of inputs and parameters.

In float64 the order of the sums is all that differs.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.config.model.sharding import shard_range
from harness.parallel.tensor.shard import shard_of

TOLERANCE = 1e-12  # float64; the cross entropy sums in float32
Errors = dict[str, float]


def difference(got: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest expected value; infinite where the shapes differ."""
    if got.shape != expected.shape:
        return float("inf")
    return ((got - expected).abs().max() / expected.abs().max().clamp_min(1e-30)).item()


def whole_grad(param: nn.Parameter, group: dist.ProcessGroup) -> Tensor:
    """The gradient of the whole parameter, put together from the ranks that own a part of it."""
    assert param.grad is not None
    shard = shard_of(param)
    if shard is None:
        return param.grad
    parts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, (shard, param.grad), group=group)
    full = param.new_full(shard.full_shape, float("nan"))  # what no rank holds stays visible
    for part, grad in parts:
        part.put(grad, full)
    return full


def share(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    start, stop = shard_range(x.shape[-1], dist.get_rank(group), dist.get_world_size(group))
    return x[..., start:stop].detach().clone()


def compare(
    whole: Any,
    cut: Any,
    x: Tensor,
    group: dist.ProcessGroup,
    *,
    split_in: bool = False,
    split_out: bool = False,
) -> Errors:
    """The differences between a layer and its cut form, on the same input and output gradient."""
    floating = x.is_floating_point()
    x_whole = x.clone().requires_grad_(floating)
    x_cut = (share(x, group) if split_in else x.clone()).requires_grad_(floating)
    y_whole, y_cut = whole(x_whole), cut(x_cut)
    drawn = torch.randn(y_whole.shape, dtype=y_whole.dtype, generator=torch.Generator().manual_seed(3), device="cpu")
    grad = drawn.to(x.device)
    y_whole.backward(grad)
    y_cut.backward(share(grad, group) if split_out else grad)
    errors = {"output": difference(y_cut, share(y_whole, group) if split_out else y_whole)}
    if x_whole.grad is not None and x_cut.grad is not None:
        errors["input gradient"] = difference(x_cut.grad, share(x_whole.grad, group) if split_in else x_whole.grad)
    for name, param in whole.named_parameters():
        errors[f"{name} gradient"] = difference(whole_grad(cut.get_parameter(name), group), param.grad)
    return errors
