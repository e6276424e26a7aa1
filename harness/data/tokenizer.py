"""Load a tokenizer: HuggingFace's from a directory or hub id, or the bytes tokenizer.

The bytes tokenizer needs no file and no training, takes any text and restores it exactly. Saved, it becomes an
equivalent `tokenizer.json`, so that `AutoTokenizer` can read an exported model's directory, and an entry in
`tokenizer_config.json` by which `load_tokenizer` recognises it. It has its own chat template. A hub id is downloaded
to the local cache.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from harness.config.model.files import TOKENIZER_FILES, has_tokenizer, has_weights
from harness.config.model.hub import TEXTS, Wanted, fetch
from harness.config.values.json_file import object_or_empty, require_regular_files
from harness.errors import UserError, text_of

if TYPE_CHECKING:
    import tokenizers
    from transformers import PreTrainedTokenizerBase

    from harness.training.parts.data import AnyTokenizer

BYTES = "bytes"
MARK = "harness_tokenizer"
"""Key of tokenizer_config.json that marks the bytes tokenizer."""

# A turn is a line with its role, then its content, closed by the end-of-document token.
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message['content'] + eos_token + '\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
_WANTED = Wanted(flag="--tokenizer_name", files=TEXTS, is_whole=has_tokenizer, lacking="no tokenizer")


class ByteTokenizer:
    """Encodes each byte of UTF-8 as its value; 256 ends a document, 257 is padding. There are no merges."""

    eos_token_id = 256
    pad_token_id = 257
    eos_token = "<|end-of-document|>"
    pad_token = "<|padding|>"
    vocab_size = 258

    def __len__(self) -> int:
        return self.vocab_size

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def encode(self, text: str) -> list[int]:
        """Return the UTF-8 bytes of the text. No token is added, and no text is read as a special token."""
        return list(text.encode("utf-8"))

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of the ids below 256; others are left out, and broken UTF-8 becomes U+FFFD."""
        return bytes(i for i in map(int, ids) if 0 <= i < 256).decode("utf-8", errors="replace")

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Write tokenizer.json and tokenizer_config.json, for `AutoTokenizer` and `load_tokenizer`."""
        target = Path(directory)
        target.mkdir(parents=True, exist_ok=True)
        _as_byte_level_bpe(self).save(str(target / "tokenizer.json"))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": self.eos_token,
            "pad_token": self.pad_token,
            "clean_up_tokenization_spaces": False,
            "chat_template": _CHAT_TEMPLATE,
            MARK: BYTES,
        }
        (target / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    def as_transformers(self) -> PreTrainedTokenizerBase:
        """Return a transformers tokenizer with the same ids and a chat template."""
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast(
            tokenizer_object=_as_byte_level_bpe(self),
            eos_token=self.eos_token,
            pad_token=self.pad_token,
            clean_up_tokenization_spaces=False,
            chat_template=_CHAT_TEMPLATE,
        )


Tokenizer: TypeAlias = "ByteTokenizer | PreTrainedTokenizerBase"


def known(tokenizer: AnyTokenizer) -> Tokenizer:
    """Return a tokenizer that the Trainer hands back under the narrower type that the core knows."""
    return cast("Tokenizer", tokenizer)


def end_of_document_id(tokenizer: Tokenizer) -> int:
    """Return the end-of-sequence id, which closes a document. UserError if the tokenizer has none."""
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"the tokenizer {_name(tokenizer)} has no end-of-sequence token: "
            "name its `eos_token` in tokenizer_config.json"
        )
    return tokenizer.eos_token_id


def padding_id(tokenizer: Tokenizer, vocabulary: int | None = None) -> int:
    """Return the id that pads samples: the tokenizer's if the model has it, else the end-of-document id."""
    padding = tokenizer.pad_token_id
    end = end_of_document_id(tokenizer)
    return end if padding is None or (vocabulary is not None and padding >= vocabulary) else padding


def _name(tokenizer: Tokenizer) -> str:
    return str(getattr(tokenizer, "name_or_path", "")) or type(tokenizer).__name__


def tokenizer_name(name: str | None, model_dir: Path | None) -> str:
    """Return the tokenizer's name: the one given, else the model's directory, else bytes for a model without weights.

    Raises UserError for trained weights without a tokenizer: their ids would have another meaning as bytes.
    """
    if name is not None:
        return name
    if model_dir is None or not (has_tokenizer(model_dir) or has_weights(model_dir)):
        return BYTES
    if not has_tokenizer(model_dir):
        raise UserError(
            f"{model_dir} has trained weights but no tokenizer ({', '.join(TOKENIZER_FILES)}): copy its files "
            f"there, or give their directory as --tokenizer_name ({BYTES}, if the model was trained on bytes)"
        )
    return os.fspath(model_dir)


def tokenizer_directory(name: str) -> str:
    """Return the directory of a tokenizer given by path or hub id, downloading it if needed. UserError if none."""
    found = name if Path(name).is_dir() else fetch(name, _WANTED)
    if found is None:
        raise UserError(f'tokenizer {name} is not a directory: give one, an id of the hub, or "{BYTES}"')
    if not has_tokenizer(found):
        raise UserError(
            f'{name} contains no tokenizer ({", ".join(TOKENIZER_FILES)}): give another directory, or "{BYTES}"'
        )
    return os.fspath(found)


def load_tokenizer(name: str | None = None, model_dir: Path | None = None) -> Tokenizer:
    """Load the tokenizer `name`: "bytes", a directory or a hub id; by default the one of `tokenizer_name`.

    Raises UserError as `tokenizer_name`, if the directory is missing or holds no tokenizer, or if the tokenizer cannot
    be read, has no vocabulary or no end-of-sequence token.
    """
    name = tokenizer_name(name, model_dir)
    if name == BYTES:
        return ByteTokenizer()
    directory = tokenizer_directory(name)
    require_regular_files(Path(directory))
    return ByteTokenizer() if _is_marked(directory) else _from_directory(directory)


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raise UserError if the tokenizer has ids beyond the model's vocabulary of `vocab_size` ids."""
    if (largest := largest_id(tokenizer)) >= vocab_size:
        raise UserError(
            f"the tokenizer's ids go up to {largest}, the model's vocabulary has {vocab_size} ids: "
            f"use the model's own tokenizer, or a model with at least {largest + 1} ids"
        )


def largest_id(tokenizer: Tokenizer) -> int:
    """Return the largest id that can occur in a document; the bytes tokenizer's padding id never does."""
    if isinstance(tokenizer, ByteTokenizer):
        return tokenizer.eos_token_id
    return max(tokenizer.get_vocab().values())


@dataclass(frozen=True)
class SpecialTokens:
    """The ids that a tokenizer puts around every text, such as a BOS token before it; so does a server."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> SpecialTokens:
        """Find them by tokenising a text with and without. UserError if its other tokens are not the same."""
        if isinstance(tokenizer, ByteTokenizer):
            return cls()
        word = next(
            (token for token, i in tokenizer.get_vocab().items() if i not in tokenizer.added_tokens_decoder), ""
        )
        text = f"a {word}"  # of any tokenizer at least one token
        plain, whole = (tokenizer(text, add_special_tokens=added)["input_ids"] for added in (False, True))
        for start in range(len(whole) - len(plain) + 1):
            stop = start + len(plain)
            if whole[start:stop] == plain:
                return cls(before=tuple(whole[:start]), after=tuple(whole[stop:]))
        raise UserError(
            f"the tokenizer {_name(tokenizer)} tokenises {text!r} as {plain} without special tokens and as {whole} "
            "with them: give one that only puts them around a text"
        )

    def around(self, ids: Sequence[int]) -> list[int]:
        """Return the ids of a text with the special tokens around them, as a server tokenises a prompt."""
        return [*self.before, *ids, *self.after]


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> list[npt.NDArray[np.integer]]:
    """Tokenise each text without special tokens; return one array of ids a text."""
    if isinstance(tokenizer, ByteTokenizer):
        return [np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.uint16) for text in texts]
    # verbose=False: no warning for texts longer than the model's context; they are cut into blocks afterwards.
    only_ids = {"return_attention_mask": False, "return_token_type_ids": False}
    rows = tokenizer(list(texts), add_special_tokens=False, verbose=False, **only_ids)["input_ids"]
    return [np.asarray(row, dtype=np.int64) for row in rows]


def _from_directory(directory: str) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds of error for a broken file
        raise UserError(f"cannot read the tokenizer in {directory}: {text_of(error, 200)}") from error
    require_vocabulary(tokenizer, directory)
    end_of_document_id(tokenizer)
    return tokenizer


def require_vocabulary(tokenizer: PreTrainedTokenizerBase, directory: str | os.PathLike[str]) -> None:
    """Raise UserError for a tokenizer with only special tokens, for which every text is empty.

    transformers makes such a tokenizer if the directory has its config but not its vocabulary.
    """
    if len({*tokenizer.get_vocab().values()} - {*tokenizer.added_tokens_decoder}) < 2:  # T5's has the space beside them
        raise UserError(
            f"{directory} has a tokenizer without a vocabulary, only special tokens: add its files, such as "
            "tokenizer.json"
        )


def _is_marked(directory: str) -> bool:
    """Return whether this is a saved bytes tokenizer to which no tokens have been added since."""
    if object_or_empty(Path(directory, "tokenizer_config.json")).get(MARK) != BYTES:
        return False
    added = object_or_empty(Path(directory, "tokenizer.json")).get("added_tokens")
    return isinstance(added, list) and len(added) == 2


def _as_byte_level_bpe(tokenizer: ByteTokenizer) -> tokenizers.Tokenizer:
    """Return a byte-level BPE without merges, in which a byte's id is its value."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    # GPT-2's alphabet (Radford et al., 2019): printable Latin-1 stands for itself, the others from U+0100 on.
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    vocabulary = {chr(byte if byte in printable else next(others)): byte for byte in range(256)}
    bpe = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens([AddedToken(t, special=True) for t in (tokenizer.eos_token, tokenizer.pad_token)])
    return bpe


def identity(tokenizer: Tokenizer) -> str:
    """Return all that decides what ids a tokenizer makes of a text, as one text. Its pickle would change with use."""
    if isinstance(tokenizer, ByteTokenizer):
        return repr(tokenizer)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        rules = json.loads(backend.to_str())
        for state_of_the_last_call in ("truncation", "padding"):
            rules.pop(state_of_the_last_call, None)
        parts = [json.dumps(rules, sort_keys=True)]
    else:
        with TemporaryDirectory() as folder:
            tokenizer.save_pretrained(folder)
            parts = [file.read_text(encoding="latin-1") for file in sorted(Path(folder).iterdir())]
    if getattr(tokenizer, "split_special_tokens", False):  # the backend's rules do not say it
        parts.append("split_special_tokens")
    ids = (tokenizer.eos_token_id, SpecialTokens.of(tokenizer))
    return "\0".join((type(tokenizer).__name__, *map(str, ids), *parts))
