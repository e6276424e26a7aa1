"""Keep parameters that no sample uses unchanged.

DeepSpeed gives every parameter a gradient, if necessary zeros, so its optimizers apply weight decay to parameters that
no sample uses. torch's optimizers skip parameters without a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from harness.deepspeed.flat_tensors import EngineOptimizer, parameter_slices, updated_tensors
from harness.topology.agreement import all_gather_object


class UnusedParameters:
    """The trained parameters that never had a gradient on any rank; all ranks create one.

    Attributes:
        names: id of a trained parameter on this rank -> its name; a tied parameter has the same name on all stages.
        used: names of parameters with a gradient on this rank in the first step.
        pieces: id of a tensor that the optimizer updates -> (first element, length, whether a gradient came later) of
            each unused parameter in it.
    """

    def __init__(self, module: nn.Module, optimizer: EngineOptimizer) -> None:
        self.names = _names(module)
        self.used: set[str] = set()
        self.pieces: dict[int, list[tuple[int, int, Tensor]]] = {}
        self._parameters = [p for p in module.parameters() if id(p) in self.names]
        self._optimizer = optimizer
        self._agreed = False
        self._before: list[tuple[Tensor, Tensor, Tensor]] = []

    def find(self, found: Callable[[nn.Parameter], Tensor | None]) -> None:
        """In the first step, find the parameters that no rank has used, before missing gradients become zeros.

        All ranks call it. `found` returns a parameter's gradient, or None if this rank computed none.
        """
        if not self._agreed:
            self.used |= {self.names[id(p)] for p in self._parameters if found(p) is not None}
            self._agree()

    def note_first_gradients(self) -> None:
        """Record each parameter's first gradient, in an engine that does not keep gradients until the update."""

        def note(parameter: nn.Parameter) -> None:
            self.used.add(self.names[id(parameter)])
            # Otherwise it would run in every backward pass.
            handles.pop(id(parameter)).remove()

        handles = {id(p): p.register_post_accumulate_grad_hook(note) for p in self._parameters}

    def _agree(self) -> None:
        """Agree on the unused parameters; all ranks call it. Sends only names, in two collectives."""
        self._agreed = True
        # Two rounds: first the names that some rank has not used, usually none; then which of them another has used.
        somewhere = {name for row in all_gather_object(sorted(set(self.names.values()) - self.used)) for name in row}
        # The same decision on all ranks.
        if not somewhere:
            return
        unused = somewhere - {name for row in all_gather_object(sorted(somewhere & self.used)) for name in row}
        for updated in updated_tensors(self._optimizer):
            for local in parameter_slices(updated):
                if local.length and self.names.get(id(local.parameter)) in unused:
                    used = torch.zeros((), dtype=torch.bool, device=updated.tensor.device)
                    self.pieces.setdefault(id(updated.tensor), []).append((local.offset, local.length, used))

    @contextmanager
    def kept(self, optimizers: Sequence[Optimizer]) -> Iterator[None]:
        """Undo the effect of `optimizers` on unused parameters in this context."""
        if not self._agreed:
            self._agree()
        with ExitStack() as stack:
            # By hooks on `step`: DeepSpeed's ZeRO optimizers step once for each part, which gets its gradient just
            # before.
            for optimizer in optimizers if self.pieces else ():
                stack.callback(optimizer.register_step_pre_hook(self._copy).remove)
                stack.callback(optimizer.register_step_post_hook(self._restore).remove)
            yield

    @torch.no_grad()
    def _copy(self, optimizer: Optimizer, *_: object) -> None:
        for values, gradient, used in self._unused_in(optimizer):
            # DeepSpeed fills in zeros, so any other value (even NaN) shows that a sample has used the parameter. The
            # answer stays on the device.
            used |= gradient.count_nonzero() > 0
            self._before.append((values, values.clone(), used))

    @torch.no_grad()
    def _restore(self, *_: object) -> None:
        for values, before, used in self._before:
            values.copy_(torch.where(used, values, before))
        self._before.clear()

    def _unused_in(self, optimizer: Optimizer) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield (values, gradient, used) of each piece that the optimizer is about to decay."""
        for group in optimizer.param_groups:
            for tensor in group["params"] if group.get("weight_decay") else ():
                for offset, length, used in self.pieces.get(id(tensor), ()):
                    if tensor.grad is not None:
                        yield _piece(tensor.data, offset, length), _piece(tensor.grad, offset, length), used


def _piece(tensor: Tensor, offset: int, length: int) -> Tensor:
    return tensor if length == tensor.numel() else tensor.view(-1)[offset : offset + length]


def _names(module: nn.Module) -> dict[int, str]:
    names = {id(p): name for name, p in module.named_parameters() if p.requires_grad}
    # Each stage names its copy of a tied weight after its own layer. Under different names, a weight that only another
    # stage uses would count as unused here.
    for key, weights in getattr(module, "__dict__", {}).get("tied_modules", {}).items():
        for index, parameter in enumerate(weights.parameters()):
            if id(parameter) in names:
                names[id(parameter)] = f"{key}[{index}]"
    return names
