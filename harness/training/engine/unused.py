"""Parameters that no sample has used yet are not decayed, as in torch, which leaves out parameters without a gradient.

DeepSpeed steps on flat tensors of many parameters, in which one without a gradient has a gradient of zeros; the
optimizer then decays it. So what is unused is put back after each step. Before the first step all ranks agree on the
parameters of which none has a gradient. Usually there are none, and nothing is done in any step. One that is used
later has a gradient that is not zero, and is decayed from then on.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor, nn
from torch.optim import Optimizer

from harness.deepspeed.engine import inner_optimizers
from harness.deepspeed.flat_tensors import run_of_each
from harness.deepspeed.gradient_reduction import StepGradients, before_reduction
from harness.topology.agreement import values_of_all


class UnusedParameters:
    """Keeps the parameters of an engine that have had no gradient as they are; all ranks make one.

    Attributes:
        names: of the trained parameters on this rank, by their ids; a tied one has the same on all stages.
        used: names of those that have had a gradient on this rank, before the first step.
        pieces: for each tensor that the optimizer steps on, by its id, what belongs to unused parameters: where it
            begins, its length, and whether it has had a gradient by now.
    """

    def __init__(self, engine: DeepSpeedEngine) -> None:
        """Watch which parameters are used in the first step."""
        self.names = _names(engine.module)
        self.used: set[str] = set()
        self.pieces: dict[int, list[tuple[int, int, Tensor]]] = {}
        self._engine = engine
        self._agreed = False
        self._before: list[tuple[Tensor, Tensor, Tensor]] = []
        if isinstance(engine, PipelineEngine):  # a stage puts weight gradients off, and calls hooks without any
            before_reduction(engine, self._look)
        else:
            for parameter in engine.module.parameters():
                if id(parameter) in self.names:
                    self._note_first(parameter)
        for optimizer in inner_optimizers(engine):
            optimizer.register_step_pre_hook(self._keep)
            optimizer.register_step_post_hook(self._put_back)

    def _look(self, gradients: StepGradients) -> None:
        """Agree, where all gradients of the first step are there and none is reduced; all ranks call it."""
        if not self._agreed:
            trained = (p for p in self._engine.module.parameters() if id(p) in self.names)
            self.used |= {self.names[id(p)] for p in trained if gradients.found(p) is not None}
            self._agree()

    def _note_first(self, parameter: nn.Parameter) -> None:
        def note(used: Tensor) -> None:
            self.used.add(self.names[id(used)])
            handle.remove()

        handle = parameter.register_post_accumulate_grad_hook(note)

    def _agree(self) -> None:
        """Find the parameters that no rank has used; all ranks call it."""
        self._agreed = True
        somewhere = {name for row in values_of_all(sorted(set(self.names.values()) - self.used)) for name in row}
        if not somewhere:  # known alike on all ranks
            return
        unused = somewhere - {name for row in values_of_all(sorted(somewhere & self.used)) for name in row}
        for tensor, run in run_of_each(self._engine.optimizer):
            if run.length and self.names.get(id(run.parameter)) in unused:
                used = torch.zeros((), dtype=torch.bool, device=tensor.device)
                self.pieces.setdefault(id(tensor), []).append((run.offset, run.length, used))

    @torch.no_grad()
    def _keep(self, optimizer: Optimizer, *_: object) -> None:
        """Copy what is unused, before a step of the optimizer that would decay it."""
        if not self._agreed:
            self._agree()
        for values, gradient, used in self._unused_in(optimizer):
            used |= gradient.count_nonzero() > 0
            self._before.append((values, values.clone(), used))

    @torch.no_grad()
    def _put_back(self, *_: object) -> None:
        for values, before, used in self._before:
            values.copy_(torch.where(used, values, before))
        self._before.clear()

    def _unused_in(self, optimizer: Optimizer) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield values, gradient and use of each piece that the optimizer is about to decay."""
        for group in optimizer.param_groups if self.pieces else ():
            for tensor in group["params"] if group.get("weight_decay") else ():
                for offset, length, used in self.pieces.get(id(tensor), ()):
                    if tensor.grad is not None:
                        yield _piece(tensor.data, offset, length), _piece(tensor.grad, offset, length), used


def _piece(tensor: Tensor, offset: int, length: int) -> Tensor:
    return tensor if length == tensor.numel() else tensor.view(-1)[offset : offset + length]


def _names(module: nn.Module) -> dict[int, str]:
    names = {id(p): name for name, p in module.named_parameters() if p.requires_grad}
    for key, weights in getattr(module, "__dict__", {}).get("tied_modules", {}).items():
        for index, parameter in enumerate(weights.parameters()):
            if id(parameter) in names:
                names[id(parameter)] = f"{key}[{index}]"
    return names
