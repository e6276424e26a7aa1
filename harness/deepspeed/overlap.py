"""Overlap data-parallel communication with computation: gradient reduce-scatters and weight all-gathers.

Gradients are averaged while the last backward pass of a step still computes others.

A backward pass reaches the layers in reverse order. When it asks a layer's predecessor for the gradient of its output,
the layer has all of its own gradients: autograd runs the most recent node first. Then the reduction of each parameter
group with nothing in earlier layers can begin.

Reductions begin in one fixed order, the same on all ranks: NCCL and gloo match collectives by their order. A group
waits for the end of the pass if its gradients are summed over other ranks first: tied weights, and parameters with
partial gradients on tensor-parallel ranks.

New weights are gathered while the next forward pass already computes: each layer waits for the parameter groups that it
is the first to need. They begin in the order in which they are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from harness.deepspeed.flat_optimizer import FlatOptimizer

Chunk = Sequence[tuple[int, object]]
"""The layers of a model chunk, each with its index in the pipeline."""
Fill = Callable[[Sequence[nn.Parameter]], None]
"""Gives parameters without a gradient a zero gradient."""


class OverlappedMeans:
    """Starts and awaits the averaging of an optimizer's gradients, group by group.

    Args:
        is_last_pass: returns whether the forward or backward pass of a step's last micro-batch is running.
    """

    def __init__(
        self, optimizer: FlatOptimizer, chunks: Sequence[Chunk], fill: Fill, is_last_pass: Callable[[], bool]
    ) -> None:
        self._is_last_pass = is_last_pass
        self._optimizer = optimizer
        self._fill = fill
        self._layers_of = self._place(chunks)
        # The group whose earliest layer comes last is ready first; a group without a known layer is last.
        groups = range(len(optimizer.bf16_groups))
        self._order = sorted(groups, key=lambda group: -min(self._layers_of[group], default=-1))
        self._late: frozenset[int] | None = None
        self._missing: dict[int, set[int]] = {}
        self._under_way: dict[int, Callable[[], None]] = {}

    def _place(self, chunks: Sequence[Chunk]) -> dict[int, frozenset[int]]:
        """Make each layer report its backward pass; return the layers that hold parameters of each group."""
        # Groups with a parameter in no layer, or in the first layer of a chunk, have the layer -1, which is never
        # reported: its input has no graph, so no gradient arrives there.
        layers: dict[int, set[int]] = {}
        for chunk in chunks:
            for place, (index, layer) in enumerate(chunk):
                if not isinstance(layer, nn.Module):
                    continue
                for parameter in layer.parameters():
                    layers.setdefault(id(parameter), set()).add(index if place else -1)
                if place:
                    after = [later for later, _ in chunk[place:]]
                    layer.register_forward_pre_hook(partial(self._watch, after))
        return {
            group: frozenset().union(*(layers.get(id(parameter), {-1}) for parameter in parameters))
            for group, parameters in enumerate(self._optimizer.bf16_groups)
        }

    def begin_step(self, late: Callable[[], Collection[nn.Parameter]], *, overlaps: bool) -> None:
        """Begin a step, in which nothing is reduced early unless `overlaps`.

        Args:
            late: returns the parameters whose gradients are summed over other ranks first; called once.
        """
        self._under_way.clear()
        self._missing = {}
        if overlaps:
            # Asked only now, because the first step finds out which gradients are partial.
            if self._late is None:
                ids = set(map(id, late()))
                groups = enumerate(self._optimizer.bf16_groups)
                self._late = frozenset(g for g, parameters in groups if any(id(p) in ids for p in parameters))
            self._missing = {
                group: {-1} if group in self._late else set(layers) for group, layers in self._layers_of.items()
            }

    def finish(self) -> None:
        """Average the gradients of all groups; this rank's slices then hold the means."""
        # All begin before the first wait, so that the network never idles between two groups.
        for group in self._order:
            if group not in self._under_way:
                self._start(group)
        for group in self._order:
            self._under_way.pop(group)()
        self._missing = {}

    def _watch(self, layers: Sequence[int], _layer: nn.Module, inputs: object) -> None:
        """Before a forward of the last micro-batch, let the gradient of a layer's input report the layers after."""
        if self._missing and self._is_last_pass():
            for tensor in tree_leaves(inputs):
                # In the first pass of a recomputed block, only the first layer's input has a graph.
                if isinstance(tensor, Tensor) and tensor.requires_grad and tensor.grad_fn is not None:
                    tensor.register_hook(lambda _gradient: self._report(layers))
                    return

    def _report(self, layers: Sequence[int]) -> None:
        """Begin the reductions that are ready now that these layers' backward passes are complete."""
        for missing in self._missing.values():
            missing.difference_update(layers)
        for group in self._order:
            if group in self._under_way:
                continue
            if self._missing.get(group, {-1}):
                # Later groups wait too, even if they are complete: all ranks reduce in one order.
                return
            self._start(group)

    def _start(self, group: int) -> None:
        # Zeros for parameters that this rank has not used: another rank may have.
        self._fill(self._optimizer.bf16_groups[group])
        self._under_way[group] = self._optimizer.start_mean(group)


class AwaitedWeights:
    """Makes each layer wait for its new weights when a forward pass first reaches it.

    Attributes:
        order: all parameter groups, in the order in which they are needed.
        before_layers: the groups that no layer waits for.
    """

    def __init__(self, optimizer: FlatOptimizer, chunks: Sequence[Chunk]) -> None:
        self._optimizer = optimizer
        calls = [layer for chunk in chunks for _, layer in chunk]  # in the order of a micro-batch
        needed = [_first_need(calls, parameters) for parameters in optimizer.bf16_groups]
        self.order = sorted(range(len(needed)), key=needed.__getitem__)
        self.before_layers = [group for group in self.order if needed[group] < 0]
        for place, layer in enumerate(calls):
            groups = [group for group in self.order if needed[group] == place]
            if groups and isinstance(layer, nn.Module):
                # Before other hooks, which may read weights.
                layer.register_forward_pre_hook(partial(self._await, groups), prepend=True)

    def _await(self, groups: Sequence[int], _layer: nn.Module, _inputs: object) -> None:
        self._optimizer.await_weights(groups)


def _first_need(calls: Sequence[object], parameters: Sequence[nn.Parameter]) -> int:
    """Return the index in `calls` of the layer that waits for these parameters, the first with any; -1 if none can."""
    ids = set(map(id, parameters))
    for place, call in enumerate(calls):
        # A function may read any parameter and cannot wait, so the last layer before it waits.
        if not isinstance(call, nn.Module):
            return place - 1
        if any(id(parameter) in ids for parameter in call.parameters()):
            return place
    return -1
