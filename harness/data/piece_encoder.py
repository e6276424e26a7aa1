"""Tokenise a long document piece by piece, with the same tokens as in one piece but less memory.

The pieces are cut anywhere (`rows/pieces.py`). Near each border this module searches a place where the tokenizer cuts
too: where the surrounding text gives the same tokens in one part as in two. Cutting there leaves the document's tokens
unchanged. Ends of lines are tried first, then ends of words. If no place is found, the document is cut at the border,
and a word there may get other tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice

import numpy as np
import numpy.typing as npt

from harness.data.tokenizer import ByteTokenizer, SpecialTokens, Tokenizer, encode, end_of_document_id

_AROUND = 256  # characters before and after a place that are tokenised to decide whether the tokenizer cuts there
_LOOKED_AT = 1 << 12  # characters after a border that are searched for a place
_TRIED = 12  # ends of lines that are tried, and as many ends of words
_ELSEWHERE = 64  # positions tried if those fail: even without spaces, a token is seldom longer

Ids = npt.NDArray[np.integer]


class PieceEncoder:
    """Tokenises rows that may be parts of documents; the ids of a row depend on it and its two neighbours alone."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.end = end_of_document_id(tokenizer)
        self.special = SpecialTokens.of(tokenizer)

    def __call__(
        self, texts: Sequence[str], parts: Sequence[int], before: str = "", after: str | None = None
    ) -> list[Ids]:
        """Return the ids of each row; those of a document have the tokenizer's special tokens around them and end with
        the end-of-document id.

        Args:
            texts: consecutive rows.
            parts: the part number of each in its document.
            before: the text of the row before, if the first row continues it.
            after: the text of the row after, if it continues the last row.
        """
        rows = list(texts) if after is None else [*texts, after]
        continues = [part > 0 for part in parts] + [after is not None]
        # A row's ids go from its own cut to the cut in the next row: text before its cut belongs to the previous row.
        # Both rows compute the same cut, so different processes can tokenise them.
        cuts = [
            self._cut(left, row) if continued else (0, "")
            for left, row, continued in zip([before, *rows], rows, continues, strict=False)
        ]
        whole = []
        for index, text in enumerate(texts):
            start, anchor = cuts[index]
            beyond = rows[index + 1][: cuts[index + 1][0]] if continues[index + 1] else ""
            whole.append(anchor + text[start:] + beyond)
        anchors = [anchor for _, anchor in cuts]
        skipped = {anchor: len(encode(self.tokenizer, [anchor])[0]) if anchor else 0 for anchor in set(anchors)}
        return [
            self._framed(ids[skipped[anchor] :], begins=part == 0, ends=not continued)
            for ids, anchor, part, continued in zip(
                encode(self.tokenizer, whole), anchors, parts, continues[1:], strict=False
            )
        ]

    def _framed(self, ids: Ids, *, begins: bool, ends: bool) -> Ids:
        """Add what stands before the first and behind the last part of a document to its ids."""
        before = self.special.before if begins else ()
        after = self.special.after if ends else ()
        framed = np.concatenate([np.array(part, dtype=ids.dtype) for part in (before, ids, after)])
        is_closed = len(framed) > 0 and framed[-1] == self.end  # by the tokenizer, or by the text itself
        return np.append(framed, np.full(int(ends and not is_closed), self.end, dtype=ids.dtype))

    def _cut(self, left: str, right: str) -> tuple[int, str]:
        """Return the index in `right` where tokenising may start anew, and the character before it ("" if none).

        A tokenizer may treat the beginning of a text specially, and put a space there. So the text is tokenised with
        the character before it, whose tokens are then dropped.
        """
        if isinstance(self.tokenizer, ByteTokenizer):
            return 0, ""
        left = left[-_AROUND:]
        for at in dict.fromkeys(_places(left[-1:], right)):
            before = (left + right[:at])[-_AROUND:]
            if self._cuts_between(before, right[at : at + _AROUND]):
                return at, before[-1:]
        return 0, ""

    def _cuts_between(self, left: str, right: str) -> bool:
        whole, first, anchor, second = encode(self.tokenizer, [left + right, left, left[-1:], left[-1:] + right])
        after = second[len(anchor) :]
        begins_alike = np.array_equal(second[: len(anchor)], anchor)
        return begins_alike and np.array_equal(whole, np.concatenate([first, after]))


def _places(last: str, text: str) -> Iterator[int]:
    """Yield indices in `text`, which follows the character `last`, in the order in which to try them."""
    looked_at = text[:_LOOKED_AT]
    pairs = list(zip(last + looked_at[:-1], looked_at, strict=False))
    lines = (at for at, (one, other) in enumerate(pairs) if one == "\n" and not other.isspace())
    words = (at for at, (one, other) in enumerate(pairs) if other.isspace() and not one.isspace())
    return chain(islice(lines, _TRIED), islice(words, _TRIED), range(min(_ELSEWHERE, len(text))))
