"""Losses whose value does not depend on the layout.

A loss here returns, for one micro-batch, the sum over its valid labels (or samples) times a weight. The weight is
computed before the forward pass from the label count of the global batch. So the engine's mean over micro-batches and
data-parallel ranks is the mean over all valid labels, however these are spread over micro-batches.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from transformers.modeling_outputs import CausalLMOutput

from harness.batches.collate import IGNORED
from harness.errors import UserError
from harness.parallel.comm import gather_from_group
from harness.parallel.context.sequence_shards import ALONE, ContextParallel
from harness.parallel.tensor.cross_entropy import vocab_parallel_cross_entropy
from harness.parallel.tensor.sequence import widths_of
from harness.parallel.tiles import LossTiles
from harness.parallel.values import Value
from harness.resilience.process.activity import inside

AUX_LOSS = "aux_loss"
"""The name of the router loss in transformers."""

Targets = tuple[Tensor, ...]
"""The labels of a micro-batch with their weights, a flat tuple as DeepSpeed's pipeline requires: (weight, rows,
router_weight, sources, *labels). Only the last stage has them.

weight: scalar, the weight of each valid label or sample. rows: scalar, the number of samples that count; the others
are padding. router_weight: scalar, the weight of the router loss: the number of samples (in an evaluation: labels)
relative to an average micro-batch. sources: [batch], the source of each sample; empty if losses are not reported by
source.
"""


Outputs: TypeAlias = Any
"""The output of the last layer: a tensor or a tuple of tensors, depending on the loss."""
Labels: TypeAlias = Any
"""A tensor or a tuple of tensors, depending on the loss."""
LossFunction: TypeAlias = Callable[..., Tensor]
"""A user's function of outputs and labels."""


def targets(
    labels: Labels, weight: float | Tensor, rows: int, router_weight: float | Tensor = 1.0, sources: Sequence[int] = ()
) -> Targets:
    """Build Targets from numbers (or scalars on the device) and one or more tensors of labels [batch, ...]."""
    weight = torch.as_tensor(weight, dtype=torch.float32)
    router_weight = torch.as_tensor(router_weight, dtype=torch.float32)
    several = (labels,) if isinstance(labels, Tensor) else labels
    return weight, torch.tensor(rows), router_weight, torch.tensor(sources, dtype=torch.long), *several


class SourceLosses:
    """Collects the losses of a micro-batch by the data source of its samples.

    It reports two scalars for each source: the sum of its losses, and its number of labels. Their means over
    micro-batches and data ranks give the mean loss of a source in the whole global batch.

    Attributes:
        names: names of the sources.
        keys: names of the reported scalars: the sums of all sources, then their numbers of labels.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.keys = tuple(f"{what} of source {number}" for what in ("loss", "labels") for number in range(len(names)))
        self._found: dict[int, Tensor] = {}

    def begin(self) -> None:
        """Reset before a micro-batch whose losses come in tiles."""
        self._found = {}

    def record(self, losses: Tensor, labels: Tensor, sources: Tensor, tile: int | None = None) -> None:
        """Record `losses` [batch, sequence] of `labels` [batch, sequence]; `sources` [batch] has each row's source.

        `tile` is the first token of a tile of the sequence.
        """
        found = losses.new_zeros(2, len(self.names))
        # An evaluation passes no sources.
        if len(sources):
            both = torch.stack([losses.detach().sum(1), (labels != IGNORED).sum(1).float()])
            found.index_add_(1, sources, both)
        # By tile, so that one that the backward pass recomputes counts once.
        self._found = {0: found} if tile is None else {**self._found, tile: found}

    def reported(self) -> dict[str, Tensor]:
        """Return the scalar sum of losses and number of labels of each source in the last micro-batch, by key."""
        return dict(zip(self.keys, torch.stack(list(self._found.values())).sum(0).flatten().unbind(), strict=True))

    def means(self, reported: Mapping[str, float]) -> dict[str, float]:
        """Return the mean loss of each source with labels, from the averaged numbers of `reported`."""
        found = [reported.get(key, 0.0) for key in self.keys]
        pairs = zip(self.names, found[: len(self.names)], found[len(self.names) :], strict=True)
        return {name: total / counted for name, total, counted in pairs if counted}


class Loss(ABC):
    """A loss of one micro-batch, and the number of labels or samples that its mean divides by."""

    @property
    def is_cross_entropy(self) -> bool:
        """Whether the mean is a cross entropy per token, so that its exponential is the perplexity."""
        return True

    @property
    def reports(self) -> tuple[str, ...]:
        """Names of the numbers that `parts` returns."""
        return ()

    @abstractmethod
    def count(self, labels: Labels, rows: int, /) -> int:
        """Return the number of valid labels, or of samples, in the first `rows` samples."""

    def units(self, inputs: Value, /) -> int:
        """Return the number of tokens in these inputs (samples for a user's layers), for tokens_per_second."""
        return first_tensor(inputs).numel()

    @abstractmethod
    def __call__(self, outputs: Outputs, targets: Targets) -> Tensor:
        """Return the weighted sum of the losses, a float32 scalar."""

    def parts(self, _outputs: Outputs, /) -> dict[str, Tensor]:
        """Return further numbers to report: float32 scalars, each a mean over the micro-batch."""
        return {}

    def metrics(self, _parts: Mapping[str, float], /) -> dict[str, float]:
        """Return metrics under the user's names, from averages or sums of `parts` over micro-batches."""
        return {}

    def mean(self, total: float, counted: float, _parts: Mapping[str, float], /) -> float:
        """Return the loss of an evaluation from its sums of losses, of `count` and of `parts`."""
        return total / counted if counted else float("nan")

    def kept(self, outputs: Outputs, _targets: Targets, /) -> Outputs:
        """Return the outputs of a micro-batch in the form that an evaluation keeps.

        All ranks of the last stage's tensor-parallel and context groups call it.
        """
        return outputs

    def of_tile(self, _targets: Targets, _logits: Tensor, _start: int, _stop: int, /) -> Tensor:
        """Return the summed losses, a scalar, of tokens `start` to `stop` - 1 from logits [batch, tokens, vocabulary].

        `__call__` then gets the total of all tiles as outputs and weights it. TypeError if the loss has no tiles.
        """
        raise TypeError(f"{type(self).__name__} cannot be computed in tiles")


@dataclass(frozen=True)
class CausalLoss(Loss):
    """Cross entropy of the next token: position i predicts label i + 1; label -100 is ignored.

    Attributes:
        vocab_size: number of ids in the vocabulary.
        group: tensor-parallel group if logits are split over the vocabulary, else None.
        by_source: collects losses by data source; None if they are not reported by source.
        context: context-parallel ranks; logits cover this rank's tokens, labels the whole sequence.
    """

    vocab_size: int
    group: dist.ProcessGroup | None
    context: ContextParallel = ALONE
    by_source: SourceLosses | None = field(default=None, compare=False)

    @property
    def reports(self) -> tuple[str, ...]:
        return () if self.by_source is None else self.by_source.keys

    def count(self, labels: Tensor, rows: int) -> int:
        """Return the number of valid labels [batch, sequence]; a sample's first label has no prediction."""
        # Labels are still on the host when they are counted, so nothing waits for the device.
        return int((labels[:rows, 1:] != IGNORED).sum())

    def __call__(self, outputs: Tensor, targets: Targets) -> Tensor:
        """Return the weighted sum of the losses of valid labels.

        `outputs` are logits [batch, sequence, vocabulary or vocabulary shard], or the sum of `of_tile` over all tiles
        (a scalar); labels are [batch, sequence]. Padding rows have only label -100.
        """
        # A weighted sum, not a mean: micro-batches differ in their number of labels. With the weight of `Engine.weigh`
        # the result of the step is the mean over the labels of the global batch.
        weight, *_ = targets
        total = outputs if outputs.dim() == 0 else self._sum(targets, outputs)
        return total * weight

    def parts(self, _outputs: Tensor) -> dict[str, Tensor]:
        return {} if self.by_source is None else self.by_source.reported()

    def kept(self, outputs: Tensor, targets: Targets) -> Tensor:
        """Return the logits [batch, sequence, vocabulary] of all tokens."""
        outputs = self.context.join(outputs, targets[-1].shape[-1])
        if self.group is None:
            return outputs
        return gather_from_group(outputs, self.group, widths_of(self.vocab_size, self.group))

    def of_tile(self, targets: Targets, logits: Tensor, start: int, stop: int) -> Tensor:
        return self._sum(targets, logits, (start, stop))

    def _sum(self, targets: Targets, logits: Tensor, tile: tuple[int, int] | None = None) -> Tensor:
        """Return the summed loss of this rank's tokens, or of one tile of them."""
        _weight, _rows, _router_weight, sources, labels = targets
        # Shift the labels, not the logits: a slice of the logits would be copied, and they are the largest tensor.
        wanted = functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
        # After the shift: the last token of a shard predicts the first token of the next one.
        if self.context.size > 1:
            wanted = self.context.own(wanted)
        if tile is not None:
            wanted = wanted[:, slice(*tile)]
        size = self.vocab_size if self.group is not None else logits.shape[-1]
        losses = vocab_parallel_cross_entropy(logits, wanted, self.group, size)
        if self.by_source is not None:
            self.by_source.record(losses, wanted, sources, None if tile is None else tile[0])
        return losses.sum()


@dataclass(frozen=True)
class RouterLoss(Loss):
    """A loss of the logits plus the router loss (mixture of experts) of the whole micro-batch.

    An optimizer step averages the router loss over its micro-batches, as transformers' Trainer does. An evaluation
    weights each micro-batch by its number of labels.

    Attributes:
        causal: the cross entropy, or another loss of the logits.
        coefficient: factor of the router loss.
    """

    causal: Loss
    coefficient: float

    @property
    def reports(self) -> tuple[str, ...]:
        """The router loss, and the reports of the causal loss."""
        return AUX_LOSS, *self.causal.reports

    @property
    def is_cross_entropy(self) -> bool:
        return self.causal.is_cross_entropy

    def count(self, labels: Labels, rows: int) -> int:
        return self.causal.count(labels, rows)

    def __call__(self, outputs: tuple[Tensor, Tensor], targets: Targets) -> Tensor:
        """Return the causal loss plus this micro-batch's part of the router loss.

        `outputs` are the outputs for `causal`, and the router loss, a scalar.
        """
        logits, router_loss = outputs
        _weight, _rows, router_weight, *_ = targets
        return self.causal(logits, targets) + self.coefficient * router_loss.float() * router_weight

    def of_tile(self, targets: Targets, logits: Tensor, start: int, stop: int) -> Tensor:
        return self.causal.of_tile(targets, logits, start, stop)

    def parts(self, outputs: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """Return the router loss before its coefficient, a scalar, and the parts of the causal loss."""
        logits, router_loss = outputs
        return {AUX_LOSS: router_loss.detach().float(), **self.causal.parts(logits)}

    def metrics(self, parts: Mapping[str, float]) -> dict[str, float]:
        return self.causal.metrics(parts)

    def mean(self, total: float, counted: float, parts: Mapping[str, float]) -> float:
        """Return the causal loss of an evaluation, although `total` includes the router loss."""
        return self.causal.mean(total, counted, parts)

    def kept(self, outputs: tuple[Outputs, Tensor], targets: Targets) -> Outputs:
        return self.causal.kept(outputs[0], targets)


@dataclass(frozen=True)
class MeanLoss(Loss):
    """A user's `loss_fn(outputs, labels)`, which returns the mean over its samples."""

    loss_fn: LossFunction

    def count(self, _labels: Labels, rows: int) -> int:
        return rows

    def units(self, inputs: Value) -> int:
        return first_tensor(inputs).shape[0]

    def __call__(self, outputs: Outputs, targets: Targets) -> Tensor:
        """Return the mean over the samples that count, times their number and weight; `outputs` [batch, ...]."""
        weight, rows, _router_weight, _sources, *labels = targets
        n = first_tensor(outputs).shape[0]
        # In training all rows count, and int(rows) would make the host wait for the device.
        if not torch.is_grad_enabled():
            n = int(rows)
        # Only padding, of which the mean would be NaN.
        if n == 0:
            return weight * 0.0
        kept = tuple(label[:n] for label in labels)
        outputs = outputs[:n] if isinstance(outputs, Tensor) else tuple(tensor[:n] for tensor in outputs)
        return _call_loss(self.loss_fn, outputs, kept[0] if len(kept) == 1 else kept) * n * weight


@dataclass(frozen=True)
class LogitsLoss(Loss):
    """A user's loss of a decoder's logits, `loss_fn(logits, labels)`: the mean over its samples.

    A function with a parameter `num_items_in_batch` must divide its sum over the valid labels by that number, as with
    HuggingFace's `compute_loss_func`, which gives the mean over the global batch.

    Attributes:
        loss_fn: called with whole logits [batch, sequence, vocabulary] and labels [batch, sequence], not shifted.
        context: context-parallel ranks. Each gathers all logits, so the loss is divided by their number.
    """

    loss_fn: Callable[..., Tensor]
    context: ContextParallel = ALONE

    @cached_property
    def per_label(self) -> bool:
        """Whether the function takes `num_items_in_batch`."""
        return "num_items_in_batch" in inspect.signature(self.loss_fn).parameters

    def count(self, labels: Tensor, rows: int) -> int:
        """Return the number of valid labels [batch, sequence] if the function divides by it, else of samples."""
        return int((labels[:rows, 1:] != IGNORED).sum()) if self.per_label else rows

    def kept(self, outputs: Tensor, targets: Targets) -> Tensor:
        return self.context.join(outputs, targets[-1].shape[-1])

    def __call__(self, outputs: Tensor, targets: Targets) -> Tensor:
        """Return the weighted loss, a scalar; `outputs` are [batch, this rank's tokens, vocabulary]."""
        weight, _rows, _router_weight, _sources, labels = targets
        outputs = self.context.join(outputs, labels.shape[1])
        if not self.per_label:
            return MeanLoss(self.loss_fn)(outputs, targets) / self.context.size
        # The function divides its sum by this number, which multiplies it by the weight.
        return _call_loss(self.loss_fn, outputs, labels, num_items_in_batch=1 / weight) / self.context.size


def losses_by_source(loss: Loss) -> SourceLosses | None:
    """Return the loss's collector by data source; None if it does not report by source."""
    causal = loss.causal if isinstance(loss, RouterLoss) else loss
    return causal.by_source if isinstance(causal, CausalLoss) else None


def reporting_sources(loss: Loss, names: Sequence[str]) -> Loss:
    """Return a loss that also reports the mean loss of each of several data sources; a user's loss cannot."""
    causal = loss.causal if isinstance(loss, RouterLoss) else loss
    if not isinstance(causal, CausalLoss) or len(names) < 2:
        return loss
    reporting = replace(causal, by_source=SourceLosses(names))
    return replace(loss, causal=reporting) if isinstance(loss, RouterLoss) else reporting


def with_objective(loss: Loss, objective: Callable[[CausalLoss], Loss]) -> Loss:
    """Replace the cross entropy in a decoder's loss by another loss of the same logits."""
    if isinstance(loss, RouterLoss):
        return replace(loss, causal=with_objective(loss.causal, objective))
    # An objective and a user's own loss exclude each other.
    assert isinstance(loss, CausalLoss)
    return objective(loss)


def logits_loss(
    loss_fn: LossFunction | None, compute_loss_func: LossFunction | None, smoothing: float = 0.0
) -> LogitsLoss | None:
    """Return a user's loss for a HuggingFace model, or the loss with label smoothing; None for the model's own loss.

    Raises UserError if more than one is given.
    """
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
    """Return the cross entropy with label smoothing, as HuggingFace's LabelSmoother.

    Logits are [batch, sequence, vocabulary], labels [batch, sequence], not shifted.
    """
    predicted = logits[:, :-1].flatten(0, 1).float()
    wanted = labels[:, 1:].flatten()
    total = functional.cross_entropy(
        predicted, wanted, label_smoothing=smoothing, reduction="sum", ignore_index=IGNORED
    )
    return total / num_items_in_batch


def _call_loss(loss_fn: LossFunction, *values: object, **named: object) -> Tensor:
    """Call the user's loss; return a float32 scalar. Raises UserError unless it returns a tensor of one element."""
    # The activity tells the watchdog that a slow function is not a hang.
    with inside("loss_fn"):
        loss: object = loss_fn(*values, **named)
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss.reshape(()).float()
    kind = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
    raise UserError(f"loss_fn returned {kind}: it must return one number in a tensor")


def first_tensor(value: Value) -> Tensor:
    """Return the tensor, or the first of several: the ids of (ids, position ids)."""
    return value if isinstance(value, Tensor) else value[0]


class GuardedLoss:
    """A loss that records whether it was finite. With `spoils`, a non-finite loss makes all gradients NaN.

    Attributes:
        observer: if set, called with outputs and targets of each micro-batch.
        reported: the loss's other scalars for the last micro-batch, by names that are the same on all stages; None
            before the first micro-batch.
        tiles: computes the loss inside the last layer, which then returns it instead of logits.
        totals: in an evaluation, the sums of `reported` over the micro-batches so far.
    """

    def __init__(self, loss: Loss, *, spoils: bool, tiles: LossTiles | None = None) -> None:
        self.loss = loss
        self.tiles = tiles
        self.spoils = spoils
        self.count = loss.count
        self.units = loss.units
        self.reported: Mapping[str, Tensor | None] = dict.fromkeys(loss.reports)
        self.totals: dict[str, Tensor] = {}
        self.observer: Callable[[Outputs, Targets], None] | None = None
        self._finite: Tensor | None = None

    def expect(self, targets: Targets | None) -> None:
        """Pass a micro-batch's targets to the last layer before its forward pass, for a loss in tiles; None resets."""
        if self.tiles is not None:
            if (sources := losses_by_source(self.loss)) is not None and targets is not None:
                sources.begin()
            # An observer needs the logits, which a loss in tiles never holds as a whole.
            is_watched = self.observer is not None
            self.tiles.loss = None if targets is None or is_watched else partial(self.loss.of_tile, targets)

    def reset(self) -> None:
        """Begin a new step."""
        self._finite = None

    @property
    def finite(self) -> bool:
        """Whether all losses since the last reset were finite. Waits for the device."""
        return self._finite is None or bool(self._finite)

    def __call__(self, outputs: Outputs, targets: Targets) -> Tensor:
        """Return the loss; record on the device, without a wait, whether it is finite."""
        if self.observer is not None:
            self.observer(outputs, targets)
        value = self.loss(outputs, targets)
        if self.reported:
            self.reported = found = self.loss.parts(outputs)
            # In training the engine sums them; in an evaluation DeepSpeed keeps the loss alone.
            if not torch.is_grad_enabled():
                self.totals = {name: number + self.totals.get(name, 0.0) for name, number in found.items()}
        if value.requires_grad:
            finite = value.detach().isfinite()
            self._finite = finite if self._finite is None else self._finite & finite
            # A non-finite loss may have a finite gradient. NaN gradients make the norm NaN on all ranks, so that all of
            # them skip the step without another collective. Raising an error would stop one rank while the others wait
            # for it, and make the host wait for each loss.
            if self.spoils:
                value.register_hook(partial(torch.where, finite, other=float("nan")))
        return value
