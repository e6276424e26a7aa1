"""The form of the samples that text and conversations become, for one model and its tokenizer."""

from __future__ import annotations

from dataclasses import dataclass

from harness.arguments import TrainingArguments
from harness.data.blocks import require_block_size
from harness.data.tokenizer import Tokenizer, check_vocabulary
from harness.errors import UserError
from harness.hf.attention import with_attention
from harness.hf.skeleton import ModelSource, build_skeleton, position_limit, vocabulary_size
from harness.hf.verify.packing import require_documents_apart
from harness.wording import counted

LONGEST_DEFAULT = 1024  # as run_clm.py
NEEDS_TOKENIZER = "a data set of text or conversations needs processing_class, the tokenizer"


@dataclass(frozen=True, kw_only=True)
class SampleForm:
    """The form of samples.

    Attributes:
        block_size: tokens of a sample.
        packing: whether documents share samples without seeing each other.
        vocabulary: number of ids that the model knows.
    """

    block_size: int
    packing: bool
    vocabulary: int

    @classmethod
    def of(cls, tokenizer: Tokenizer, source: ModelSource, args: TrainingArguments) -> SampleForm:
        """Return the form that the arguments ask for; UserError if it, or the tokenizer, does not fit the model."""
        vocabulary = vocabulary_size(build_skeleton(source.config))
        check_vocabulary(tokenizer, vocabulary)
        if args.packing:  # refused before anything is tokenised
            require_documents_apart(with_attention(source.config, args.attn_implementation))
        block_size = _block_size(args, position_limit(source.config))
        require_block_size(block_size)
        return cls(block_size=block_size, packing=args.packing, vocabulary=vocabulary)


def _block_size(args: TrainingArguments, longest: int | None) -> int:
    if args.block_size is None:
        return min(LONGEST_DEFAULT, longest or LONGEST_DEFAULT)
    if longest is not None and args.block_size > longest:
        raise UserError(
            f"--block_size {args.block_size}: the model has {counted(longest, 'position')}: use at most {longest}"
        )
    return args.block_size
