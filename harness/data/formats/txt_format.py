"""A .txt file, which is one document: its extents are the pieces that begin in a range of bytes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from harness.data.formats.format import Extent, Format
from harness.data.on_disk.shards import SHARD_BYTES
from harness.data.rows.kinds import TEXT
from harness.data.rows.pieces import PIECE_CHARACTERS
from harness.errors import UserError

_LONGEST_REST = 3  # a UTF-8 character has at most this many bytes after its first


class TxtFormat(Format):
    """One text: the file's bytes as UTF-8, with newlines and byte order mark unchanged."""

    suffix = ".txt"

    def kind(self, file: Path) -> str:
        """Return TEXT. OSError if the file cannot be read."""
        with file.open("rb"):
            return TEXT

    def extents(self, file: Path, size: int) -> Iterator[Extent]:
        """Cut a file, perhaps empty, into extents of whole pieces, as pieces are numbered by their position."""
        total = file.stat().st_size
        step = -(-size // PIECE_CHARACTERS) * PIECE_CHARACTERS
        for start in range(0, max(total, 1), step):
            stop = min(start + step, total)
            yield Extent(str(file), start, stop, 0, stop - start)

    def in_order(self, file: Path, start: int = 0, before: int = 0) -> Iterator[Extent]:
        """Yield the extents of a file from byte `start` on."""
        total = file.stat().st_size
        for begin in range(start, max(total, start + 1), SHARD_BYTES):  # an empty text has an extent, too
            stop = min(begin + SHARD_BYTES, total)
            yield Extent(str(file), begin, stop, before, stop - begin)

    def documents(self, extent: Extent, kind: str) -> Iterator[dict[str, str | int]]:  # noqa: ARG002
        """Yield one document in pieces.

        A character across the border of two pieces belongs to the piece in which it begins, so each piece can be read
        independently.
        """
        with Path(extent.file).open("rb") as stream:
            for start in range(extent.start, max(extent.stop, extent.start + 1), PIECE_CHARACTERS):
                stream.seek(start)
                content = stream.read(PIECE_CHARACTERS + _LONGEST_REST)
                first = _rest_of_character(content) if start else 0
                last = PIECE_CHARACTERS + _rest_of_character(content[PIECE_CHARACTERS:])
                try:
                    text = content[first:last].decode("utf-8")
                except UnicodeDecodeError as error:
                    location = f"byte {start + first + error.start} is 0x{error.object[error.start]:02x}"
                    raise UserError(f"{extent.file} is not UTF-8 ({location}): convert it") from error
                if text or start == 0:
                    yield {"text": text, "part": start // PIECE_CHARACTERS}


FORMAT = TxtFormat()


def decodes(file: Path) -> bool:
    """Return whether the whole file can be read and is UTF-8."""
    try:
        file.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    return True


def _rest_of_character(content: bytes) -> int:
    """Return the number of leading bytes that continue a UTF-8 character begun before (10xxxxxx)."""
    rest = content[:_LONGEST_REST]
    return next((at for at, byte in enumerate(rest) if byte & 0xC0 != 0x80), len(rest))
