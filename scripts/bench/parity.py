"""Search for compositions that come to wrong numbers: random ones, each against one process of plain torch.

python scripts/bench/parity.py --count 100 --seed 7                  # prints what is neither right nor refused
python scripts/bench/parity.py --seconds 170 --results found.jsonl   # goes on where the file ends
python scripts/bench/parity.py --line 'llama : pp=2 zero=1'          # one composition, with its numbers
python scripts/bench/parity.py --having cp=2 precision=bf16 --results found.jsonl   # compositions with these words
python scripts/bench/parity.py --shrink 'gemma2 data=packed : ...'   # the smallest that still fails
python scripts/bench/parity.py --pairs found.jsonl --write parity.json   # which pairs have been met how often
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict
from datetime import date
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from harness.training.recording.files import versions
from harness.verify.trials.composition import Composition
from harness.verify.trials.trial import FAILED, REFUSED, RIGHT, WRONG, TrialResult, try_all
from tests.support.random_compositions import Families, draw, features, pairs, shrink

SLICE = 40  # compositions between two looks at the clock: of each slice those on few ranks come first
LARGE = 1000
BAD = (WRONG, FAILED)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20, help="compositions")
    parser.add_argument("--seed", default="0", help="any word")
    parser.add_argument(
        "--seconds", type=float, default=0, help="instead of a count: start no new one after this many seconds"
    )
    parser.add_argument("--having", nargs="+", default=[], help="only compositions with all these words, as cp=2")
    parser.add_argument("--results", type=Path, help="a file of verdicts that is appended to")
    parser.add_argument("--line", help="try one composition")
    parser.add_argument("--lines", type=Path, help="try the compositions of a file")
    parser.add_argument("--until_bad", action="store_true", help="with --lines: end at the first that is not right")
    parser.add_argument("--shrink", help="find the smallest composition that fails as this one")
    parser.add_argument("--pairs", type=Path, nargs="+", help="files of verdicts: print how often pairs were met")
    parser.add_argument("--write", type=Path, help="with --pairs: a JSON file of the same")
    parser.add_argument("--precision", type=Path, help="a file of verdicts: print what 16 bits do, by layout")
    args = parser.parse_args()
    if args.pairs:
        return _print_pairs(args.pairs, args.write)
    if args.precision:
        return _print_precision(args.precision)
    if args.line or args.lines:
        lines = [args.line] if args.line else args.lines.read_text().splitlines()
        chosen = [Composition.parse(line) for line in lines if line.strip() and not line.startswith("#")]
        return _try_lines(chosen, until_bad=args.until_bad)
    if args.shrink:
        return _shrink(Composition.parse(args.shrink))
    return _search(args)


class Enough(Exception):
    """What is wanted is known."""


def _try_lines(chosen: list[Composition], *, until_bad: bool) -> int:
    start, bad = time.monotonic(), 0

    def tell(verdict: TrialResult) -> None:
        nonlocal bad
        print(f"{time.monotonic() - start:6.1f} {verdict}", f"[{verdict.off}]" if verdict.off else "", flush=True)
        bad += verdict.kind != RIGHT if until_bad else verdict.is_bad
        if bad and until_bad:
            raise Enough

    with suppress(Enough):
        try_all(chosen, tell)
    return int(bad > 0)


def _shrink(composition: Composition) -> int:
    (first,) = try_all([composition])
    if not first.is_bad:
        print(first)
        return 0

    def fails(smaller: Composition) -> bool:
        (verdict,) = try_all([smaller])
        print(" ", verdict.kind, smaller, flush=True)
        return verdict.kind == first.kind

    print("smallest:", shrink(composition, fails))
    return 1


def _search(args: argparse.Namespace) -> int:
    families, start, counts = Families.read(), time.monotonic(), Counter[str]()
    known = args.results.read_text().splitlines() if args.results and args.results.exists() else []
    first = 1 + max((json.loads(line)["number"] for line in known), default=-1)
    drawn = ((draw(Random(f"{args.seed} {number}"), families), number) for number in itertools.count(first))
    wanted = ((str(each), number) for each, number in drawn if features(each).issuperset(args.having))
    chosen = dict(itertools.islice(wanted, LARGE if args.seconds else args.count))

    def tell(verdict: TrialResult) -> None:
        counts[verdict.kind] += 1
        if verdict.is_bad:
            print(verdict, flush=True)
        if args.results:
            row = {"number": chosen[str(verdict.composition)], **_row(verdict)}
            with args.results.open("a") as file:
                file.write(json.dumps(row) + "\n")

    lines = list(chosen)
    for at in range(0, len(lines), SLICE):
        if args.seconds and time.monotonic() - start > args.seconds:
            break
        try_all([Composition.parse(line) for line in lines[at : at + SLICE]], tell)
    print(f"seed {args.seed}: {counts.total()} compositions in {time.monotonic() - start:.0f} s: {dict(counts)}")
    return int(sum(counts[kind] for kind in BAD) > 0)


def _row(verdict: TrialResult) -> dict[str, object]:
    numbers = {
        name: asdict(value) if value else None
        for name, value in (("off", verdict.off), ("limit", verdict.limit), ("own", verdict.own))
    }
    return {"line": str(verdict.composition), "kind": verdict.kind, "reason": verdict.reason, **numbers}


def _print_pairs(paths: list[Path], to: Path | None) -> int:
    every = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    rows = list({row["line"]: row for row in every}.values())  # the last verdict on a line counts
    counts = Counter(row["kind"] for row in rows)
    kinds = {
        kind: pairs(Composition.parse(row["line"]) for row in rows if row["kind"] == kind) for kind in (RIGHT, REFUSED)
    }
    print(f"{len(rows)} compositions: {dict(counts)}; {len(kinds[RIGHT])} pairs were right at least once")
    for pair, count in kinds[RIGHT].most_common(0 if to else None):
        print(f"{count:5} {' & '.join(pair)}")
    if to:
        once = {row["line"] for row in every if row["kind"] in BAD}
        met: dict[str, dict[str, int]] = {}
        for (one, other), count in sorted(kinds[RIGHT].items()):
            met.setdefault(one, {})[other] = count
        content = {
            "date": date.today().isoformat(),
            "versions": versions(),
            "compositions": len(rows),
            "verdicts": dict(counts),
            "bad": [row["line"] for row in rows if row["kind"] in BAD],
            "not_right_at_first": sorted(once - {row["line"] for row in rows if row["kind"] in BAD}),
            "right_pairs": len(kinds[RIGHT]),
            "pairs": "how often two things met in a composition that was right",
        }
        lines = ",\n".join(f"    {json.dumps(one)}: {json.dumps(others)}" for one, others in met.items())
        to.write_text(json.dumps(content, indent=2)[:-2] + ',\n  "met": {\n' + lines + "\n  }\n}\n")
    return 0


def _print_precision(path: Path) -> int:
    """Print, by layout, how far executions in bf16 are from one process in bf16, beside that one's own distance."""
    found: dict[str, list[tuple[dict[str, float], dict[str, float]]]] = {}
    for row in map(json.loads, path.read_text().splitlines()):
        executions = Composition.parse(row["line"]).executions
        if row["own"] is not None and len(executions) == 1 and not executions[0].bits:
            one = executions[0]
            found.setdefault(f"{one.sizes} zero={one.zero}", []).append((row["off"], row["own"]))
    for layout, rows in sorted(found.items()):
        cells = [f"| {layout} | {len(rows)}"]
        for name in ("loss", "first_norm", "weights"):
            off, own = [a[name] for a, _ in rows], [b[name] for _, b in rows]
            cells.append(f"{statistics.median(off):.0e} ({max(off):.0e}), {statistics.median(own):.0e}")
        print(" | ".join(cells), "|")
    every = [pair for rows in found.values() for pair in rows]
    for name in every[0][0] if every else ():
        shares = [off[name] / own[name] for off, own in every if own[name]] or [0.0]
        print(f"{name}: of the precision's own: median {statistics.median(shares):.2f}, most {max(shares):.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
