"""A prompt has the same tokens in training, in its samples, in `ds-harness generate` and in transformers."""

import json

import pytest
from tokenizers import processors

from harness.data.chat import ConversationEncoder
from harness.data.generate import prompt_ids
from harness.data.inputs.sample_prompts import ids_of
from harness.data.tokenizer import ByteTokenizer, identity
from tests.unit.data.test_pieces import trained

BOTH = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])


@pytest.fixture(params=["gpt2", "llama3", "sentencepiece", "unigram", "none", "both"])
def tokenizer(request):
    """Tokenizers that put <s> before each text; one that adds nothing, and one that also closes it with </s>."""
    if request.param == "none":
        return ByteTokenizer().as_transformers()
    found = trained("gpt2" if request.param == "both" else request.param)
    if request.param == "both":
        found.backend_tokenizer.post_processor = BOTH
    return found


PAIRS = [
    ("the quick", " brown fox"),
    ("stop", "at"),
    ("or ", "the fox"),
    ("quick\n", "\n1234"),
    ("", "fox"),
    ("a", "x<end>"),
]


@pytest.mark.parametrize(("prompt", "completion"), PAIRS)
def test_a_prompt_is_trained_as_it_is_served_and_the_completion_continues_it(tokenizer, prompt, completion):
    served, completion = tokenizer(prompt)["input_ids"], completion.replace("<end>", tokenizer.eos_token)
    if prompt:
        assert ids_of(tokenizer, [prompt], "file") == [served] == [prompt_ids(tokenizer, prompt, chat=False)]
    encoded = ConversationEncoder(tokenizer)(json.dumps({"prompt": prompt, "completion": completion}), "file:1")
    ids, learnt = encoded.ids.tolist(), encoded.answers.sum()
    assert ids[:-learnt] == served and ids.count(tokenizer.eos_token_id) - served.count(tokenizer.eos_token_id) == 1
    assert (
        tokenizer.decode(ids, skip_special_tokens=True).strip()
        == (prompt + completion).removesuffix(tokenizer.eos_token).strip()
    )


def test_prompt_and_completion_are_tokenised_together_where_they_share_no_token(tokenizer):
    prompt, completion = "the quick", " brown fox"
    encoded = ConversationEncoder(tokenizer)(json.dumps({"prompt": prompt, "completion": completion}), "file:1")
    together = tokenizer(prompt + completion, add_special_tokens=False)["input_ids"]
    ids = encoded.ids.tolist()
    assert [i for i in ids if i not in tokenizer.all_special_ids] == together and ids[-1] == tokenizer.eos_token_id


def test_data_prepared_without_special_tokens_is_not_that_with_them():
    one, other = trained("gpt2"), trained("gpt2")
    assert identity(one) == identity(other)
    one.backend_tokenizer.post_processor = BOTH
    assert identity(one) != identity(other)
