"""What every format of rows keeps. The tests of a format derive a class from `RowFormatTests` that can write a file."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.data.files.sources import find_files
from harness.data.formats import Extent, Format, format_of
from harness.data.rows.kinds import document, kind_of_row
from harness.data.rows.pieces import PIECE_CHARACTERS
from harness.data.streaming.rows import FileRows
from harness.errors import UserError

same_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors])
# what a line, a field or a JSON text could take for its own end
characters = st.text(alphabet='ab ,"\\\n\r\t\u2028\x85{}[]:é🙂', max_size=12)
MESSAGES = [{"role": "user", "content": "a\n"}, {"role": "assistant", "content": "日本"}]
DAMAGES = 60


def texts(file: Path, parts: Sequence[Extent] = ()) -> list[str]:
    """Return the texts of a file, or of parts of it; the pieces of a long text are joined."""
    found: list[str] = []
    form = format_of(file)
    for row in (row for part in parts or [form.whole(file)] for row in form.documents(part, "text")):
        if row["part"]:
            found[-1] += str(row["text"])
        else:
            found.append(str(row["text"]))
    return found


class RowFormatTests:
    """The tests of a format of rows.

    Attributes:
        suffix: of its files.
        holds_lists: whether a field can be a list, as messages are.
    """

    suffix: ClassVar[str]
    holds_lists: ClassVar[bool] = True

    def write(self, file: Path, rows: Sequence[Mapping[str, object]]) -> None:
        """Write rows, which all have the same columns, to a file."""
        raise NotImplementedError

    def _written(self, folder: Path, found: Sequence[str]) -> tuple[Path, Format]:
        file = folder / f"a{self.suffix}"
        self.write(file, [{"text": text, "id": str(number)} for number, text in enumerate(found)])
        return file, format_of(file)

    def test_its_files_are_found(self, tmp_path: Path) -> None:
        file, form = self._written(tmp_path, ["a"])
        assert form.suffix == self.suffix and find_files(file) == find_files(tmp_path) == [file]

    @given(st.lists(characters, min_size=1, max_size=5), st.integers(1, 40))
    @same_folder
    def test_texts_come_back_from_a_whole_file_and_from_parts_of_any_size(
        self, tmp_path: Path, wanted: list[str], size: int
    ) -> None:
        file, form = self._written(tmp_path, wanted)
        assert form.kind(file) == "text"
        assert texts(file) == texts(file, list(form.extents(file, size))) == wanted

    def test_a_text_of_several_pieces_comes_back(self, tmp_path: Path) -> None:
        wanted = ["a", "日本 " * PIECE_CHARACTERS, "b"]
        assert texts(self._written(tmp_path, wanted)[0]) == wanted

    def test_conversations_come_back(self, tmp_path: Path) -> None:
        file, texts_alone = tmp_path / f"a{self.suffix}", {"prompt": "a\n", "completion": "日本"}
        row = {"messages": MESSAGES} if self.holds_lists else texts_alone
        kind = kind_of_row(row, "row")
        self.write(file, [{**row, "id": "1"}] * 3)
        form = format_of(file)
        assert form.kind(file) == kind
        found = list(form.documents(form.whole(file), kind))
        wanted = document(row, kind, "row")["conversation"]
        assert [json.loads(str(each["conversation"])) for each in found] == [json.loads(wanted)] * 3
        assert len({each["place"] for each in found}) == 3

    def test_a_stream_goes_on_at_each_part(self, tmp_path: Path) -> None:
        file, form = self._written(tmp_path, [str(number) for number in range(9)])
        parts = list(form.in_order(file))
        for number, part in enumerate(parts):
            assert list(form.in_order(file, part.start, part.before)) == parts[number:]

    def test_files_are_streamed_over_and_over(self, tmp_path: Path) -> None:
        file, _ = self._written(tmp_path, ["one", "two\n", "三"])
        (tmp_path / "b.txt").write_text("last")
        found = FileRows([file, tmp_path / "b.txt"], "text").since(1, {})
        wanted = [(1, 0, "last"), (0, 0, "one"), (0, 1, "two\n"), (0, 2, "三"), (1, 0, "last")]
        assert [(file, row, each["text"]) for file, row, each in itertools.islice(found, len(wanted))] == wanted

    def test_damage_is_told_in_one_line_that_names_the_file(self, tmp_path: Path) -> None:
        file, form = self._written(tmp_path, [f"日本 {number}" * 9 for number in range(9)])
        content, choose = file.read_bytes(), random.Random(0)
        damaged = tmp_path / f"damaged{self.suffix}"
        for _ in range(DAMAGES):
            changed = bytearray(content)
            changed[choose.randrange(len(content))] ^= 1 << choose.randrange(8)
            damaged.write_bytes(changed)
            try:
                kind = form.kind(damaged)
                list(form.documents(form.whole(damaged), kind)) if kind else None
            except UserError as error:
                assert str(damaged) in str(error) and "\n" not in str(error)
        damaged.write_bytes(b"\xff" + content)
        with pytest.raises(UserError, match="damaged"):
            form.kind(damaged)
            texts(damaged)
