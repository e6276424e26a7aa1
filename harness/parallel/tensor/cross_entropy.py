"""Cross entropy over logits whose vocabulary may be split over a tensor-parallel group.

The ranks exchange one maximum and two sums per token, never logits (vocabulary-parallel cross entropy in Megatron-LM:
Shoeybi et al. 2019, arXiv 1909.08053, section 3). For rows of logits z with label y

    loss = log(sum_v exp(z_v)) - z_y        d loss / d z_v = exp(z_v) / sum_u exp(z_u) - [v = y]

Exponentials are computed for some rows at a time, and again in the backward. The gradient overwrites the logits if
nothing else needs them. So a large vocabulary's logits exist once, without a float32 copy.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from harness.config.model.sharding import shard_range
from harness.device import kernels
from harness.parallel.comm import Context, group_rank, group_size, max_over_group, sum_over_group

ELEMENTS_AT_ONCE = 1 << 23
"""Logits converted to float32 exponentials at a time: 32 MiB."""
IN_CACHE = 1 << 18
"""The same on a CPU: 1 MiB, which fits a core's cache."""
_VIEWS = {f"{name}Backward0" for name in ("UnsafeView", "View", "ReshapeAlias", "Alias", "AsStrided", "Slice")}
"""Graph nodes whose output may share the memory of their input."""


def vocab_parallel_cross_entropy(
    logits: Tensor, labels: Tensor, group: dist.ProcessGroup | None, vocab_size: int, ignore_index: int = -100
) -> Tensor:
    """Return the loss of every token: float32, shaped as `labels` [...], 0 where the label is `ignore_index`.

    Sums are computed in float32 for any dtype of the logits. The gradient has the dtype of the logits, and the backward
    may overwrite the logits with it: copy them first if you need them afterwards.

    Args:
        logits: [..., n], this rank's shard of the vocabulary, as from `shard.share_of`.
        labels: [...], indices into the whole vocabulary.

    Raises ValueError for another width than this rank's, and RuntimeError for a label outside the vocabulary.
    """
    logits = logits.contiguous()
    losses: Tensor = _VocabParallelCrossEntropy.apply(  # type: ignore[no-untyped-call]  # torch gives it no types
        logits, labels, group, vocab_size, ignore_index, is_needed(logits)
    )
    return losses


def is_needed(logits: Tensor) -> bool:
    """Return whether the caller, or the backward of the operation that made the logits [..., n], needs them later.

    Walk the graph upwards while nodes share the memory of the logits, and check whether any has saved it. In the
    forward, also return True if a checkpointed part made the logits or contains the loss; in the second case the
    recomputation asks again.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)  # noqa: SLF001  # no public name
    in_backward = torch._C._current_graph_task_id() != -1  # noqa: SLF001  # no public name
    if hooks is not None and not in_backward:
        return True
    # Torch has no public name for the base of a view, nor for an id of a storage that has no address, as on meta.
    base = logits._base  # noqa: SLF001
    memory = logits.untyped_storage()._cdata  # noqa: SLF001
    node = (logits if base is None else base).grad_fn
    while node is not None and node.name() != "torch::autograd::AccumulateGrad":
        if not in_backward and _has_packed(node):
            # Unpacking a saved tensor would recompute the checkpointed part now, and keep it until the backward.
            return True
        saved = list(getattr(node, "saved_tensors", ()))
        for name in dir(node):
            if name.startswith("_saved_"):
                saved.append(getattr(node, name))
        for value in saved:
            if isinstance(value, Tensor) and value.untyped_storage()._cdata == memory:  # noqa: SLF001
                return True
        # An ordinary operation has inputs in other memory, so nothing above it can have saved the logits.
        if not isinstance(node, BackwardCFunction) and type(node).__name__ not in _VIEWS:
            return False
        node = node.next_functions[0][0]
    # No operation made this memory: it is a leaf, or was computed without a graph. The caller may still need it.
    return True


def _has_packed(node: Node) -> bool:
    """Return whether hooks hold the tensors that a node has saved, as in a checkpointed part."""
    for name in dir(node):
        if name.startswith("_raw_saved_"):
            raw = getattr(node, name)
            for saved in raw if isinstance(raw, tuple | list) else (raw,):
                if getattr(saved, "unpack_hook", None) is not None:
                    return True
    return False


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context,
        logits: Tensor,
        labels: Tensor,
        group: dist.ProcessGroup | None,
        vocab_size: int,
        ignore_index: int,
        keeps: bool,
    ) -> Tensor:
        # Asserted on the device: reading the labels here would make the host wait in every micro-batch.
        ignored = labels == ignore_index
        inside = (labels >= 0) & (labels < vocab_size)
        torch._assert_async((inside | ignored).all(), "a label is outside the vocabulary")  # noqa: SLF001  # no public name
        first, stop = 0, vocab_size
        if group is not None:
            first, stop = shard_range(vocab_size, group_rank(group), group_size(group))
        if logits.shape[-1] != stop - first:
            raise ValueError(f"got {logits.shape[-1]} columns of logits, expected {stop - first}")
        column = labels - first
        here = (column >= 0) & (column < stop - first) & ~ignored
        column = column.masked_fill(~here, 0)

        if kernels.usable(logits.device):
            own_largest, exp_sum = kernels.exponentials(logits)
            largest = own_largest if group is None else max_over_group(own_largest, group)
            # The kernel has subtracted this rank's maximum: rescale its sums to the maximum of the group.
            exp_sum.mul_((own_largest - largest).exp_())
        else:
            largest = logits.amax(-1).float()
            if group is not None:
                largest = max_over_group(largest, group)
            exp_sum = torch.empty_like(largest)
            for rows, top, total in in_chunks(logits, largest, exp_sum):
                # Subtract the maximum over all ranks first, so that no exponential overflows.
                total.copy_((rows.float() - top.unsqueeze(-1)).exp_().sum(-1))
        label_logit = logits.gather(-1, column.unsqueeze(-1)).squeeze(-1).float() - largest
        # Only the rank with the label's column contributes to the sum over the group.
        label_logit = label_logit.masked_fill(~here, 0.0)
        # Both sums in one all-reduce.
        if group is not None:
            exp_sum, label_logit = sum_over_group(torch.stack([exp_sum, label_logit]), group)

        # `keeps` is saved as a tensor, because a recomputation, which may find another answer, replaces saved tensors.
        ctx.save_for_backward(logits, largest + exp_sum.log(), column, here, ignored, torch.tensor(keeps, device="cpu"))
        losses: Tensor = (exp_sum.log() - label_logit).masked_fill(ignored, 0.0)
        return losses

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, log_sum, column, here, ignored, keeps = ctx.saved_tensors
        scale = grad.float().masked_fill(ignored, 0.0)
        # `detach` shares memory and version counter, so torch raises if anything else needs the logits after all.
        written = torch.empty_like(logits) if keeps else logits.detach()
        if kernels.usable(logits.device):
            kernels.probabilities_less_label(logits, written, log_sum, column, scale, scale * here)
            return written, None, None, None, None, None
        for rows, top, label, is_here, factor, place in in_chunks(logits, log_sum, column, here, scale, written):
            gradient = (rows.float() - top.unsqueeze(-1)).exp_().mul_(factor.unsqueeze(-1))
            gradient.scatter_add_(-1, label.unsqueeze(-1), -(factor * is_here).unsqueeze(-1))
            place.copy_(gradient)
        return written, None, None, None, None, None


def in_chunks(logits: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield views of the same rows (tokens) of several tensors, each [..., vocabulary] or [...], chunk by chunk."""
    dims = logits.dim() - 1
    rows = max((IN_CACHE if logits.is_cpu else ELEMENTS_AT_ONCE) // logits.shape[-1], 1)
    columns = (tensor.reshape(-1, *tensor.shape[dims:]).split(rows) for tensor in (logits, *others))
    return zip(*columns, strict=True)
