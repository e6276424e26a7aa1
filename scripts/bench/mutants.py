"""How many planted faults do the fixed compositions find? Each mutant is one mistake in a copy of the product.

    python scripts/bench/mutants.py                          # all: a table, exit 1 if one survives
    python scripts/bench/mutants.py --only tensor tied       # those whose name holds one of these words
    python scripts/bench/mutants.py --results mutants.jsonl  # appended to; what is in it is not run again

A mutant is found if a composition is wrong, fails, or is refused that is right otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LINES = ROOT / "tests" / "distributed" / "compositions.txt"


@dataclass(frozen=True)
class Mutant:
    """A mistake: `old` stands once in `file`, and becomes `new`."""

    name: str
    file: str
    old: str
    new: str


def _mutants() -> list[Mutant]:
    rows = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    return [Mutant(*row) for row in rows]


def apply(mutant: Mutant, root: Path) -> None:
    """Plant a fault below `root`. SystemExit where the product has changed so that it has no place."""
    path = root / "harness" / mutant.file
    text = path.read_text(encoding="utf-8")
    if text.count(mutant.old) != 1:
        raise SystemExit(f"{mutant.name}: {mutant.old!r} stands {text.count(mutant.old)} times in {mutant.file}")
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")


def run(mutant: Mutant, timeout_s: float) -> dict[str, object]:
    """Return what the fixed compositions say of a mutant."""
    with tempfile.TemporaryDirectory(prefix="mutant_") as folder:
        root = Path(folder)
        shutil.copytree(ROOT / "harness", root / "harness", symlinks=False)
        shutil.copytree(
            ROOT / "scripts" / "bench", root / "scripts" / "bench", ignore=shutil.ignore_patterns("results")
        )
        apply(mutant, root)
        start = time.monotonic()
        command = [sys.executable, str(root / "scripts/bench/parity.py"), "--lines", str(LINES), "--until_bad"]
        environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, env=environment, cwd=root, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        bad = [
            line
            for line in done.stdout.splitlines()
            if any(f" {kind}: " in line for kind in ("wrong", "failed", "refused"))
        ]
        said = bad[0].strip() if bad else (done.stderr.strip().splitlines() or [""])[-1] if done.returncode else ""
        tried = sum(line.lstrip()[:1].isdigit() for line in done.stdout.splitlines())
        seconds = round(time.monotonic() - start, 1)
        return {**asdict(mutant), "found": done.returncode != 0, "said": said, "tried": tried, "seconds": seconds}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD", help="mutants with one of these in their name")
    parser.add_argument("--results", type=Path, help="a file of results, one a line; those in it are not run again")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no more after so long")
    parser.add_argument("--check", action="store_true", help="only check that each mutant has its place")
    args = parser.parse_args()
    mutants = [each for each in _mutants() if not args.only or any(word in each.name for word in args.only)]
    if args.check:
        return _check(mutants)
    known = (
        [json.loads(line) for line in args.results.read_text().splitlines()]
        if args.results and args.results.exists()
        else []
    )
    found = {row["name"]: row for row in known}
    start = time.monotonic()
    for mutant in mutants:
        if mutant.name in found or time.monotonic() - start > args.seconds:
            continue
        found[mutant.name] = row = run(mutant, 600)
        print(
            f"{'found' if row['found'] else 'SURVIVES'}: {mutant.name} ({row['tried']} tried): {row['said']}"[:300],
            flush=True,
        )
        if args.results:
            with args.results.open("a") as file:
                file.write(json.dumps(row) + "\n")
    run_now = [found[each.name] for each in mutants if each.name in found]
    caught = sum(bool(row["found"]) for row in run_now)
    print(f"\n{caught} of {len(run_now)} mutants are found ({len(mutants)} in all)")
    return int(caught < len(run_now))


def _check(mutants: list[Mutant]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        for mutant in mutants:
            shutil.copytree(
                ROOT / "harness" / Path(mutant.file).parent,
                Path(folder) / "harness" / Path(mutant.file).parent,
                dirs_exist_ok=True,
            )
            apply(mutant, Path(folder))
    print(f"{len(mutants)} mutants have their places")
    return 0


if __name__ == "__main__":
    sys.exit(main())
