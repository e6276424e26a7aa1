"""Draw a config with what `ds-harness check` says about its lines, as FILE.svg.

python scripts/draw_check.py ds.json --world_size 8 [--out picture.svg]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from harness.checking import check  # noqa: E402
from harness.config import UserError  # noqa: E402
from harness.config.text.diagnostic import Diagnostic, Severity  # noqa: E402
from harness.config.text.document import Document, load  # noqa: E402
from scripts.svg import COLOURS, GREY, INK, PALE, Drawing  # noqa: E402

WIDTH, TOP, LINE = 720, 20, 20  # pixels
NUMBERS, CODE, MESSAGE = 36, 50, 170  # pixels from the left; line numbers end there, the others begin
SIZE, WIDE = 12, 7.2  # of the code, and the width that `Drawing` gives one of its characters
TINTS = {Severity.ERROR: 3, Severity.WARNING: 1, Severity.INFO: 0}  # places in COLOURS and PALE


def draw(document: Document, findings: list[Diagnostic]) -> Drawing:
    """Return the lines of a config; below one with findings, what is wrong with the underlined part and what helps."""
    lines = document.text.splitlines()
    rows = len(lines) + sum(1 + bool(finding.hint) for finding in findings)
    picture = Drawing(WIDTH, TOP + LINE * rows + 8, f"What the check finds in {Path(document.path).name}")
    y = float(TOP)
    for number, line in enumerate(lines, start=1):
        here = [finding for finding in findings if finding.line == number]
        if here:
            height = LINE * (1 + sum(1 + bool(finding.hint) for finding in here))
            picture.box(0, y - 14, WIDTH, height, PALE[TINTS[here[0].severity]], radius=0)
        picture.words(NUMBERS, y, str(number), size=SIZE, fill=GREY, anchor="end", mono=True)
        picture.words(CODE + WIDE * (len(line) - len(line.lstrip())), y, line.strip(), size=SIZE, mono=True)
        for finding in here:
            y = _finding(picture, y, finding)
        y += LINE
    return picture


def _finding(picture: Drawing, y: float, finding: Diagnostic) -> float:
    """Underline the part of the line at `y` that a finding is about, and return the position of its last words."""
    colour, x = COLOURS[TINTS[finding.severity]], CODE + WIDE * (finding.column - 1)
    picture.line([(x, y + 5), (x + WIDE * finding.length, y + 5)], colour, width=2)
    y += LINE
    picture.words(CODE, y, f"{finding.severity.value}[{finding.code}]", size=11, fill=colour, bold=True)
    picture.words(MESSAGE, y, finding.message, size=11, fill=INK)
    if finding.hint:
        y += LINE
        picture.words(MESSAGE, y, f"help: {finding.hint}", size=11, fill=GREY)
    return y


def main() -> int:
    """Return 1, with one line on standard error, if the file is no config."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", help="a DeepSpeed JSON, or the name of a preset")
    parser.add_argument("--world_size", type=int, help="number of ranks")
    parser.add_argument("--out", type=Path, help="where the picture goes; default: the config's path with .svg")
    args = parser.parse_args()
    try:
        document = load(args.config)
        picture = draw(document, check(document, world_size=args.world_size))
    except UserError as error:
        print(f"draw_check: {error}", file=sys.stderr)
        return 1
    out = args.out or Path(args.config).with_suffix(".svg")
    out.write_text(picture.text(), encoding="utf-8")
    print(f"the picture is {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
