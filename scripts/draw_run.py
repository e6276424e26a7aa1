"""Draw a run, its loss and its stages, as RUN/run.svg: python scripts/draw_run.py runs/demo-... [--out picture.svg].

Reads what the run has left: metrics.jsonl, evaluations.jsonl, restarts.jsonl and run.json.
"""

import argparse
import json
import math
import sys
import textwrap
from pathlib import Path
from typing import Any

from svg import COLOURS, GREY, PALE, RULE, Drawing

WIDTH, LEFT, RIGHT = 720.0, 56.0, 20.0
TOP, CURVE = 56.0, 200.0
LAYER, WORDS = 34.0, 20.0
CAUSE = 110  # characters of a fault's cause


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a .jsonl file, none if there is no such file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []


def draw(folder: Path) -> Drawing:
    """Return the picture of a run: loss over steps above, what ended it on its way, layers of each stage below."""
    metrics = read_lines(folder / "metrics.jsonl")
    faults = read_lines(folder / "restarts.jsonl")
    stages = json.loads((folder / "run.json").read_text(encoding="utf-8"))["stages"]
    below = TOP + CURVE + 62 + (WORDS * len(faults) + 16 if faults else 0)
    picture = Drawing(WIDTH, below + 14 + LAYER + 20 + WORDS * len(stages), "Loss and pipeline stages of a run")
    last = metrics[-1]
    tokens = sum(row["tokens_per_second"] * row["step_seconds"] for row in metrics)
    seconds = sum(row["step_seconds"] for row in metrics)
    picture.words(20, 24, "Loss", size=14, bold=True)
    picture.words(
        62, 24, f"{last['step']} steps, {tokens:,.0f} tokens, {tokens / seconds:,.0f} tokens/s", size=11, fill=GREY
    )
    _curve(picture, metrics, read_lines(folder / "evaluations.jsonl"), [fault["step"] for fault in faults])
    for number, fault in enumerate(faults, start=1):
        y = TOP + CURVE + 38 + WORDS * number
        picture.words(20, y, f"{number}: {textwrap.shorten(fault['cause'], CAUSE)}", size=11, fill=COLOURS[3])
    _stages(picture, stages, below)
    return picture


def _curve(
    picture: Drawing, metrics: list[dict[str, Any]], evaluations: list[dict[str, Any]], faults: list[int]
) -> None:
    finite = [row for row in metrics if math.isfinite(row["loss"])]
    losses = [row["loss"] for row in finite] or [0.0]
    low, high = math.floor(min(losses)), math.floor(max(losses)) + 1
    steps = metrics[-1]["step"]

    def place(step: float, loss: float) -> tuple[float, float]:
        across = (step - 1) / max(steps - 1, 1)
        return LEFT + across * (WIDTH - LEFT - RIGHT), TOP + CURVE * (high - loss) / (high - low)

    for tick in range(low, high + 1, max(1, (high - low) // 6)):
        y = place(1, tick)[1]
        picture.line([(LEFT, y), (WIDTH - RIGHT, y)], RULE)
        picture.words(LEFT - 8, y + 4, str(tick), size=11, fill=GREY, anchor="end")
    for step in sorted({1, *(round(steps * part / 4) for part in (1, 2, 3, 4))} - {0}):
        picture.words(place(step, low)[0], TOP + CURVE + 18, str(step), size=11, fill=GREY, anchor="middle")
    picture.line([place(row["step"], row["loss"]) for row in finite], COLOURS[0], width=2)
    for row in (row for row in evaluations if math.isfinite(row["eval_loss"])):
        x, y = place(row["step"], min(max(row["eval_loss"], low), high))
        picture.dot(x, y, 4, COLOURS[1])
        picture.words(x - 2, y - 26, f"{row['eval_loss']:.2f}", size=11, fill=COLOURS[1], anchor="end")
    for number, step in enumerate(faults, start=1):
        x = place(max(step, 1), low)[0]
        picture.line([(x, TOP), (x, TOP + CURVE)], COLOURS[3])
        picture.words(x + 4, TOP + 10 + 14 * ((number - 1) % 3), str(number), size=11, fill=COLOURS[3], bold=True)
    picture.words(WIDTH - RIGHT, 24, "line: training, dots: evaluation", size=11, fill=GREY, anchor="end")


def _stages(picture: Drawing, stages: list[dict[str, Any]], top: float) -> None:
    """Draw a box for each pipeline layer in the colour of its stage, and a line of words for each stage."""
    picture.words(20, top, "Pipeline stages", size=14, bold=True)
    wide = (WIDTH - 20 - RIGHT) / (stages[-1]["last"] + 1)
    for row, stage in enumerate(stages):
        colour, pale = COLOURS[row % len(COLOURS)], PALE[row % len(PALE)]
        names = [name for name, count in stage["kinds"].items() for _ in range(count)]
        for index, name in enumerate(names, start=stage["first"]):
            x = 20 + wide * index
            picture.box(x + 1, top + 14, max(wide - 2, 1), LAYER, pale, stroke=colour)
            label = name if len(name) * 5.6 < wide else str(index) if wide > 18 else ""
            picture.words(x + wide / 2, top + 14 + LAYER / 2 + 4, label, size=10, anchor="middle")
        ranks = ("rank " if len(stage["ranks"]) == 1 else "ranks ") + ", ".join(map(str, stage["ranks"]))
        layers = f"layers {stage['first']} to {stage['last']}"
        y = top + 14 + LAYER + 20 + row * WORDS
        picture.box(20, y - 10, 12, 12, pale, stroke=colour)
        picture.words(
            38, y, f"stage {stage['stage']} on {ranks}: {layers}, {stage['parameters']:,} parameters a rank", size=12
        )


def main() -> int:
    """Return 1, with one line on standard error, if the folder holds no run that has made a step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="output_dir of a run")
    parser.add_argument("--out", type=Path, help="where the picture goes; default: RUN/run.svg")
    args = parser.parse_args()
    try:
        picture = draw(args.run)
    except (OSError, ValueError, LookupError):
        problem = "holds no metrics.jsonl and run.json of a run that has made a step: name its output_dir"
        print(f"draw_run: {args.run} {problem}", file=sys.stderr)
        return 1
    out = args.out or args.run / "run.svg"
    out.write_text(picture.text(), encoding="utf-8")
    print(f"the picture is {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
