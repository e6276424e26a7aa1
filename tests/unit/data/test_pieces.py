"""A document that is read in pieces has the tokens of the whole, with tokenizers of every kind."""

import random

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from harness.data.piece_encoder import PieceEncoder
from harness.data.rows.pieces import in_pieces
from harness.data.tokenizer import ByteTokenizer

WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "don't",
    "stop",
    "at",
    "1234",
    "or",
    "99.5",
    "übermäßig",
    "日本語テキスト",
    "🙂",
    "(x+y)==z",
    "foo_bar",
    "https://a.b/c?d=e",
]
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def text(length: int, breaks: str) -> str:
    choose = random.Random(0)
    parts = []
    while sum(map(len, parts)) < length:
        parts += [choose.choice(WORDS), choose.choice(breaks.split("|"))]
    return "".join(parts)


TEXTS = {
    "lines": text(4000, " | | | |\n|\n\n|  |\t"),
    "blank lines and indents": text(4000, " |\n    |\n\n\n|\r\n"),
    "one line": text(4000, " "),
    "spaces alone": text(2000, " |      ") + " " * 600 + text(1400, "   "),
    "no space": text(3000, "-|_"),
}


def trained(kind: str) -> PreTrainedTokenizerFast:
    """A tokenizer that puts <s> before each text."""
    texts = list(TEXTS.values())
    if kind == "unigram":
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        trainer = trainers.UnigramTrainer(
            vocab_size=300, special_tokens=["<s>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
        )
    elif kind == "sentencepiece":  # as Llama 2: a space before each text, and merges over all of it
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        tokens = ["<s>", "</s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
        trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=tokens, max_token_length=12, show_progress=False)
        texts = [word for text in texts for word in text.replace(" ", " \0").split("\0")]
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.decoder = decoders.ByteLevel()
        split = pre_tokenizers.Split(Regex(LLAMA_3), "isolated")
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind == "gpt2")
        tokenizer.pre_tokenizer = level if kind == "gpt2" else pre_tokenizers.Sequence([split, level])
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=600, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
        )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="module", params=["gpt2", "llama3", "sentencepiece", "unigram", "bytes", "python"])
def tokenizer(request):
    own = {"bytes": ByteTokenizer, "python": ByT5Tokenizer}
    return own[request.param]() if request.param in own else trained(request.param)


def document(tokenizer, text: str) -> list[int]:
    """A document as a server tokenises it, closed."""
    if isinstance(tokenizer, ByteTokenizer):
        return [*text.encode(), 256]
    ids = tokenizer(text)["input_ids"]
    return ids if ids[-1:] == [tokenizer.eos_token_id] else [*ids, tokenizer.eos_token_id]


@pytest.mark.parametrize("kind", TEXTS)
def test_pieces_have_the_tokens_of_the_whole(tokenizer, kind):
    whole = TEXTS[kind]
    wanted = document(tokenizer, whole)
    encoder = PieceEncoder(tokenizer)
    for size in (700, 1024, 1531):
        rows = [whole[start : start + size] for start in range(0, len(whole), size)]
        for at_once in (1, 3, len(rows)):  # rows are encoded together or apart, as they fall into shards
            ids = []
            for first in range(0, len(rows), at_once):
                last = min(first + at_once, len(rows))
                before = rows[first - 1] if first else ""
                after = rows[last] if last < len(rows) else None
                ids += encoder(rows[first:last], list(range(first, last)), before, after)
            assert [int(i) for row in ids for i in row] == wanted


def test_documents_side_by_side_do_not_meet(tokenizer):
    rows = ["one", "two\nthree", "", " four"]
    ids = PieceEncoder(tokenizer)(rows, [0] * len(rows))
    assert [row.tolist() for row in ids] == [document(tokenizer, row) for row in rows]


def test_a_document_that_closes_itself_is_not_closed_twice():
    tokenizer = trained("gpt2")
    assert PieceEncoder(tokenizer)(["one</s>"], [0])[0].tolist() == tokenizer("one</s>")["input_ids"]


def test_a_text_becomes_rows_and_a_conversation_stays_whole():
    assert list(in_pieces({"text": ""})) == [{"text": "", "part": 0}]
    rows = list(in_pieces({"text": "a" * 150_000}))
    assert [row["part"] for row in rows] == [0, 1, 2] and "".join(row["text"] for row in rows) == "a" * 150_000
    assert list(in_pieces({"conversation": "{}", "place": "x"})) == [{"conversation": "{}", "place": "x"}]


def test_a_long_token_across_the_end_of_a_piece_stays_whole():
    word = "abcdefghijklmnopqrstuvwxyz0123"
    model = models.Unigram([("</s>", 0.0), ("<unk>", 0.0), (word, -1.0), *((letter, -10.0) for letter in word)], 1)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), eos_token="</s>")
    text = word * 60
    rows = [text[start : start + 700] for start in range(0, len(text), 700)]
    ids = PieceEncoder(tokenizer)(rows, range(len(rows)))
    assert [int(i) for row in ids for i in row] == [2] * 60 + [0]
