"""Collate samples into a micro-batch, the pair (inputs, labels), and check it.

A language-model sample is a dict with `input_ids` and optionally `labels` (-100: not in the loss), `attention_mask` and
`position_ids`; any other sample is a pair (inputs, labels). Collated inputs are int64 ids [batch, sequence], or a pair
(ids, position ids), both of that shape; position ids restart at 0 at each document of a packed sample. Columns that
would change the result but are not passed to the model are refused, and so are ids outside the vocabulary and samples
longer than the model's positions: these would fail deep inside the model, on a GPU without a clear message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, default_collate

from harness.errors import UserError
from harness.parallel.values import Value
from harness.wording import counted

IGNORED = -100
"""The label that the loss ignores: the default `ignore_index` of torch's cross entropy."""

MicroBatch: TypeAlias = tuple[Value, Value]
"""Inputs and labels."""
Collator: TypeAlias = Callable[[list[Any]], Any]
"""Turns samples into a micro-batch; `as_micro_batch` lists what it may return."""

_INTEGERS = ("input_ids", "labels", "position_ids")
_NOT_CARRIED = ("token_type_ids", "inputs_embeds")
_COLUMNS = (*_INTEGERS, "attention_mask", *_NOT_CARRIED)


class MapDataset(Protocol):
    """A data set with a length and an index."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, index: int, /) -> Any:
        """Return a sample: what the collator takes."""


AnyDataset: TypeAlias = "MapDataset | IterableDataset[Any]"
"""A user's data set: map-style, or an IterableDataset."""


def collate(samples: Sequence[Any]) -> MicroBatch:
    """Stack samples of one length into (inputs, labels).

    Raises UserError if samples differ in length or columns, are left-padded, or hold columns not passed to the model.
    """
    if isinstance(samples[0], Mapping):
        return _language(samples)
    if isinstance(samples[0], Sequence) and not isinstance(samples[0], str | bytes) and len(samples[0]) == 2:
        inputs, labels = default_collate(list(samples))
        return inputs, labels
    raise UserError(
        f"a sample is {type(samples[0]).__name__}: give dicts with input_ids, pairs (inputs, labels), "
        "or a data_collator"
    )


def as_micro_batch(collated: object) -> MicroBatch:
    """Turn a collator's output, a dict with input_ids or a pair, into (inputs, labels).

    Raises UserError for anything else.
    """
    if isinstance(collated, Mapping):
        given = {name: value for name, value in collated.items() if value is not None}
        if "input_ids" not in given:
            raise UserError(f"the data_collator gave {', '.join(given) or 'nothing'}: it must return input_ids")
        columns = {name: _integers(name, given[name]) for name in _INTEGERS if name in given}
        columns |= {name: torch.as_tensor(given[name]) for name in ("attention_mask", *_NOT_CARRIED) if name in given}
        return _with_labels(columns)
    if isinstance(collated, Sequence) and len(collated) == 2:
        return collated[0], collated[1]
    raise UserError(f"the data_collator gave {type(collated).__name__}: it must give a dict or a pair (inputs, labels)")


def hidden_tokens(samples: Sequence[object]) -> int:
    """Return the number of padding tokens in samples or collated batches, by their attention_mask."""
    hidden = 0
    for sample in samples:
        if isinstance(sample, Mapping) and sample.get("attention_mask") is not None:
            hidden += int((torch.as_tensor(sample["attention_mask"]) == 0).sum())
    return hidden


def _language(samples: Sequence[Mapping[str, object]]) -> MicroBatch:
    first = samples[0]
    if "input_ids" not in first:
        has = ", ".join(map(str, first))
        raise UserError(
            f"a sample has no input_ids (it has: {has}): give input_ids, text, messages, or prompt and completion"
        )
    for sample in samples:
        if not isinstance(sample, Mapping) or sample.keys() != first.keys():
            _require_same_columns(samples)
    return _with_labels({name: _stack(name, samples) for name in _COLUMNS if name in first})


def _require_same_columns(samples: Sequence[object]) -> None:
    """Raise UserError if only some samples have a column that counts."""
    for name in _COLUMNS:
        having = [isinstance(sample, Mapping) and name in sample for sample in samples]
        if any(having) and not all(having):
            raise UserError(
                f"some samples of a micro-batch have {name} and others do not: add the column to all samples, or to "
                "none"
            )


def _stack(name: str, samples: Sequence[Mapping[str, object]]) -> torch.Tensor:
    """Stack a column of the samples to int64 [batch, ...]. Raises UserError unless rows are integers of one shape."""
    rows = list(map(itemgetter(name), samples))
    # All rows at once, which is faster. If it fails, `_stack_each` finds the row at fault.
    with suppress(TypeError, ValueError, RuntimeError):
        if isinstance(rows[0], Tensor):
            stacked = torch.stack(rows)
        elif isinstance(rows[0], np.ndarray):
            stacked = torch.as_tensor(np.stack(rows))
        else:
            stacked = torch.as_tensor(rows)
        if not stacked.is_floating_point():
            return stacked.long()
    return _stack_each(name, rows)


def _stack_each(name: str, rows: Sequence[object]) -> torch.Tensor:
    """Stack rows whose types may differ."""
    tensors = [_integers(name, row) for row in rows]
    shapes = sorted({tuple(tensor.shape) for tensor in tensors})
    if len(shapes) > 1:
        raise UserError(
            f"{name} of {shapes[0]} and {shapes[-1]} in one micro-batch: pad them to one length, "
            "or give a data set of text, which is joined and cut into blocks"
        )
    return torch.stack(tensors)


def _integers(name: str, row: object) -> torch.Tensor:
    try:
        tensor = torch.as_tensor(row)
    except (TypeError, ValueError, RuntimeError):
        tensor = None
    # torch makes a float32 tensor of an empty list.
    if tensor is None or (tensor.is_floating_point() and tensor.numel()):
        raise UserError(f"a sample's {name} is {str(row)[:60]}: it must be a list of integers")
    return tensor.long()


def _with_labels(batch: Mapping[str, torch.Tensor]) -> MicroBatch:
    """Return (inputs, labels) of a batch of columns [batch, sequence].

    Labels default to the ids. Padding, which must be on the right, and the first token of each packed document get the
    label -100.
    """
    for name in _NOT_CARRIED:
        if name in batch:
            raise UserError(f"samples contain {name}, which is not passed to the model: remove the column")
    ids = batch["input_ids"].long()
    labels = batch.get("labels")
    if labels is None:
        labels = ids.clone()
    else:
        labels = labels.long()
        _require_shape("labels", labels, ids)
    mask = batch.get("attention_mask")
    if mask is not None:
        _require_shape("attention_mask", mask, ids)
        # The mask itself is not passed on: with causal attention no real token sees padding on its right.
        if bool((mask.long().diff(dim=-1) > 0).any()):
            raise UserError("the attention_mask hides tokens before others: pad on the right (causal attention only)")
        labels = labels.masked_fill(mask == 0, IGNORED)
    if "position_ids" not in batch:
        return ids, labels
    positions = batch["position_ids"].long()
    _require_shape("position_ids", positions, ids)
    # A document starts wherever position ids do not grow by one: by this test transformers too finds the documents of a
    # packed row. Its first token must not be predicted, because the token before it belongs to another document.
    starts = positions.diff(dim=-1, prepend=positions[:, :1]) != 1
    return (ids, positions), labels.masked_fill(starts, IGNORED)


def _require_shape(name: str, tensor: torch.Tensor, ids: torch.Tensor) -> None:
    if tensor.shape != ids.shape:
        raise UserError(f"{name} of {tuple(tensor.shape)} with input_ids of {tuple(ids.shape)}: the shapes must agree")


@dataclass(frozen=True)
class TokenCollator:
    """A collator whose micro-batches are checked against the model.

    Attributes:
        collator: makes the micro-batches.
        vocabulary: number of ids of the model; None if not known yet.
        positions: the longest sequence that the model takes, in tokens; None without a limit.
        checks_labels: whether labels are token ids too, and are checked alike.
    """

    collator: Collator
    vocabulary: int | None = None
    positions: int | None = None
    checks_labels: bool = True

    def __call__(self, samples: list[object]) -> object:
        """Call the collator on the samples, unchecked."""
        return self.collator(samples)

    def check(self, micro_batch: MicroBatch, rows: Sequence[int], samples: Sequence[object]) -> None:
        """Raise UserError if the model cannot take this micro-batch; `rows` are the data-set indices of `samples`."""
        inputs, labels = micro_batch
        ids = inputs[0] if isinstance(inputs, tuple | list) and len(inputs) == 2 else inputs
        if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point():
            raise UserError(
                f"a sample of a language model has input_ids, a list of integers, but these are {_form(ids)}: give "
                "dicts with input_ids, or with text and a processing_class"
            )
        if ids.shape[1] == 0:
            raise UserError(f"sample {rows[0]} has no tokens: remove empty ones from the data set")
        if self.positions is not None:
            own = inputs[1] if isinstance(inputs, tuple | list) else None
            if own is not None or ids.shape[1] > self.positions:
                _require_positions(ids, own, self.positions, rows, samples)
        if self.vocabulary is not None:
            _require_known("input_ids", ids, self.vocabulary, rows)
            # Ignored labels are not ids: 0, an id of every vocabulary, stands in for them.
            if self.checks_labels and isinstance(labels, Tensor):
                _require_known("labels", labels.masked_fill(labels == IGNORED, 0), self.vocabulary, rows)


def _require_positions(
    ids: Tensor, own: Value | None, limit: int, rows: Sequence[int], samples: Sequence[object]
) -> None:
    """Raise UserError for a sample longer than `limit`, or with `own` position ids that reach it."""
    if isinstance(own, Tensor):
        reached = own.amax(dim=1)
        if int(reached.max()) >= limit:
            row = int(reached.argmax())
            raise UserError(
                f"sample {rows[row]}: position_ids reach {int(reached[row])}, but the model has "
                f"{counted(limit, 'position')}: shorten its documents"
            )
    elif ids.shape[1] > limit:
        # A collator may have padded all samples to this length: the longest is at fault.
        lengths = [tokens_of(sample) or 0 for sample in samples]
        row = lengths.index(max(lengths))
        raise too_long(rows[row], ids.shape[1], limit)


def tokens_of(sample: object) -> int | None:
    """Return the number of input_ids in a sample; None without input_ids."""
    ids = sample.get("input_ids") if isinstance(sample, Mapping) else None
    return len(ids) if isinstance(ids, Sized) else None


def unequal_shapes(one: tuple[int, ...], other: tuple[int, ...]) -> UserError:
    """Return the error for micro-batches that pipeline stages cannot exchange."""
    return UserError(
        f"micro-batches of {one} and {other}: with pipeline stages all must have one shape; pad them, or join and cut "
        "the samples to one length"
    )


def too_long(row: int, tokens: int, limit: int) -> UserError:
    """Return the error for a sample with more tokens than the model has positions."""
    return UserError(
        f"sample {row} has {counted(tokens, 'token')}, but the model has {counted(limit, 'position')}: shorten it"
    )


def _require_known(name: str, ids: Tensor, vocabulary: int, rows: Sequence[int]) -> None:
    lowest, highest = ids.aminmax()
    if int(lowest) >= 0 and int(highest) < vocabulary:
        return
    row, place = torch.nonzero((ids < 0) | (ids >= vocabulary))[0].tolist()
    except_for = f" or {IGNORED}" if name == "labels" else ""
    raise UserError(
        f"sample {rows[row]}: {name}[{place}] is {int(ids[row, place])}, but the model's ids are 0 to "
        f"{vocabulary - 1}{except_for}: use the model's own tokenizer, or correct the data"
    )


def _form(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype} and shape {tuple(value.shape)} for a micro-batch"
    return f"a {type(value).__name__}"
