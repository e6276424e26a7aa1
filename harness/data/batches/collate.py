"""Samples -> one micro-batch: the pair (inputs, labels), stacked along a new first dimension.

A sample is a dict with `input_ids` and perhaps `labels` (-100: not counted), `attention_mask` and `position_ids`, or
a pair (inputs, labels) of a model that is no language model. Inputs are ids, or (ids, position ids), which begin anew
with each document that is packed into a sample. Whatever else would change the model's numbers is refused, not left
out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch.utils.data import IterableDataset, default_collate

from harness.errors import UserError
from harness.parallel.values import Value

IGNORED = -100
"""The label that no loss counts, as torch's cross entropy has it."""

MicroBatch: TypeAlias = tuple[Value, Value]
"""Inputs and labels."""
Collator: TypeAlias = Callable[[list[Any]], Any]
"""Makes a micro-batch of samples; see `as_micro_batch` for what it may return."""

_INTEGERS = ("input_ids", "labels", "position_ids")
_NOT_CARRIED = ("token_type_ids", "inputs_embeds")


class MapDataset(Protocol):
    """A data set with a length and an index."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, index: int, /) -> Any:
        """Return a sample: what the collator takes."""


AnyDataset: TypeAlias = "MapDataset | IterableDataset[Any]"
"""What a program may give: a data set with an index, or one that is iterated."""


def collate(samples: Sequence[Any]) -> MicroBatch:
    """Stack samples of one length. UserError if samples differ in length, are left-padded or carry more than ids."""
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
    """Turn what a collator returned into (inputs, labels): a dict with input_ids and labels, or the pair itself."""
    if isinstance(collated, Mapping):
        given = {name: value for name, value in collated.items() if value is not None}
        if "input_ids" not in given:
            raise UserError(f"the data_collator gave {', '.join(given) or 'nothing'}: it must return input_ids")
        return _with_labels(_as_tensors(given))
    if isinstance(collated, Sequence) and len(collated) == 2:
        return collated[0], collated[1]
    raise UserError(f"the data_collator gave {type(collated).__name__}: it must give a dict or a pair (inputs, labels)")


def hidden_tokens(sample: object) -> int:
    """Return how many tokens the attention_mask of a sample, or of a collated batch, hides: its padding."""
    if not isinstance(sample, Mapping) or sample.get("attention_mask") is None:
        return 0
    return int((torch.as_tensor(sample["attention_mask"]) == 0).sum())


def _language(samples: Sequence[Mapping[str, object]]) -> MicroBatch:
    if "input_ids" not in samples[0]:
        has = ", ".join(map(str, samples[0]))
        raise UserError(
            f"a sample has no input_ids (it has: {has}): give input_ids, text, messages, or prompt and completion"
        )
    names = [name for name in (*_INTEGERS, "attention_mask", *_NOT_CARRIED) if _have(name, samples)]
    return _with_labels({name: _stack(name, [sample[name] for sample in samples]) for name in names})


def _have(name: str, samples: Sequence[object]) -> bool:
    """Whether the samples have this column; UserError where only some have, as it would be left out of the others."""
    having = [isinstance(sample, Mapping) and name in sample for sample in samples]
    if any(having) and not all(having):
        raise UserError(
            f"some samples of a micro-batch have {name} and others have not: give it to all of the data set, or to none"
        )
    return all(having)


def _as_tensors(given: Mapping[str, object]) -> dict[str, torch.Tensor]:
    """Return what a collator of the user's own gave, which may be in lists or arrays."""
    found = {name: _integers(name, given[name]) for name in _INTEGERS if name in given}
    return found | {name: torch.as_tensor(given[name]) for name in ("attention_mask", *_NOT_CARRIED) if name in given}


def _stack(name: str, rows: list[object]) -> torch.Tensor:
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
    if tensor is None or (tensor.is_floating_point() and tensor.numel()):
        raise UserError(f"a sample's {name} is {str(row)[:60]}: it must be a list of integers")
    return tensor.long()


def _with_labels(batch: Mapping[str, torch.Tensor]) -> MicroBatch:
    """Return inputs and labels: labels default to the ids; padding, which must stand at the right, is not counted."""
    for name in _NOT_CARRIED:
        if name in batch:
            raise UserError(f"samples contain {name}, which is not passed to the model: remove the column")
    ids = batch["input_ids"].long()
    labels = batch.get("labels")
    labels = ids.clone() if labels is None else labels.long()
    _require_shape("labels", labels, ids)
    mask = batch.get("attention_mask")
    if mask is not None:
        _require_shape("attention_mask", mask, ids)
        if bool((mask.long().diff(dim=-1) > 0).any()):
            raise UserError("the attention_mask hides tokens before others: pad on the right (causal attention only)")
        labels = labels.masked_fill(mask == 0, IGNORED)
    if "position_ids" not in batch:
        return ids, labels
    positions = batch["position_ids"].long()
    _require_shape("position_ids", positions, ids)
    return (ids, positions), labels.masked_fill(document_starts(positions), IGNORED)


def document_starts(positions: torch.Tensor) -> torch.Tensor:
    """Where position ids [batch, sequence] do not go on by one, as transformers finds the documents of a packed row.

    The first token of a document is predicted from nothing, least of all from the document before it.
    """
    return positions.diff(dim=-1, prepend=positions[:, :1]) != 1


def _require_shape(name: str, tensor: torch.Tensor, ids: torch.Tensor) -> None:
    if tensor.shape != ids.shape:
        raise UserError(f"{name} of {tuple(tensor.shape)} with input_ids of {tuple(ids.shape)}: the shapes must agree")
