"""The optimizer of ZeRO-1, and of bf16 with ZeRO-0: flat gradient sums, of which each data rank updates a slice.

Parameters of one group lie one after the other in a flat tensor, and so do the sums of their gradients. A group is
reduced as a whole: each data-parallel rank gets the means of its slice (reduce-scatter), updates this slice of the
weights in float32, and all ranks gather the new weights (all-gather). In one dtype the two send as much as one
all-reduce of the gradients. Large groups are split, so that reduction can begin during the backward pass, and a forward
pass with the weights that have arrived.

Gradients are added to the sums as soon as autograd has computed them, which frees them at once. In bf16 that reads and
writes 10 bytes a parameter and micro-batch: 2 for the gradient, 4 and 4 for the sum. The first gradient of a step is
written over the sums of the last one, so nothing sets them to zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist
from deepspeed import comm
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from torch import Tensor, nn
from torch.optim import Optimizer

from harness.deepspeed.expert_groups import is_expert
from harness.deepspeed.gradient_norm import counts


@dataclass(frozen=True, kw_only=True)
class Averaging:
    """How gradients become means over the data-parallel ranks.

    Attributes:
        ranks: number of data-parallel ranks, also for experts, which have fewer copies.
        dtype: dtype in which gradients are sent and added; None for the sums' dtype.
        before: factor before the sum over ranks; 1 / ranks with DeepSpeed's `prescale_gradients`.
    """

    ranks: int
    dtype: torch.dtype | None = None
    before: float = 1.0

    @property
    def after(self) -> float:
        """Factor after the sum over ranks."""
        return 1.0 / (self.ranks * self.before)


class FlatOptimizer(BF16_Optimizer):
    """DeepSpeed's optimizer of flat float32 sums, also for float32 parameters, with its step split into named parts.

    `StagedEngine` calls the parts in order. `step`, which does everything at once, is not used.
    """

    def __init__(self, optimizer: Optimizer, names: dict[Tensor, str], averaging: Averaging, **options: object) -> None:
        self._averaging = averaging
        self._averaged: set[int] = set()
        self._unsent: list[int] = []
        self._arriving: dict[int, Callable[[], object]] = {}
        # DeepSpeed requires bf16 here, but its arithmetic is right for float32 as well. `immediate_grad_update` makes
        # its constructor call `create_grad_acc_hooks`, and keeps its `backward_epilogue` from adding `grad` itself.
        super().__init__(
            optimizer, names, bfloat16_config=SimpleNamespace(enabled=True, immediate_grad_update=True), **options
        )
        self._weights_over = list(self.real_dp_process_group)
        # On a CPU the weights wait for `send_weights`. Each step has a few small collectives before the next forward
        # pass, and between hosts these would queue behind the weights in the same network card. On a GPU the weights
        # take another path than such host values, so they are sent as soon as they are updated.
        self._sends_at_once = self.bf16_groups_flat[0].device.type != "cpu"

    # 1. Sums over micro-batches, during the backward passes.

    def forget_sums(self) -> None:
        """Begin a step: the first gradient of each parameter overwrites the last step's sum."""
        self._averaged.clear()
        for index, group in enumerate(self.bf16_groups):
            self.fp32_groups_has_gradients[index] = [False] * len(group)

    def create_grad_acc_hooks(self) -> None:
        """Add each gradient to its sum as soon as autograd has it; called by DeepSpeed's constructor."""
        for group, parameters in enumerate(self.bf16_groups):
            for index, parameter in enumerate(parameters):
                # Where DeepSpeed's `safe_get_full_grad` and the like read it.
                parameter._hp_grad = self.fp32_groups_gradients[group][index]
                hook = partial(self._add, group, index)
                self._grad_acc_hooks.append(parameter.register_post_accumulate_grad_hook(hook))

    def _add(self, group: int, index: int, parameter: nn.Parameter) -> None:
        # No `torch.no_grad` for each gradient: neither sums nor gradients have a graph.
        # A schedule has deferred it.
        if parameter.grad is None:
            return
        if group in self._averaged:
            raise RuntimeError(
                f"a gradient of {self.param_names[parameter]} came after the gradients of its group were sent to the "
                "other data-parallel ranks: set zero_optimization.overlap_comm to false"
            )
        total = self.fp32_groups_gradients[group][index]
        gradient = parameter.grad.reshape(-1)
        if self.fp32_groups_has_gradients[group][index]:
            # torch adds mixed dtypes without a float32 copy of the gradient.
            total.add_(gradient)
        else:
            total.copy_(gradient)
        self.fp32_groups_has_gradients[group][index] = True
        parameter.grad = None

    # 2. Sums and means over ranks.

    @torch.no_grad()
    def start_mean(self, group: int) -> Callable[[], None]:
        """Begin to average the gradients of a group over its data ranks, which all call this in the same order.

        Returns a function that waits until this rank's slice holds the means.
        """
        self._averaged.add(group)
        flat = self.fp32_groups_gradients_flat[group]
        own = self.fp32_groups_gradient_flat_partition[group]
        how = self._averaging
        ranks = self.real_dp_process_group[group]
        # Nothing is sent, and nothing rounded.
        if dist.get_world_size(ranks) == 1:
            # Experts without copies: like all gradients, theirs are means over all data-parallel ranks.
            if how.ranks > 1:
                own.mul_(1.0 / how.ranks)
            return lambda: None
        sent = flat if how.dtype in (None, flat.dtype) else flat.to(how.dtype)
        if how.before != 1.0:
            # This may change the sums themselves, of which only this rank's slice is read again, and replaced by the
            # means.
            sent.mul_(how.before)
        received = torch.empty_like(own, dtype=sent.dtype)
        work = comm.reduce_scatter_tensor(received, sent, group=ranks, async_op=True)

        def finish() -> None:
            work.wait()
            with torch.no_grad():
                # Widened before the division, which would round once more in the dtype that was sent.
                own.copy_(received).mul_(how.after)

        return finish

    # 3. Norm and clipping.

    def gradients_in_norm(self, tp_rank: int) -> tuple[list[Tensor], list[Tensor]]:
        """Return this rank's gradient slices that it counts in the norm: dense ones and expert ones."""
        found: tuple[list[Tensor], list[Tensor]] = ([], [])
        for index, parameters in enumerate(self.bf16_groups):
            own = self.fp32_groups_gradient_flat_partition[index]
            for start, stop in self._runs(index, [counts(parameter, tp_rank) for parameter in parameters]):
                found[any(map(is_expert, parameters))].append(own[start:stop])
        return found

    def _runs(self, index: int, wanted: Sequence[bool]) -> Iterator[tuple[int, int]]:
        """Yield the ranges of a group's wanted parameters in this rank's slice, merging neighbours."""
        size = self.fp32_groups_gradient_flat_partition[index].numel()
        first = dist.get_rank(self.real_dp_process_group[index]) * size
        # `at` is the start of a parameter relative to this rank's slice. The pair at the end closes the last range.
        at = -first
        begun = None
        for parameter, is_wanted in zip([*self.bf16_groups[index], None], [*wanted, False], strict=True):
            here = min(max(at, 0), size)
            if is_wanted and begun is None:
                begun = here
            elif not is_wanted and begun is not None:
                if here > begun:
                    yield begun, here
                begun = None
            at += 0 if parameter is None else parameter.numel()

    @property
    def slices(self) -> list[Tensor]:
        """This rank's flat gradient slices, from which it updates weights."""
        found: list[Tensor] = self.fp32_groups_gradient_flat_partition
        return found

    # 4. The update.

    def gather_over(self, groups: Mapping[tuple[int, ...], dist.ProcessGroup]) -> None:
        """Gather weights over these process groups, given by ranks, for the groups with the same data ranks."""
        ranks = [tuple(dist.get_process_group_ranks(group)) for group in self.real_dp_process_group]
        self._weights_over = [
            groups.get(key, of_means) for key, of_means in zip(ranks, self.real_dp_process_group, strict=True)
        ]

    @torch.no_grad()
    def update(self, order: Sequence[int]) -> None:
        """Update this rank's slices of the weights, group by group; on a GPU, begin to gather each group's weights.

        Until `await_weights`, the weights are a mixture of old and new ones.

        Args:
            order: all groups, in the order in which they are needed; the same on all data ranks of a group.
        """
        # A gather still in flight reads the slices that change now.
        self.await_weights()
        groups = self.optimizer.param_groups
        for group, gradient in zip(groups, self.slices, strict=True):
            (weights,) = group["params"]
            weights.grad = gradient if gradient.dtype == weights.dtype else gradient.to(weights.dtype)
        # torch's `step` updates all groups of the optimizer. One group at a time, the weights of each can be sent while
        # the next is updated; with nothing to send, one call is cheaper.
        together = all(dist.get_world_size(ranks) == 1 for ranks in self._weights_over)
        try:
            for number, index in enumerate(order):
                if not together:
                    self.optimizer.param_groups = [groups[index]]
                if not together or number == 0:
                    self.optimizer.step()
                self._copy_slice(index)
                self._unsent.append(index)
                if self._sends_at_once:
                    self.send_weights()
        finally:
            self.optimizer.param_groups = groups
        for weights in self.fp32_groups_flat_partition:
            weights.grad = None

    def _copy_slice(self, index: int) -> None:
        weights = self.fp32_groups_flat_partition[index]
        own = self._own_slice(index)
        # Float32 weights are updated in place, see `_link_all_hp_params`.
        if own.untyped_storage()._cdata != weights.untyped_storage()._cdata:
            own.data.copy_(weights.data)

    def _own_slice(self, index: int) -> Tensor:
        own: Tensor = self.bf16_partitioned_groups[index][dist.get_rank(self._weights_over[index])]
        return own

    @torch.no_grad()
    def send_weights(self) -> None:
        """Begin to gather updated slices over the data ranks, unless already begun; all ranks call it."""
        for index in self._unsent:
            flat = self.bf16_groups_flat[index]
            ranks = self._weights_over[index]
            if dist.get_world_size(ranks) > 1:
                work = comm.all_gather_into_tensor(flat, self._own_slice(index), group=ranks, async_op=True)
                self._arriving[index] = work.wait
        self._unsent.clear()

    def await_weights(self, groups: Iterable[int] | None = None) -> None:
        """Wait until some groups (default: all) have the weights of the last update; all ranks call it.

        On a GPU the current stream waits, and the host goes on.
        """
        self.send_weights()
        for index in tuple(self._arriving) if groups is None else groups:
            if (wait := self._arriving.pop(index, None)) is not None:
                wait()

    def abandon_weights(self) -> None:
        """Wait for the weights in flight, and send no others; a rank may call it alone, as after an error."""
        # A gather started by one rank alone would wait for the others.
        self._unsent.clear()
        self.await_weights()

    @torch.no_grad()
    def update_lp_params(self) -> None:
        """Copy the float32 weights to the model's parameters; all ranks call it."""
        self.await_weights()
        for index in range(len(self.bf16_groups)):
            self._copy_slice(index)
            self._unsent.append(index)
        self.await_weights()

    # Called while DeepSpeed's constructor makes the tensors.

    def _link_all_hp_params(self) -> None:
        """Make float32 parameters their own float32 weights, instead of DeepSpeed's copies."""
        for index, flat in enumerate(self.bf16_groups_flat):
            if flat.dtype == torch.float32:
                rank = dist.get_rank(self.real_dp_process_group[index])
                self.fp32_groups_flat_partition[index].data = self.bf16_partitioned_groups[index][rank].data
        super()._link_all_hp_params()
