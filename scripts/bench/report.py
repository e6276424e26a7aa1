"""Write what a benchmark measured: what it was, on which day, with which versions."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

from harness.atomic import replace_text
from harness.training.recording.files import versions

RESULTS = Path(__file__).parent / "results"


def write_report(path: Path, content: dict[str, Any], *, what: str) -> Path:
    """Write `content` after date, versions and the first line of `what`; return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    head = {"what": what.partition("\n")[0], "date": date.today().isoformat(), "versions": versions()}
    report = {**head, **{key: value for key, value in content.items() if key not in head}}
    replace_text(path, json.dumps(report, indent=1) + "\n")  # a benchmark that is ended here can still go on with it
    return path
