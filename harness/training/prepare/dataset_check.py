"""Check the first samples of a data set before the model is built: shape, length, labels, packing."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PretrainedConfig

from harness.batches.collate import IGNORED, Collator, MapDataset, MicroBatch, TokenCollator, collate, unequal_shapes
from harness.batches.evaluation import by_prefix
from harness.batches.given import require_one_length, require_short
from harness.batches.padding import PaddedSamples
from harness.batches.stream import dataset_length, read_micro_batch
from harness.config.values.arguments import BLOCK_SIZE
from harness.errors import UserError
from harness.hf.context.sequence import require_enough
from harness.hf.forward.payload import Tokens
from harness.hf.layers.attention import require_available
from harness.hf.skeleton import position_limit
from harness.topology.layout import Layout
from harness.training.engine.losses import first_tensor
from harness.training.parts import RequirePackable, needed
from harness.training.parts.data import Datasets

TOKENS, SHIFTED, OTHERS = "tokens", "shifted", "others"
MOST_TRIED = 4  # micro-batches whose shapes are compared before the run
ENOUGH, SHARE = 4, 0.75
"""Labels count as shifted if at least ENOUGH of them, and at least this SHARE, equal the next token.

Fewer may match by chance. Not all match: the last label before padding is often an end token that the inputs lack.
"""


@dataclass(frozen=True, kw_only=True)
class DatasetCheck:
    """Checks data sets for one model and layout.

    Attributes:
        config: the decoder's, with the run's attention; None for a list of layers, which may take any samples.
        sequence_parallel: whether tensor-parallel ranks share the tokens of a sequence.
        micro_batch, evaluation_batch: samples of a micro-batch in training and in an evaluation.
        own_loss: whether the loss is the user's, which receives the labels unchanged.
        require_packable: refuses a model that does not keep packed documents apart; None without that part.
    """

    config: PretrainedConfig | None
    layout: Layout
    sequence_parallel: bool
    micro_batch: int
    evaluation_batch: int
    device: torch.device
    dtype: torch.dtype
    collator: Collator
    own_loss: bool = False
    require_packable: RequirePackable | None = None

    def with_vocabulary(self, size: int) -> DatasetCheck:
        """Return the check of a model whose vocabulary is known: token ids are checked against it."""
        assert isinstance(self.collator, TokenCollator)
        return replace(self, collator=replace(self.collator, vocabulary=size, checks_labels=not self.own_loss))

    def first_batches(self, data: Datasets) -> MicroBatch | None:
        """Check the first samples of all data sets; return a micro-batch of the training data. See `first_batch`."""
        for name, evaluation in by_prefix(data.evaluation, "eval_dataset").items():
            if not dataset_length(evaluation):
                raise UserError(f"{name} is empty: give at least one sample, or no data set")
            self.first_batch(evaluation, self.evaluation_batch)
        return self.first_batch(data.train, self.micro_batch)

    def first_batch(self, dataset: MapDataset | None, size: int) -> MicroBatch | None:
        """Return a micro-batch of the first samples; None without samples. All ranks call it.

        Raises:
            UserError: a sample cannot be collated, has fewer tokens than context ranks, or is longer than the model's
                positions; samples are packed and the model cannot keep documents apart; labels are already shifted; or
                samples differ in length under pipeline parallelism, which needs equal lengths.
        """
        if dataset is None or not dataset_length(dataset):
            return None
        batch, _ = read_micro_batch(dataset, range(min(size, dataset_length(dataset))), self.collator)
        if self.config is not None:
            if (limit := position_limit(self.config)) is not None:
                require_short(dataset, limit)
            # A data set that pads gives all samples of a step one length.
            if self.layout.pp_size > 1 and not isinstance(dataset, PaddedSamples):
                # A user's collator may pad samples.
                if isinstance(self.collator, TokenCollator) and self.collator.collator is collate:
                    require_one_length(dataset)
                require_one_shape(dataset, self.collator, size)
            if not self.own_loss and meaning_of(batch) == SHIFTED:
                raise UserError(
                    "the labels of a data set are already shifted: label i is token i + 1. The loss shifts them: "
                    "give the tokens as labels, with -100 for those that are not in the loss, or no labels"
                )
            tokens = Tokens.of(batch[0])
            require_enough(tokens, self.layout.cp_size, self.layout.tp_size if self.sequence_parallel else 1)
            if tokens.positions is not None:  # packed documents
                require_available(self.config, self.device, self.dtype)
                packable = needed(self.require_packable, "packing", "harness.verify")
                packable(self.config, len(tokens.ids), self.device, self.dtype)
        return batch


def meaning_of(batch: MicroBatch) -> str:
    """Classify the valid labels of a decoder's micro-batch: equal to the tokens (TOKENS), to the next tokens (SHIFTED),
    or neither (OTHERS)."""
    ids, labels = Tokens.of(batch[0]).ids, batch[1]
    if not isinstance(labels, Tensor) or labels.shape != ids.shape:
        return OTHERS
    valid = labels[:, :-1] != IGNORED
    if torch.equal(labels[:, :-1][valid], ids[:, :-1][valid]):
        return TOKENS
    shifted = int((labels[:, :-1][valid] == ids[:, 1:][valid]).sum())
    return SHIFTED if shifted >= max(ENOUGH, SHARE * int(valid.sum())) else OTHERS


def sample_length(batch: MicroBatch | None) -> int:
    """Return the number of tokens per sample in a decoder's micro-batch; the default block size without data."""
    if batch is None:
        return BLOCK_SIZE
    return Tokens.of(batch[0]).ids.shape[1]


def require_one_shape(dataset: MapDataset, collator: Collator, size: int) -> None:
    """Raise UserError if the first micro-batches of `size` samples differ in shape."""
    # A user's collator may pad each micro-batch to its own longest sample, and a data set need not know its lengths.
    count = min(MOST_TRIED, dataset_length(dataset) // size)
    tried = [range(start * size, (start + 1) * size) for start in range(count)]
    shapes = [tuple(first_tensor(read_micro_batch(dataset, rows, collator)[0][0]).shape) for rows in tried]
    for shape in shapes:
        if shape != shapes[0]:
            raise unequal_shapes(shapes[0], shape)
