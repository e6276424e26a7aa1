"""Have two ranks fill rows of the matrix, and continue after a family that kills or stalls them.

Rows are lines of JSON in a file. A family that is already in it is not run again, so an interrupted run can continue.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from harness.config.values.json_file import objects_of_lines, regular_bytes
from harness.config.values.json_object import JsonObject
from harness.errors import UserError
from harness.verify.matrix import CELLS
from harness.verify.trials.launch import run_on_ranks

RANKS = 2


def run_families(
    families: Sequence[str],
    results: Path,
    *,
    limit_s: float,
    report: Callable[[str, dict[str, str]], None],
    only: str = "",
) -> dict[str, dict[str, str]]:
    """Return the rows of `families`, or their cells `only`, and call `report` with each as soon as it is known.

    A family that takes longer than `limit_s` seconds is given up; its row says so.
    """
    _end_last_line(results)
    for family, row in read_rows(results).items():
        if family in families:
            report(family, row)
    waiting = [family for family in families if family not in read_rows(results)]

    def found(number: int, outcome: JsonObject) -> None:
        row = outcome
        if "error" in outcome:
            row = dict.fromkeys([only] if only else CELLS, f"not tried: {outcome['error']}")
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"family": waiting[number], **row}) + "\n")
        report(waiting[number], row)

    if waiting:
        from harness.verify.trials.cells import run_rows

        with TemporaryDirectory(prefix="families_") as folder:
            lines = [f"{family} {only}".rstrip() for family in waiting]
            run_on_ranks(lines, RANKS, Path(folder), worker=run_rows, limit_s=limit_s, report=found)
    rows = read_rows(results)
    return {family: rows[family] for family in families}


def read_rows(results: Path) -> dict[str, dict[str, str]]:
    """Return the rows of a results file by family, without a last line that was cut off."""
    rows = [row for row in objects_of_lines(_content(results)) if "family" in row]
    return {str(row.pop("family")): row for row in rows}


def _content(results: Path) -> bytes:
    try:
        return regular_bytes(results)
    except FileNotFoundError:
        return b""
    except (OSError, ValueError) as error:
        raise UserError(f"--results {results}: {getattr(error, 'strerror', None) or error}") from error


def _end_last_line(results: Path) -> None:
    """Append a line break to a last line that was cut off, so that the next row starts on a line of its own."""
    content = _content(results)
    if content and not content.endswith(b"\n"):
        with results.open("a", encoding="utf-8") as file:
            file.write("\n")
