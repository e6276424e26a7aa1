"""Determine on which values an optimizer's update of one weight depends.

ZeRO flattens parameters and cuts the flat tensor, tensor parallelism cuts parameters, and a pipeline stage has only
some of them. So an update must not depend on values of another rank. No list of class names can tell: the optimizer
makes a few steps on small parameters, then on the same values in other pieces, and the results are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from harness.errors import UserError

SHAPES = ((), (1 << 12,), (128, 128), (2, 128, 128), (8, 8, 16, 16))
"""Shape of a trial parameter by number of dimensions, large enough for optimizers that skip small parameters."""
CUTS = (0.3, 0.75)  # where the flat tensor of all trial parameters is cut, as ranks cut it under ZeRO
STEPS = 3
TOLERANCE = 1e-5  # of the largest change: another order of float32 operations may differ by rounding


class Scope(IntEnum):
    """The values on which the update of a weight depends, besides the weight's own."""

    ELEMENT = 0
    """None: each weight is updated by itself, as in most optimizers."""
    TENSOR = 1
    """The weights of the same parameter, as for norms or factors of whole tensors."""
    MODEL = 2
    """The weights of all parameters (Prodigy)."""


def scope_of(make: Callable[[list[Tensor]], Optimizer], parameters: Sequence[Tensor]) -> Scope:
    """Return the scope of an optimizer's update.

    Args:
        make: makes the optimizer, without state, over one group of parameters.
        parameters: the group's parameters; the trial parameters have the same numbers of dimensions.

    Raises:
        UserError: the optimizer cannot make a step without a closure, changes nothing, or draws random numbers.
    """
    dims = sorted({min(parameter.dim(), len(SHAPES) - 1) for parameter in parameters})
    shapes = [SHAPES[dim] for dim in (*dims, dims[-1])]  # at least two parameters, to see whether they are independent
    generator = torch.Generator().manual_seed(0)

    def drawn(scale: float) -> list[Tensor]:
        device = parameters[0].device
        values = [torch.randn(shape, generator=generator) * scale * 4**index for index, shape in enumerate(shapes)]
        return [value.to(device) for value in values]

    start = drawn(0.1)
    gradients = [drawn(0.1 * 2**step) for step in range(STEPS)]
    kind = type(make(start)).__name__
    try:
        together, again = (_after(make, start, gradients) for _ in range(2))
    except Exception as error:  # the user's class may raise anything
        raise UserError(f"optimizers: {kind} cannot make a step here: {error}: use another one") from error
    changes = _flat(together) - _flat(start)
    if not changes.abs().max():
        raise UserError(f"optimizers: {kind} does not change the parameters of its groups: use another one")
    if not torch.equal(_flat(together), _flat(again)):
        raise UserError(f"optimizers: {kind} draws random numbers, which would differ between ranks: use another one")
    limit = TOLERANCE * float(changes.abs().max())

    def agrees(found: Callable[[], Tensor]) -> bool:
        try:
            return float((found() - _flat(together)).abs().max()) <= limit
        except Exception:  # the user's class may not be able to update a vector
            return False

    if agrees(lambda: _in_pieces(make, start, gradients)):
        return Scope.ELEMENT
    alone = [list(parts) for parts in zip(start, *gradients, strict=True)]
    if agrees(lambda: torch.cat([_flat(_after(make, [first], [[g] for g in rest])) for first, *rest in alone])):
        return Scope.TENSOR
    return Scope.MODEL


def _after(
    make: Callable[[list[Tensor]], Optimizer], start: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]]
) -> list[Tensor]:
    """Return the values after one step for each row of gradients [steps][parameters]."""
    parameters = [nn.Parameter(value.clone()) for value in start]
    optimizer = make([*parameters])
    for of_step in gradients:
        for parameter, gradient in zip(parameters, of_step, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


def _in_pieces(
    make: Callable[[list[Tensor]], Optimizer], start: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]]
) -> Tensor:
    """Return the flat values after steps on flat pieces, one piece at a time in one optimizer, as under ZeRO."""
    pieces = [nn.Parameter(piece) for piece in _cut(_flat(start))]
    optimizer = make([*pieces])
    (group,) = optimizer.param_groups
    for of_step in gradients:
        for piece, gradient in zip(pieces, _cut(_flat(of_step)), strict=True):
            piece.grad = gradient
            group["params"] = [piece]
            optimizer.step()
    return _flat([piece.detach() for piece in pieces])


def _cut(flat: Tensor) -> list[Tensor]:
    places = [0, *(int(cut * flat.numel()) for cut in CUTS), flat.numel()]
    return [flat[start:stop].clone() for start, stop in pairwise(places)]


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])
