"""Samples of preferences: two tokenised sequences each, and what the model before training says of them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from harness.batches.collate import IGNORED, MicroBatch
from harness.data.chat import Encoded
from harness.data.samples import EncodedConversations
from harness.errors import UserError


@dataclass(frozen=True, kw_only=True)
class PreferenceSamples:
    """A map-style data set whose sample i holds the sequences 2 i and 2 i + 1.

    Batches are padded to their longest sequence (`batches/padding.py`).

    Attributes:
        sequences: tokenised; of a pair first the chosen one, of a labelled completion first its own.
        labels: of labelled completions, 1 or 0 [samples]; all 1 for pairs.
        block_size: the length in tokens that sequences are padded to.
        pad: the id that fills up sequences.
        reference: log-probabilities of the model before training [samples, 2]; None before they are known.
    """

    sequences: EncodedConversations
    labels: npt.NDArray[np.float32]
    block_size: int
    pad: int
    reference: npt.NDArray[np.float32] | None = None
    packing: bool = False

    def __len__(self) -> int:
        return len(self.labels)

    def lengths(self, rows: npt.ArrayLike | None = None) -> npt.NDArray[np.integer]:
        """Return the tokens of both sequences of these samples, by default of all [samples, 2]."""
        first = 2 * (np.arange(len(self)) if rows is None else np.asarray(rows))
        return self.sequences.lengths(np.stack([first, first + 1], axis=1).ravel()).reshape(-1, 2)

    def padded_to(self, length: int) -> PreferenceSamples:
        """Return the same samples padded to `length` tokens; a longer sample must not be read from the result."""
        return replace(self, block_size=length)

    def with_reference(self, values: npt.NDArray[np.float32]) -> PreferenceSamples:
        """Return the samples with the log-probabilities [samples, 2] of the model before training."""
        return replace(self, reference=values)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        index %= len(self)
        sample = as_sample(self.sequences[2 * index], self.sequences[2 * index + 1], self.block_size, self.pad)
        if self.reference is not None:
            sample["reference"] = torch.from_numpy(self.reference[index])
        return {**sample, "label": torch.tensor(self.labels[index])}

    def digest(self) -> str:
        """Return a hash of all tokens, of those in the completions, and so of data, tokenizer and chat template."""
        total = hashlib.sha256()
        for index in range(len(self.sequences)):
            encoded = self.sequences[index]
            total.update(len(encoded.ids).to_bytes(8, "little"))
            total.update(encoded.ids.tobytes())
            total.update(encoded.answers.tobytes())
        return total.hexdigest()


def as_sample(first: Encoded, second: Encoded, block_size: int, pad: int) -> dict[str, Tensor]:
    """Return two sequences as a sample, padded on the right, with label 1 and a reference of 0."""
    ids = np.full((2, block_size), pad, dtype=np.int64)
    labels = np.full((2, block_size), IGNORED, dtype=np.int64)
    answers = np.zeros((2, block_size), dtype=np.bool_)
    for row, encoded in enumerate((first, second)):
        size = len(encoded.ids)
        ids[row, :size] = labels[row, :size] = encoded.ids
        answers[row, :size] = encoded.answers
    return {
        "input_ids": torch.from_numpy(ids),
        "labels": torch.from_numpy(labels),
        "answers": torch.from_numpy(answers),
        "reference": torch.zeros(2),
        "label": torch.ones(()),
    }


def compared(first: Encoded, second: Encoded) -> bool:
    """Return whether two sequences differ."""
    return not np.array_equal(first.ids, second.ids)


def collate(samples: Sequence[object]) -> MicroBatch:
    """Return ids [2 x samples, tokens], and the tensors of labels as `PreferenceLoss` reads them."""
    first = samples[0]
    if not isinstance(first, Mapping) or "answers" not in first:
        raise UserError("preferences are trained on rows of `prompt`, `chosen` and `rejected`, not on input_ids")
    rows = cast("Sequence[Mapping[str, Tensor]]", samples)
    columns = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    labels = (columns["labels"], columns["answers"], columns["reference"], columns["label"])
    return columns["input_ids"].flatten(0, 1), labels
