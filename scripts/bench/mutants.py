"""How many planted faults do the fixed compositions find? Each mutant is one mistake in a copy of the product.

    python scripts/bench/mutants.py                          # all: a table, exit 1 if one survives
    python scripts/bench/mutants.py --only tensor tied       # those whose name holds one of these words
    python scripts/bench/mutants.py --results mutants.jsonl  # appended to; what is in it is not run again

`mutants.json` holds them: a name, a file, a text that stands once in it, what takes its place, and words of a line of
`tests/distributed/compositions.txt` that is tried first, as it is quicker; all others follow until one is not right.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from harness.training.recording.files import versions
from harness.verify.trials.composition import Composition
from harness.verify.trials.trial import RIGHT, Judge, TrialResult, try_all

ROOT = Path(__file__).resolve().parents[2]
LINES = ROOT / "tests" / "distributed" / "compositions.txt"


@dataclass(frozen=True)
class Mutant:
    """A mistake: `old` stands once in `file`, and becomes `new`."""

    name: str
    file: str
    old: str
    new: str
    first: str = ""


class Found(Exception):
    """A composition is not right."""


def read_mutants() -> list[Mutant]:
    rows = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    return [Mutant(*row) for row in rows]


def has_place(mutant: Mutant) -> bool:
    """Whether the text that the mistake changes stands in the product, once."""
    path = ROOT / "harness" / mutant.file
    return path.exists() and path.read_text(encoding="utf-8").count(mutant.old) == 1


def plant(mutant: Mutant, root: Path) -> None:
    """Copy the product below `root`, with the mistake."""
    shutil.copytree(ROOT / "harness", root / "harness")
    path = root / "harness" / mutant.file
    path.write_text(path.read_text(encoding="utf-8").replace(mutant.old, mutant.new), encoding="utf-8")


def run(mutant: Mutant, judge: Judge) -> dict[str, object]:
    """Return what the fixed compositions say of a mutant."""
    lines = [line for line in LINES.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    lines.sort(key=lambda line: not (mutant.first and mutant.first in line))
    tried: list[TrialResult] = []

    def report(verdict: TrialResult) -> None:
        tried.append(verdict)
        if verdict.kind != RIGHT:
            raise Found

    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant_") as folder:
        plant(mutant, Path(folder))
        try:
            for line in lines:  # one by one, in this order: all of one number of ranks would come first
                try_all(
                    [Composition.parse(line)], report, judge=judge, root=Path(folder), limit_s=30, verify_plan=False
                )
        except Found:
            pass
    last = tried[-1]
    said = f"{last.kind}: {last.composition}: {last.reason}"[:240] if last.kind != RIGHT else ""
    seconds = round(time.monotonic() - start, 1)
    return {
        "name": mutant.name,
        "file": mutant.file,
        "found": bool(said),
        "said": said,
        "tried": len(tried),
        "s": seconds,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD", help="mutants with one of these in their name")
    parser.add_argument("--results", type=Path, help="a file of results, one a line; those in it are not run again")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no new one after this many seconds")
    parser.add_argument("--write", type=Path, help="a JSON file of all results")
    args = parser.parse_args()
    mutants = [each for each in read_mutants() if not args.only or any(word in each.name for word in args.only)]
    for mutant in [each for each in mutants if not has_place(each)]:
        print(f"text to change not found: {mutant.name} ({mutant.file})")
        mutants.remove(mutant)
    known = args.results.read_text().splitlines() if args.results and args.results.exists() else []
    found = {row["name"]: row for row in map(json.loads, known)}
    judge, start = Judge(strict=True), time.monotonic()
    for mutant in mutants:
        if mutant.name in found or time.monotonic() - start > args.seconds:
            continue
        row = found[mutant.name] = run(mutant, judge)
        print(
            f"{'found' if row['found'] else 'SURVIVES'} ({row['tried']}, {row['s']} s): {mutant.name}: {row['said']}",
            flush=True,
        )
        if args.results:
            with args.results.open("a") as file:
                file.write(json.dumps(row) + "\n")
    of_these = [found[each.name] for each in mutants if each.name in found]
    caught = sum(bool(row["found"]) for row in of_these)
    if args.write:
        content = {
            "date": date.today().isoformat(),
            "versions": versions(),
            "mutants": len(of_these),
            "found": caught,
            "not_tried": len(mutants) - len(of_these),
            "each": of_these,
        }
        args.write.write_text(json.dumps(content, indent=1) + "\n")
    print(f"{caught} of {len(of_these)} mutants are found ({len(mutants)} in all)")
    return int(caught < len(of_these))


if __name__ == "__main__":
    sys.exit(main())
