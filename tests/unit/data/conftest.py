"""A small trained tokenizer for the tests beside it."""

import pytest

pytest.register_assert_rewrite("tests.support.formats")

TEXTS = [
    "the quick brown fox",
    "jumps over the lazy dog",
    "",
    "übermäßig — 日本語\r\n\ttabs",
    "0123456789 " * 30,
]


@pytest.fixture(scope="session")
def trained_tokenizer(tmp_path_factory):
    """The directory of a BPE tokenizer that puts <s> before each text unless told not to."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(TEXTS, trainer)
    bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    directory = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>").save_pretrained(directory)
    return directory
