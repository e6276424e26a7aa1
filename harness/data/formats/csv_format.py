"""A .csv file with a header, read whole: a field may contain line breaks, so no other place is known to begin a row."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from pathlib import Path

from harness.data.formats.format import Extent, Row, RowFormat, require_distinct
from harness.errors import UserError


class CsvFormat(RowFormat):
    """Records below a header that names the columns."""

    suffix = ".csv"
    describes_data = True

    def rows(self, extent: Extent) -> Iterator[Row]:
        """Yield a row for each record below the header."""
        csv.field_size_limit(sys.maxsize)
        with Path(extent.file).open(encoding="utf-8-sig", newline="") as stream:
            records = csv.DictReader(stream, strict=True)
            read = 0
            try:
                require_distinct(records.fieldnames or (), extent.file)
                if records.fieldnames:  # the header is read
                    read = records.reader.line_num
                for record in records:
                    read = records.reader.line_num  # DictReader's own line_num does not count blank lines
                    location = f"{extent.file}:{read}"
                    if None in record or None in record.values():
                        raise UserError(
                            f"{location} does not have as many fields as the header: quote fields that contain a comma"
                        )
                    yield location, record
            except csv.Error as error:
                raise UserError(f"{extent.file}:{read + 1} is not CSV ({error})") from error
            except UnicodeDecodeError as error:
                raise UserError(f"{extent.file} is not UTF-8 after line {read}: convert it") from error


FORMAT = CsvFormat()
