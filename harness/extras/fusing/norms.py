"""Norms of a GPU in one kernel, found by trial.

Families write a norm in a dozen ways: with products and roundings in another order, weights minus one, without a
weight, with the mean subtracted. So a module is not recognised by its code. A copy of it with random weights computes
small inputs, and its outputs and gradients are compared with those of the norms that torch has kernels for. What
differs from all of them, or takes more than one tensor, stays as it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from harness.device.kernels import trial
from harness.extras.fusing import kernels
from harness.parallel.comm import Context

WIDTH = 24
"""Width of a trial's inputs; the module's own if it computes no other."""
SCALES = (1e-3, 1.0, 30.0)
"""Of a trial's inputs: squares of the smallest are as large as a norm's epsilon."""
CLOSE = 1e-4
"""Largest difference in float32, relative to the largest value: sums in another order."""
ROUNDINGS = 2**-7
"""The same of each value in bf16, two units in the last place: a kernel rounds once, a family up to three times."""
PLAIN = (int, float, str, tuple, torch.dtype, type(None))
"""Types of attributes of a norm."""

Attributes: TypeAlias = tuple[tuple[str, object], ...]
Sizes: TypeAlias = tuple[tuple[str, tuple[int, ...] | None], ...]


@dataclass(frozen=True)
class Norm:
    """Computes (x - mean) / sqrt(mean square + epsilon) * (weight + offset) + bias over the last dimension.

    Attributes:
        centred: whether the mean is subtracted, as by a layer norm; otherwise it is a root-mean-square norm.
        weight, bias: names of the parameters [n]; None without.
        offset: 1 for weights that are stored minus one, else 0.
    """

    centred: bool
    weight: str | None
    bias: str | None
    offset: float
    epsilon: float

    @property
    def of_row(self) -> kernels.RowNorm:
        """The same for a kernel."""
        return kernels.RowNorm(self.epsilon, self.centred, self.offset)

    def __call__(self, module: nn.Module, *args: Tensor, **kwargs: Tensor) -> Tensor:
        """Return the norm of the one tensor that is given."""
        (x,) = args or kwargs.values()
        weight, bias = self.parameters_of(module)
        if (weight is not None and weight.dtype != x.dtype) or (bias is not None and bias.dtype != x.dtype):
            plain: Tensor = type(module).forward(module, x)
            return plain
        if not self.offset or weight is None:
            return self._of(x, weight, bias)
        if not self.centred and bias is None:
            # In the order in which rows lie in memory: queries and keys are often normalised with heads before tokens.
            order = [*sorted(range(x.dim() - 1), key=x.stride, reverse=True), x.dim() - 1]
            rows = x.permute(order)
            if takes_kernel(rows):
                normal: Tensor = _OffsetNorm.apply(rows, weight, self.of_row)  # type: ignore[no-untyped-call]
                return normal.permute(sorted(order, key=order.__getitem__))
        wide = weight.float() + self.offset
        return self._of(x.float(), wide, None if bias is None else bias.float()).type_as(x)

    def parameters_of(self, module: nn.Module) -> tuple[Tensor | None, Tensor | None]:
        """Return the weight and the bias of a module, as far as it has them."""
        weight: Tensor | None = None if self.weight is None else getattr(module, self.weight)
        bias: Tensor | None = None if self.bias is None else getattr(module, self.bias)
        return weight, bias

    def _of(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        if self.centred:
            return functional.layer_norm(x, x.shape[-1:], weight, bias, self.epsilon)
        return functional.rms_norm(x, x.shape[-1:], weight, self.epsilon)


def takes_kernel(x: Tensor) -> bool:
    """Return whether the kernel of norms can read a tensor [..., n]."""
    if type(x) is not Tensor or not x.numel() or x.shape[-1] > kernels.WIDEST or not kernels.usable(x.device):
        return False
    return kernels.row_stride(x) is not None


class _OffsetNorm(torch.autograd.Function):
    """A root-mean-square norm with weights that are stored minus `offset`.

    torch's kernel takes weights of the input's dtype alone, in which weight + offset would be rounded.
    """

    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, how: kernels.RowNorm) -> Tensor:
        normal, scales, _ = kernels.norm(x, weight, None, how)
        ctx.save_for_backward(x, weight, scales)
        ctx.how = how
        return normal

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scales = ctx.saved_tensors
        of_x, of_weight, _ = kernels.norm_backward(grad.contiguous(), x, weight, scales, ctx.how)
        return of_x, of_weight, None


def norm_of(module: nn.Module) -> Norm | None:
    """Return the norm that a module computes; None for any other module, and for torch's own."""
    described = vectors_of(module)
    if described is None or not takes(module, 1):
        return None
    return _tried(type(module), *described)  # type: ignore[arg-type]  # mypy takes the class for its instances


def vectors_of(module: nn.Module) -> tuple[Attributes, Sizes] | None:
    """Return the attributes of a module and the sizes of its parameters; None if it has more than these vectors."""
    if type(module).__module__.startswith("torch.") or any(True for _ in (*module.children(), *module.buffers())):
        return None
    attributes = {
        name: value for name, value in vars(module).items() if not name.startswith("_") and name != "training"
    }
    parameters = module._parameters  # noqa: SLF001  # torch has no public name for those that are None
    sizes = {name: None if each is None else tuple(each.shape) for name, each in parameters.items()}
    are_plain = all(isinstance(value, PLAIN) for value in attributes.values())
    if not are_plain or any(size is not None and len(size) != 1 for size in sizes.values()):
        return None
    return tuple(attributes.items()), tuple(sizes.items())


def takes(module: nn.Module, count: int) -> bool:
    """Return whether the forward of a module's class takes so many tensors and nothing else."""
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    return len(parameters) == count and all(each.kind is each.POSITIONAL_OR_KEYWORD for each in parameters)


@cache
def _tried(kind: type[nn.Module], attributes: Attributes, sizes: Sizes) -> Norm | None:
    names = [name for name, size in sizes if size is not None]
    weight, bias = next((name for name in names if name != "bias"), None), "bias" if "bias" in names else None
    if len(names) != (weight is not None) + (bias is not None):
        return None
    offsets = (0.0, 1.0) if weight else (0.0,)
    parts = product((False, True), offsets, epsilons(kind, attributes))
    candidates = [Norm(centred, weight, bias, offset, epsilon) for centred, offset, epsilon in parts]
    own = [size[0] for _, size in sizes if size] + [
        value[0] for _, value in attributes if isinstance(value, tuple) and value
    ]
    for width in (WIDTH, *own):
        try:
            with _disable_current_modes():  # also in a dry run, whose tensors have no values
                twins = [twin_of(kind, attributes, sizes, width, dtype) for dtype in (torch.float32, torch.bfloat16)]
                return next((norm for norm in candidates if all(_agrees(norm, twin, width) for twin in twins)), None)
        except Exception:  # whatever other modules do with these inputs
            continue
    return None


def epsilons(kind: type[nn.Module], attributes: Attributes) -> list[float]:
    """Return the small numbers of a norm: its attributes, and those written in its forward."""
    written = [*(value for _, value in attributes), *inspect.unwrap(kind.forward).__code__.co_consts]
    return list(dict.fromkeys(value for value in written if isinstance(value, float) and 0 < value < 0.01))


def twin_of(kind: type[nn.Module], attributes: Attributes, sizes: Sizes, width: int, dtype: torch.dtype) -> nn.Module:
    """Return a module with the attributes of another, and random parameters of this width."""
    generator = torch.Generator().manual_seed(0)
    twin = kind.__new__(kind)
    nn.Module.__init__(twin)
    for name, value in attributes:
        setattr(twin, name, value)
    for name, size in sizes:
        drawn = None if size is None else torch.randn(width, generator=generator, device="cpu").to(dtype)
        twin.register_parameter(name, None if drawn is None else nn.Parameter(drawn))
    return twin


@trial()
def _agrees(norm: Norm, twin: nn.Module, width: int) -> bool:
    """Return whether a norm gives a module's outputs and, in float32, its gradients."""
    kind = next(twin.parameters(), torch.empty(0, device="cpu")).dtype
    dtypes = [kind] if norm.weight else [torch.float32, torch.bfloat16]
    generator = torch.Generator().manual_seed(1)
    for scale, dtype, training in product(SCALES, dtypes, (True, False)):
        drawn = torch.randn((2, 3, width), generator=generator, device="cpu")
        inputs = (scale * (drawn + 0.5)).to(dtype).requires_grad_()
        twin.train(training)
        if not agree(norm(twin, inputs), twin(inputs), [inputs, *twin.parameters()], drawn, ROUNDINGS):
            return False
    return True


def agree(ours: Tensor, theirs: Tensor, trained: Sequence[Tensor], drawn: Tensor, roundings: float) -> bool:
    """Return whether a kernel and a family's code computed the same in a trial.

    In float32, gradients are compared too; in 16 bits, whose gradients are rounded sums, outputs alone.

    Args:
        trained: the tensors from which both outputs were computed.
        drawn: the gradient of the outputs.
        roundings: largest difference of an output in 16 bits, relative to its value.
    """
    if theirs.dtype != ours.dtype or theirs.shape != ours.shape:
        return False
    if trained[0].dtype != torch.float32:
        return torch.allclose(ours, theirs, rtol=roundings, atol=ROUNDINGS / 8)
    pairs = zip(
        (ours, *torch.autograd.grad((ours * drawn).sum(), trained)),
        (theirs, *torch.autograd.grad((theirs * drawn).sum(), trained)),
        strict=True,
    )
    return not any((one - other).abs().max() > CLOSE * other.abs().max() for one, other in pairs)
