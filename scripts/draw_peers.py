"""Write the table and the picture of docs/performance.md from what scripts/bench/peers.py has measured.

python scripts/draw_peers.py
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.svg import COLOURS, GREY, INK, RULE, Drawing  # noqa: E402

MEASURED = ROOT / "scripts/bench/results/peers.json"
PAGE, PICTURE = ROOT / "docs/performance.md", ROOT / "docs/images/peers.svg"
TABLE = re.compile(r"(<!-- peers -->\n).*?(<!-- /peers -->)", re.DOTALL)
LEFT, SCALE, ROW, TOP = 200, 380, 22, 44  # pixels


def table(report: dict[str, Any]) -> str:
    """Return the table in Markdown."""
    lines = ["| program | ranks | tokens/s | of one process | rounds |", "|---|---|---|---|---|"]
    for name, row in report["programs"].items():
        speeds, shares = sorted(row["tokens_per_second"]), row["of_one_process"]
        middle, rounds = speeds[len(speeds) // 2], ", ".join(f"{share:.2f}" for share in shares)
        lines.append(f"| {name} | {row['ranks']} | {middle:,.0f} | {row['median_of_one_process']:.2f} | {rounds} |")
    worst = f"{report['worst_loss_difference']:.0e}"
    return "\n".join([*lines, "", f"Measured on {report['date']}; the losses differ by {worst} at most."])


def picture(report: dict[str, Any]) -> str:
    """Return bars of the median share, with a dot for each round."""
    programs = report["programs"]
    drawing = Drawing(LEFT + SCALE * 1.4, TOP + ROW * len(programs) + 16, "Speed beside one process on all cores")
    drawing.words(LEFT, 18, "tokens/s as a share of one process on all cores", bold=True)
    for tick in range(0, 15, 2):
        x = LEFT + SCALE * tick / 10
        drawing.line([(x, TOP - 8), (x, TOP + ROW * len(programs))], INK if tick == 10 else RULE)
        drawing.words(x, TOP - 12, f"{tick / 10:.1f}", size=10, fill=GREY, anchor="middle")
    for place, (name, row) in enumerate(programs.items()):
        y = TOP + ROW * place
        colour = COLOURS[0] if name.startswith("harness") else COLOURS[7]
        drawing.words(LEFT - 8, y + 14, name, anchor="end")
        drawing.box(LEFT, y + 3, SCALE * row["median_of_one_process"], ROW - 6, colour)
        for share in row["of_one_process"]:
            drawing.dot(LEFT + SCALE * share, y + ROW / 2, 2, INK)
    return drawing.text()


def main() -> None:
    """Write both."""
    report = json.loads(MEASURED.read_text(encoding="utf-8"))
    PICTURE.write_text(picture(report), encoding="utf-8")
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(TABLE.sub(lambda found: f"{found[1]}{table(report)}\n{found[2]}", page), encoding="utf-8")


if __name__ == "__main__":
    main()
