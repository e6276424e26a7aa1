"""Micro-batches of a language model: integer ids of its vocabulary, no more than it has positions for.

Others would fail somewhere in the model, or be trained on positions that it does not know.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.data.batches.collate import IGNORED, Collator, MicroBatch
from harness.errors import UserError
from harness.parallel.values import Value
from harness.wording import counted


@dataclass(frozen=True)
class TokenCollator:
    """A collator whose micro-batches are checked.

    Attributes:
        collator: what makes them.
        vocabulary: number of ids that the model knows; None where that is not known yet.
        positions: the longest sequence that it takes; None where it sets no limit.
        checks_labels: whether the labels are ids, too.
    """

    collator: Collator
    vocabulary: int | None = None
    positions: int | None = None
    checks_labels: bool = True

    def __call__(self, samples: list[object]) -> object:
        """Return what the collator makes of the samples."""
        return self.collator(samples)

    def check(self, micro_batch: MicroBatch, rows: Sequence[int], samples: Sequence[object]) -> None:
        """Raise UserError for what the model cannot take; `rows`: the numbers of the samples that it is made of."""
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
            _require_positions(ids, own, self.positions, rows, samples)
        if self.vocabulary is not None:
            _require_known("input_ids", ids, self.vocabulary, rows)
            if self.checks_labels and isinstance(labels, Tensor):
                _require_known("labels", labels.masked_fill(labels == IGNORED, 0), self.vocabulary, rows)


def _require_positions(
    ids: Tensor, own: Value | None, limit: int, rows: Sequence[int], samples: Sequence[object]
) -> None:
    """Raise UserError for a sample longer than `limit`, or whose `own` position ids reach it."""
    if isinstance(own, Tensor):
        reached = own.amax(dim=1)
        if int(reached.max()) >= limit:
            row = int(reached.argmax())
            raise UserError(
                f"sample {rows[row]}: position_ids reach {int(reached[row])}, but the model has "
                f"{counted(limit, 'position')}: shorten its documents"
            )
    elif ids.shape[1] > limit:
        lengths = [tokens_of(sample) or 0 for sample in samples]
        row = lengths.index(max(lengths))  # a collator may have padded the others
        raise too_long(rows[row], ids.shape[1], limit)


def tokens_of(sample: object) -> int | None:
    """Return how many token ids a sample has; None for one of another form."""
    ids = sample.get("input_ids") if isinstance(sample, Mapping) else None
    return len(ids) if isinstance(ids, Sized) else None


def too_long(row: int, tokens: int, limit: int) -> UserError:
    """Return the error of a sample with more tokens than the model has positions."""
    return UserError(
        f"sample {row} has {counted(tokens, 'token')}, but the model has {counted(limit, 'position')}: shorten it"
    )


def _require_known(name: str, ids: Tensor, vocabulary: int, rows: Sequence[int]) -> None:
    if int(ids.min()) >= 0 and int(ids.max()) < vocabulary:
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
