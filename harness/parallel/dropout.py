"""Dropout and other random numbers that do not depend on the layout.

While a pipeline layer runs in training, each random draw has its own seed, a function of the run's seed, the sample,
the layer, and the number of earlier draws in the layer. So the numbers depend neither on the rank and micro-batch of a
sample, nor on whether activation checkpointing runs the layer again. A tensor-parallel rank with a shard of a tensor
(some heads, some columns) draws for the whole tensor and takes its shard.

A torch function mode intercepts calls that draw. Dropout, attention with dropout, `rand_like`, `randn_like` and methods
that fill a tensor are drawn sample by sample. Any other call uses the global generator of torch, numpy or Python, which
is seeded for the micro-batch and the layer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, Self, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

from harness.parallel.comm import TensorParallel
from harness.parallel.generators import default_generator, own_generators, seed_of

Split: TypeAlias = tuple[int, tuple[int, ...]]
"""A rank's index among the ranks that share a dimension, and each rank's number (or proportion) of entries."""
_active: ContextVar[RngMode | None] = ContextVar("active mode", default=None)


class RngMode(TorchFunctionMode, ABC):
    """Intercepts calls that draw random numbers; of nested modes, only the innermost acts."""

    def __enter__(self) -> Self:
        self._outer = _active.set(self)
        super().__enter__()  # type: ignore[no-untyped-call]  # torch gives it no types
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # torch gives it no types
        _active.reset(self._outer)

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        # torch takes this mode off while it handles a call. Calls from here reach only the outer modes, which must not
        # draw again.
        draw = _CAUGHT.get(func) if _active.get() is self else None
        return func(*args, **(kwargs or {})) if draw is None else draw(self, *args, **(kwargs or {}))

    @abstractmethod
    def fill(self, out: Tensor, method: str, /, *args: object, **options: object) -> Tensor:
        """Fill `out` with random numbers by one of its methods, and return it."""

    @abstractmethod
    def seed_kernel(self, shape: torch.Size, device: torch.device) -> None:
        """Seed the generator of `device` for a kernel that draws its own dropout mask of `shape`."""


class ShapeRecorder(RngMode):
    """Records the shape of each draw without drawing, for a layer on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[torch.Size] = []

    def fill(self, out: Tensor, _method: str, /, *_args: object, **_options: object) -> Tensor:
        """Record the shape of `out` and return it unfilled."""
        self.shapes.append(out.shape)
        return out

    def seed_kernel(self, shape: torch.Size, _device: torch.device) -> None:
        self.shapes.append(shape)


@dataclass(frozen=True, kw_only=True)
class RngKey:
    """The inputs that determine the random numbers of one micro-batch.

    Attributes:
        seed: the run's seed.
        first_sample: index of the micro-batch's first sample among all samples that the run consumes.
        samples: number of samples in the micro-batch.
        tensor: this rank's place in its tensor-parallel group.
        device: where the layers run.
    """

    seed: int
    first_sample: int
    samples: int
    tensor: TensorParallel
    device: torch.device

    @contextmanager
    def layer(self, index: int) -> Iterator[None]:
        """Key all draws of pipeline layer `index` in this context."""
        # The generators serve draws that `KeyedRng` does not catch.
        with own_generators(seed_of(self.seed, self.first_sample, index), self.device), KeyedRng(self, index):
            yield


@dataclass(kw_only=True, eq=False)
class RngKeys:
    """The keys of this rank's micro-batches, in the order of their forward passes.

    The k-th micro-batch of a global batch belongs to batch rank k % batch_ranks (see `BatchStream`).
    """

    seed: int
    micro_batch: int
    batch_rank: int
    batch_ranks: int
    tensor: TensorParallel
    device: torch.device

    def __post_init__(self) -> None:
        self.begin_step(0)

    def begin_step(self, consumed_samples: int) -> None:
        """Begin a step; `consumed_samples` counts the samples of all ranks in earlier steps."""
        self._first = consumed_samples + self.batch_rank * self.micro_batch
        # By model chunk, because each passes the micro-batches at its own times.
        self._passed: Counter[int] = Counter()

    def next(self, chunk: int = 0) -> RngKey:
        """Return the key of this rank's next micro-batch of the step for a model chunk."""
        # Batch ranks take micro-batches in turn, so this rank's next one is `batch_ranks` micro-batches further on.
        first = self._first + self._passed[chunk] * self.batch_ranks * self.micro_batch
        self._passed[chunk] += 1
        return RngKey(
            seed=self.seed, first_sample=first, samples=self.micro_batch, tensor=self.tensor, device=self.device
        )


class KeyedRng(RngMode):
    """Draws each random number from the key of a micro-batch and the index of a layer.

    Attributes:
        whole: the shapes of the uncut layer's draws, in order, if tensor-parallel ranks hold shards of them.
        splits: ways in which tensor-parallel ranks split widths of the layer: entries of each rank, in rank order.
        tokens, heads: how context ranks split the sequence and the attention heads; None if they do not.
    """

    def __init__(self, key: RngKey, layer: int) -> None:
        super().__init__()
        self.key = key
        self.layer = layer
        self.whole: Sequence[torch.Size] = ()
        self.splits: Sequence[tuple[int, ...]] = ()
        self.tokens: Split | None = None
        self.heads: Split | None = None
        # A recomputation of the layer enters a new mode, so it counts from 0 again and draws the same numbers.
        self._count = 0

    def fill(self, out: Tensor, method: str, /, *args: object, **options: object) -> Tensor:
        """Fill `out` with this rank's shard of the numbers that the uncut layer would draw."""
        whole, starts, number, variant = self._next_shape(out.shape)
        if not out.numel():
            return out
        # Sample by sample, so that numbers do not depend on the micro-batch in which a sample is. A first dimension of
        # samples x tokens counts as well: the rows of a sample are consecutive.
        per_sample = out.dim() > 0 and out.shape[0] % self.key.samples == 0 == whole[0] % self.key.samples
        samples = self.key.samples if per_sample else 1
        parts = out.unflatten(0, (samples, -1)).unbind() if per_sample else [out]
        shape = torch.Size((whole[0] // samples, *whole[1:])) if per_sample else whole
        generator = torch.Generator(out.device)
        for index, part in enumerate(parts):
            generator.manual_seed(self._seed(number, index, variant))
            if part.shape == shape:
                getattr(part, method)(*args, generator=generator, **options)
            else:
                # The whole tensor, of which this rank keeps its shard: a generator cannot skip to an entry.
                drawn = torch.empty(shape, dtype=out.dtype, device=out.device)
                getattr(drawn, method)(*args, generator=generator, **options)
                for dim, start in starts.items():
                    drawn = drawn.narrow(dim, start, part.shape[dim])
                part.copy_(drawn)
        return out

    def seed_kernel(self, shape: torch.Size, device: torch.device) -> None:
        """Seed the generator of `device` for the micro-batch, the layer and the number of the draw."""
        whole, _, number, variant = self._next_shape(shape)
        # The kernel cannot draw the mask of the whole tensor. At least the ranks' masks differ.
        if whole != shape:
            variant = self.key.tensor.rank + self.key.tensor.size * (self.heads[0] if self.heads is not None else 0)
        default_generator(device).manual_seed(self._seed(number, 0, variant))

    def _next_shape(self, own: torch.Size) -> tuple[torch.Size, dict[int, int], int, int]:
        """Find the uncut tensor to which the next draw belongs, and this rank's shard of it.

        Returns the shape of the whole tensor, the start of this rank's shard along each split dimension, the number of
        the draw, and a number that enters the seed: 0, or different on each rank if its shard is unknown.
        """
        number = self._count
        self._count += 1
        whole = self.whole[number] if number < len(self.whole) else own
        differing = [dim for dim, (a, b) in enumerate(zip(whole, own, strict=False)) if a != b]
        several = len(differing) > 1 and self.tokens is None
        # Not known to be split, so all ranks draw the same numbers.
        if len(whole) != len(own) or not differing or several:
            return own, {}, number, 0
        starts = {}
        samples = self.key.samples
        for dim in differing:
            per_sample = samples if dim == 0 and own[0] % samples == 0 == whole[0] % samples else 1
            start = self._start(whole[dim] // per_sample, own[dim] // per_sample)
            if start is None:
                return own, {}, number, 1 + self.key.tensor.rank
            starts[dim] = start
        return whole, starts, number, 0

    def _start(self, whole: int, own: int) -> int | None:
        """Return the start of this rank's `own` of `whole` entries; None if no known split gives `own` entries.

        A dimension may be split twice: tokens over context ranks, then over tensor-parallel ranks; or heads over
        tensor-parallel ranks, then over context ranks.
        """
        tensor: list[Split] = [(self.key.tensor.rank, widths) for widths in self.splits]
        tensor.append((self.key.tensor.rank, (1,) * self.key.tensor.size))
        context = [split for split in (self.tokens, self.heads) if split is not None]
        by_tokens = self.tokens is not None and sum(self.tokens[1]) == whole
        first, then = (context, tensor) if by_tokens else (tensor, context)
        for split in (*first, *then):
            if (found := _range_of(split, whole)) is not None and found[1] == own:
                return found[0]
        for one, other in product(first, then):
            outer = _range_of(one, whole)
            inner = _range_of(other, outer[1]) if outer is not None else None
            if outer is not None and inner is not None and inner[1] == own:
                return outer[0] + inner[0]
        return None

    def _seed(self, number: int, sample: int, variant: int) -> int:
        return seed_of(self.key.seed, self.key.first_sample + sample, self.layer, number, variant)


def expect_shapes(
    shapes: Callable[[], Sequence[torch.Size]], splits: Sequence[tuple[int, ...]] = (), tokens: Split | None = None
) -> None:
    """Tell the running layer which shapes its uncut form would draw.

    Args:
        shapes: returns the shapes in the order of the draws; called only if the layer is split over ranks.
        splits: how tensor-parallel ranks split its widths, if not equally.
        tokens: how context ranks split the sequence; None if they do not.
    """
    active = _active.get()
    if isinstance(active, KeyedRng) and (active.key.tensor.size > 1 or tokens is not None):
        active.whole = shapes()
        active.splits = splits
        active.tokens = tokens


@contextmanager
def expect_heads(rank: int, widths: tuple[int, ...]) -> Iterator[None]:
    """Tell the running layer how context ranks split the heads for which it draws in this context."""
    active = _active.get()
    if isinstance(active, KeyedRng):
        active.heads = rank, widths
    try:
        yield
    finally:
        if isinstance(active, KeyedRng):
            active.heads = None


def _range_of(split: Split, whole: int) -> tuple[int, int] | None:
    """Return start and size of a rank's range of `whole` entries; None if the proportions do not divide them."""
    rank, widths = split
    total = sum(widths)
    if any(width * whole % total for width in widths):
        return None
    return sum(widths[:rank]) * whole // total, widths[rank] * whole // total


def rng_of_layer(index: int) -> AbstractContextManager[None]:
    """Draw as pipeline layer `index` from its first draw on, for a computation that several layers repeat."""
    active = _active.get()
    return active.key.layer(index) if isinstance(active, KeyedRng) else nullcontext()


@contextmanager
def separate_rng(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Enter `own_generators` for a computation that does not belong to the running layer."""
    # The layer's mode stays entered, but acts only while it is the active one: its count of draws must not move.
    outer = _active.set(None)
    try:
        with own_generators(seed, device):
            yield
    finally:
        _active.reset(outer)


def has_dropout(module: nn.Module) -> bool:
    """Return whether a module contains a dropout layer with a probability above 0."""
    # The base class of all dropout layers of torch has no public name.
    return any(isinstance(child, _DropoutNd) and child.p > 0 for child in module.modules())


def _dropout(mode: RngMode, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if p == 0 or not training:
        return input
    dropped = mode.fill(torch.empty(input.shape, dtype=torch.bool, device=input.device), "bernoulli_", p)
    scale = 1 / (1 - p) if p < 1 else 0.0
    return (input.mul_(scale) if inplace else input * scale).masked_fill_(dropped, 0.0)


def _attention(
    mode: RngMode,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute attention as torch documents `scaled_dot_product_attention`, with keyed dropout."""
    # On a GPU, torch's kernels draw the dropout mask themselves from the generator's seed, so it can only be seeded. On
    # the CPU there is no such kernel, and dropout is drawn sample by sample.
    if query.device.type != "cpu" or not dropout_p:
        if dropout_p:
            mode.seed_kernel(torch.Size((*query.shape[:-1], key.shape[-2])), query.device)
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = (x.repeat_interleave(groups, dim=-3) for x in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        # Not -inf: the softmax of a row without any visible key (padding) would be NaN.
        scores = scores.masked_fill(~attn_mask, torch.finfo(scores.dtype).min)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return _dropout(mode, scores.softmax(-1), dropout_p) @ value


def _fill(mode: RngMode, tensor: Tensor, *args: object, method: str, **options: object) -> Tensor:
    # Drawn with a parameter for each entry, or by the caller's generator.
    if any(isinstance(value, Tensor) for value in (*args, *options.values())) or options.get("generator") is not None:
        filled: Tensor = getattr(tensor, method)(*args, **options)
        return filled
    options.pop("generator", None)
    return mode.fill(tensor, method, *args, **options)


def _like(mode: RngMode, tensor: Tensor, *, method: str, **options: Any) -> Tensor:
    return mode.fill(torch.empty_like(tensor, **options), method)


_FILLING = ("uniform_", "normal_", "bernoulli_", "exponential_", "log_normal_", "cauchy_", "geometric_", "random_")
_CAUGHT: dict[Callable[..., object], Callable[..., Tensor]] = {
    F.dropout: _dropout,
    torch.dropout: _dropout,
    F.scaled_dot_product_attention: _attention,
    torch.rand_like: partial(_like, method="uniform_"),
    torch.randn_like: partial(_like, method="normal_"),
    **{getattr(Tensor, name): partial(_fill, method=name) for name in _FILLING},
}
