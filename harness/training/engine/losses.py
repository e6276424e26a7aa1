"""Losses that give the same number in every layout.

A loss here returns, for one micro-batch, the sum over what it counts (valid labels, or samples) times a weight. The
weight is chosen before the forward from the count of the whole global batch, so that the engine's mean over
micro-batches and data-parallel ranks is the mean over all that was counted, however it is spread.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, ClassVar, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from transformers.modeling_outputs import CausalLMOutput

from harness.data.batches.collate import IGNORED
from harness.errors import UserError
from harness.parallel.context.stretches import ALONE, ContextParallel
from harness.parallel.tensor.cross_entropy import vocab_parallel_cross_entropy
from harness.parallel.tiles import LossTiles
from harness.parallel.values import Value
from harness.resilience.process.activity import inside

AUX_LOSS = "aux_loss"
"""The name of the router loss, as transformers has it."""

Targets = tuple[Tensor, ...]
"""What the last stage gets beside the outputs, flat as DeepSpeed's pipeline wants it: (weight, rows, share, sources,
*labels).

weight: scalar, what each counted label or sample weighs. rows: scalar, how many samples of the micro-batch count; the
others fill its shape. share: scalar, the number of its samples (in evaluation: labels) over that of an average
micro-batch. sources: of each sample the number of its source, [batch]; none where they are not told apart.
"""


Outputs: TypeAlias = Any
"""What the last layer gives: a tensor or a tuple of tensors; each loss says which."""
Labels: TypeAlias = Any
"""A tensor or a tuple of tensors, likewise."""
LossFunction: TypeAlias = Callable[..., Tensor]
"""A user's own: of outputs and labels."""


def targets(
    labels: Labels, weight: float | Tensor, rows: int, share: float | Tensor = 1.0, sources: Sequence[int] = ()
) -> Targets:
    """Targets of numbers, or scalars on the device, and one or more tensors of labels."""
    weight, share = (torch.as_tensor(value, dtype=torch.float32) for value in (weight, share))
    return weight, torch.tensor(rows), share, torch.tensor(sources, dtype=torch.long), *_tensors(labels)


class SourceLosses:
    """Tells the losses of a micro-batch apart by the sources of its samples.

    What is reported are sums and numbers of labels, of each source two scalars: their means over micro-batches and
    data ranks give the mean loss of a source in the whole global batch.

    Attributes:
        names: of the sources; fewer than two are not told apart.
    """

    def __init__(self) -> None:
        self.names: Sequence[str] = ()
        self._found: dict[int, Tensor] = {}

    def begin(self) -> None:
        """Begin a micro-batch whose losses come in tiles."""
        self._found = {}

    def see(self, losses: Tensor, labels: Tensor, sources: Tensor, tile: int | None = None) -> None:
        """Note the losses of labels [batch, sequence], one source a row; `tile`: where those begin that are a tile's.

        A tile that is computed again, for the backward, is noted once.
        """
        if len(self.names) > 1:
            found = losses.new_zeros(2, len(self.names))
            if len(sources):
                both = torch.stack([losses.detach().sum(1), (labels != IGNORED).sum(1).float()])
                found.index_add_(1, sources, both)
            self._found = {0: found} if tile is None else {**self._found, tile: found}

    def reported(self) -> dict[str, Tensor | None]:
        """Return the sum of the losses and the number of labels of each source; None where no loss was seen."""
        if len(self.names) < 2:
            return {}
        tiles = list(self._found.values())
        flat = torch.stack(tiles).sum(0).flatten().unbind() if tiles else [None] * 2 * len(self.names)
        return dict(zip(self._keys(), flat, strict=True))

    def means(self, reported: Mapping[str, float]) -> dict[str, float]:
        """Return the mean loss of each source that has labels, of means of what was reported."""
        found = [reported.get(key, 0.0) for key in self._keys()]
        pairs = zip(self.names, found[: len(self.names)], found[len(self.names) :], strict=True)
        return {name: total / counted for name, total, counted in pairs if counted}

    def _keys(self) -> list[str]:
        return [f"{what} of source {number}" for what in ("loss", "labels") for number in range(len(self.names))]


class Loss(ABC):
    """A loss of one micro-batch, and what it counts.

    Attributes:
        reports: the names of what is reported besides.
    """

    reports: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def count(self, labels: Labels, rows: int, /) -> int:
        """How many labels or samples count in the first `rows` of these labels."""

    def units(self, inputs: Value, /) -> int:
        """Tokens of these inputs (or samples, of layers of a user's own), for the speed."""
        return _first(inputs).numel()

    @abstractmethod
    def __call__(self, outputs: Outputs, targets: Targets) -> Tensor:
        """Weighted sum of the losses, a scalar in float32."""

    def parts(self, _outputs: Outputs, /) -> dict[str, Tensor]:
        """Return what is reported of these outputs: scalars in float32, each a mean of the micro-batch."""
        return {}

    def of_tile(self, _targets: Targets, _logits: Tensor, _start: int, _stop: int, /) -> Tensor:
        """Return the sum of the losses of tokens `start` to `stop` - 1, of which these are the logits, if it can.

        Called with all such sums as outputs, the loss weighs them.
        """
        raise TypeError(f"{type(self).__name__} cannot be computed in tiles")


@dataclass(frozen=True)
class CausalLoss(Loss):
    """Cross entropy of the next token: position i predicts label i + 1; labels of -100 do not count.

    Attributes:
        vocab_size: ids of the vocabulary.
        group: the tensor-parallel group if the logits are this rank's part of the vocabulary, else None.
        by_source: tells the losses of the data's sources apart.
        context: the ranks that share the sequence: logits are those of this rank's stretch, labels are all.
    """

    vocab_size: int
    group: dist.ProcessGroup | None
    context: ContextParallel = ALONE
    by_source: SourceLosses = field(default_factory=SourceLosses, compare=False)

    def count(self, labels: Tensor, rows: int) -> int:
        """Labels that are predicted and valid."""
        return int((labels[:rows, 1:] != IGNORED).sum())

    def __call__(self, outputs: Tensor, targets: Targets) -> Tensor:
        """Weighted sum over valid labels; outputs [batch, sequence, vocabulary or a part], labels [batch, sequence].

        Padding rows have only label -100. Outputs may also be the sum that `of_tile` has made of all tiles.
        """
        total = outputs if outputs.dim() == 0 else self._sum(targets, outputs)
        return total * targets[0]

    def of_tile(self, targets: Targets, logits: Tensor, start: int, stop: int) -> Tensor:
        return self._sum(targets, logits, (start, stop))

    def _sum(self, targets: Targets, logits: Tensor, tile: tuple[int, int] | None = None) -> Tensor:
        """Return the sum of the losses of this rank's tokens, or of a tile of them, from their logits."""
        sources, labels = targets[3:]
        wanted = functional.pad(labels[:, 1:], (0, 1), value=IGNORED)  # the logits stay as they are: no copy
        wanted = self.context.own(wanted)[:, slice(*(tile or (None, None)))]
        size = self.vocab_size if self.group is not None else logits.shape[-1]
        losses = vocab_parallel_cross_entropy(logits, wanted, self.group, size)
        self.by_source.see(losses, wanted, sources, None if tile is None else tile[0])
        return losses.sum()


@dataclass(frozen=True)
class RouterLoss(Loss):
    """A causal loss, and with it the router loss that the model makes of a whole micro-batch.

    The router loss of an optimizer step is the mean over its micro-batches, as transformers' Trainer has it; that of an
    evaluation is the mean over its micro-batches, each by its number of labels.

    Attributes:
        causal: the cross entropy, or a user's own loss of the logits.
        coefficient: by which the router loss is multiplied.
    """

    causal: CausalLoss | LogitsLoss
    coefficient: float
    reports: ClassVar[tuple[str, ...]] = (AUX_LOSS,)

    def count(self, labels: Tensor, rows: int) -> int:
        """Labels that are predicted and valid."""
        return self.causal.count(labels, rows)

    def __call__(self, outputs: tuple[Tensor, Tensor], targets: Targets) -> Tensor:
        """Return the causal loss, plus the share of this micro-batch in the router loss; outputs (logits, router
        loss)."""
        logits, router_loss = outputs
        return self.causal(logits, targets) + self.coefficient * router_loss.float() * targets[2]

    def of_tile(self, targets: Targets, logits: Tensor, start: int, stop: int) -> Tensor:
        return self.causal.of_tile(targets, logits, start, stop)

    def parts(self, outputs: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """Return the router loss, before it is multiplied."""
        return {AUX_LOSS: outputs[1].detach().float()}


@dataclass(frozen=True)
class MeanLoss(Loss):
    """A user's own `loss_fn(outputs, labels)` that returns the mean over the samples it is given."""

    loss_fn: LossFunction

    def count(self, _labels: Labels, rows: int) -> int:
        """Return the number of samples."""
        return rows

    def units(self, inputs: Value) -> int:
        """Return the number of samples."""
        return _first(inputs).shape[0]

    def __call__(self, outputs: Outputs, targets: Targets) -> Tensor:
        """Mean over the rows that count, times their number and weight."""
        weight, rows, _, _, *labels = targets
        n = _first(outputs).shape[0]
        if not torch.is_grad_enabled():  # in training all rows count, and asking would wait for the device
            n = int(rows)
        if n == 0:
            return weight * 0.0
        kept = tuple(label[:n] for label in labels)
        return _called(self.loss_fn, _head(outputs, n), kept[0] if len(kept) == 1 else kept) * n * weight


@dataclass(frozen=True)
class LogitsLoss(Loss):
    """A user's own loss of a decoder's logits: `loss_fn(logits, labels)`, the mean over the samples it is given.

    A function that takes `num_items_in_batch` is given the number by which to divide its sum over the valid labels, so
    that it is a mean over all of these in the global batch, as with HuggingFace's `compute_loss_func`.

    Attributes:
        loss_fn: called with whole logits [batch, sequence, vocabulary] and labels [batch, sequence], not shifted.
        context: the ranks that share the sequence: each joins the logits and counts its share of the loss.
    """

    loss_fn: Callable[..., Tensor]
    context: ContextParallel = ALONE

    @cached_property
    def per_label(self) -> bool:
        """Whether the function is given what to divide by."""
        return "num_items_in_batch" in inspect.signature(self.loss_fn).parameters

    def count(self, labels: Tensor, rows: int) -> int:
        """Labels that are predicted and valid, or samples."""
        return int((labels[:rows, 1:] != IGNORED).sum()) if self.per_label else rows

    def __call__(self, outputs: Tensor, targets: Targets) -> Tensor:
        """Return the loss of the rows that count, in float32, weighted."""
        weight, _, _, _, labels = targets
        outputs = self.context.join(outputs, labels.shape[1])
        if not self.per_label:
            return MeanLoss(self.loss_fn)(outputs, targets) / self.context.size
        return _called(self.loss_fn, outputs, labels, num_items_in_batch=1 / weight) / self.context.size


def losses_by_source(loss: Loss) -> SourceLosses | None:
    """Return what tells the losses of the data's sources apart; None for a loss of the user's own."""
    causal = loss.causal if isinstance(loss, RouterLoss) else loss
    return causal.by_source if isinstance(causal, CausalLoss) else None


def logits_loss(
    loss_fn: LossFunction | None, compute_loss_func: LossFunction | None, smoothing: float = 0.0
) -> LogitsLoss | None:
    """Return the loss that a user gives for a HuggingFace model, by one name or by HuggingFace's, or that of smoothed
    labels; None for the model's own."""
    if loss_fn is not None and compute_loss_func is not None:
        raise UserError("loss_fn and compute_loss_func are both given: give only one")
    if smoothing:
        if loss_fn is not None or compute_loss_func is not None:
            raise UserError("--label_smoothing_factor has no effect on a loss of your own: smooth the labels in it")
        return LogitsLoss(partial(_smoothed, smoothing=smoothing))
    if compute_loss_func is None:
        return None if loss_fn is None else LogitsLoss(loss_fn)

    def of_logits(logits: Tensor, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
        loss: Tensor = compute_loss_func(CausalLMOutput(logits=logits), labels, num_items_in_batch=num_items_in_batch)
        return loss

    return LogitsLoss(of_logits)


def _smoothed(logits: Tensor, labels: Tensor, num_items_in_batch: Tensor, smoothing: float) -> Tensor:
    """Return the cross entropy with smoothed labels, as HuggingFace's; logits [batch, sequence, vocabulary] and labels
    [batch, sequence], not shifted."""
    predicted, wanted = logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()
    total = functional.cross_entropy(
        predicted, wanted, label_smoothing=smoothing, reduction="sum", ignore_index=IGNORED
    )
    return total / num_items_in_batch


def _called(loss_fn: LossFunction, *values: object, **named: object) -> Tensor:
    """Return what the user's own loss returns, in float32. It may take long: it is no hang within a step."""
    with inside("loss_fn"):
        loss: object = loss_fn(*values, **named)
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss.reshape(()).float()
    kind = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
    raise UserError(f"loss_fn returned {kind}: it must return one number in a tensor")


def _tensors(value: Value) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)


def _first(value: Value) -> Tensor:
    return _tensors(value)[0]


def _head(value: Value, rows: int) -> Value:
    return value[:rows] if isinstance(value, Tensor) else tuple(tensor[:rows] for tensor in value)


class GuardedLoss:
    """A loss that remembers whether it was finite; with `spoils` its gradient is NaN where it was not.

    Attributes:
        observer: called with the outputs and targets of each micro-batch, if set.
        reported: what the loss reports of the last micro-batch besides; None for what it has not seen.
        release: lets go of outputs that an engine keeps; called when the loss is known.
        tiles: lets the last layer compute the loss, which then takes the place of its outputs.
    """

    def __init__(self, loss: Loss, *, spoils: bool, tiles: LossTiles | None = None) -> None:
        self.loss = loss
        self.tiles = tiles
        self.spoils = spoils
        self.count, self.units = loss.count, loss.units
        self._parts: Mapping[str, Tensor | None] = dict.fromkeys(loss.reports)
        self.observer: Callable[[Outputs, Targets], None] | None = None
        self.release: Callable[[], None] = lambda: None
        self._finite: Tensor | None = None

    @property
    def reported(self) -> dict[str, Tensor | None]:
        """See above; the names are the same on all stages."""
        sources = losses_by_source(self.loss)
        return {**self._parts, **({} if sources is None else sources.reported())}

    def expect(self, targets: Targets | None) -> None:
        """Tell the last layer what a micro-batch is to learn before it passes through; None behind it."""
        if self.tiles is not None:
            if (sources := losses_by_source(self.loss)) is not None and targets is not None:
                sources.begin()
            # whoever watches needs the logits themselves
            is_watched = self.observer is not None
            self.tiles.loss = None if targets is None or is_watched else partial(self.loss.of_tile, targets)

    def reset(self) -> None:
        """Forget the losses that were seen."""
        self._finite = None

    @property
    def finite(self) -> bool:
        """Whether all losses since the last reset were finite. Waits for the device."""
        return self._finite is None or bool(self._finite)

    def __call__(self, outputs: Outputs, targets: Targets) -> Tensor:
        """Return the loss unchanged, and keep whether it is finite."""
        if self.observer is not None:
            self.observer(outputs, targets)
        value = self.loss(outputs, targets)
        self._parts = self.loss.parts(outputs)
        self.release()
        if value.requires_grad:
            finite = value.detach().isfinite()
            self._finite = finite if self._finite is None else self._finite & finite
            if self.spoils:
                value.register_hook(lambda gradient: torch.where(finite, gradient, float("nan")))
        return value
