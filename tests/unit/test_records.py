"""The records of a package are found in its modules; a name that two of them have is refused."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path

import pytest

from harness.records import records
from harness.schedules import SCHEDULES, PipelineSchedule

GPIPE = """
from dataclasses import replace
from harness.schedules.gpipe import SCHEDULE as GPIPE
"""


def found(folder: Path, package: str, monkeypatch: pytest.MonkeyPatch, **modules: str) -> dict[str, PipelineSchedule]:
    (folder / package).mkdir()
    (folder / package / "__init__.py").touch()
    for name, content in modules.items():
        (folder / package / f"{name}.py").write_text(content)
    monkeypatch.syspath_prepend(str(folder))
    return records(package, [str(folder / package)], PipelineSchedule, attrgetter("name"))


def test_a_record_is_found_under_any_name_and_once_where_it_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = GPIPE + "OWN = replace(GPIPE, name='own')"
    schedules = found(tmp_path, "once", monkeypatch, first=own, second=GPIPE + "from once.first import OWN as AGAIN")
    assert sorted(schedules) == ["gpipe", "own"] and schedules["gpipe"] is SCHEDULES["gpipe"]


def test_a_second_record_of_one_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"^two PipelineSchedules are named 'gpipe', one in twice\.own: rename one$"):
        found(tmp_path, "twice", monkeypatch, own=GPIPE + "OWN = replace(GPIPE, paper='0')")
