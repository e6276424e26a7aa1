"""Draw a run, its loss and its stages, as RUN/run.svg: python scripts/draw_run.py runs/demo-... [--out picture.svg].

Reads what the run has left: metrics.jsonl, evaluations.jsonl and run.json.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from svg import COLOURS, GREY, PALE, RULE, Drawing

WIDTH, LEFT, RIGHT = 720.0, 56.0, 20.0
TOP, CURVE = 56.0, 200.0
STAGE = 34.0


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a .jsonl file, none if there is no such file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []


def draw(metrics: list[dict[str, Any]], evaluations: list[dict[str, Any]], run: dict[str, Any]) -> Drawing:
    """Return the picture of a run: loss over steps above, layers and parameters of each stage below."""
    stages = run["stages"]
    picture = Drawing(WIDTH, TOP + CURVE + 70 + STAGE * len(stages) + 16, "Loss and pipeline stages of a run")
    last = metrics[-1]
    tokens = sum(row["tokens_per_second"] * row["step_seconds"] for row in metrics)
    seconds = sum(row["step_seconds"] for row in metrics)
    picture.words(20, 24, "Loss", size=14, bold=True)
    picture.words(
        62, 24, f"{last['step']} steps, {tokens:,.0f} tokens, {tokens / seconds:,.0f} tokens/s", size=11, fill=GREY
    )
    _curve(picture, metrics, evaluations)
    _stages(picture, stages, TOP + CURVE + 62)
    return picture


def _curve(picture: Drawing, metrics: list[dict[str, Any]], evaluations: list[dict[str, Any]]) -> None:
    losses = [row["loss"] for row in metrics]
    low, high = int(min(losses)), int(max(losses)) + 1
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
    picture.line([place(row["step"], row["loss"]) for row in metrics], COLOURS[0], width=2)
    for row in evaluations:
        x, y = place(row["step"], min(max(row["eval_loss"], low), high))
        picture.dot(x, y, 4, COLOURS[1])
        picture.words(x - 6, y - 9, f"{row['eval_loss']:.2f}", size=11, fill=COLOURS[1], anchor="end")
    picture.words(WIDTH - RIGHT, 24, "line: training, dots: evaluation", size=11, fill=GREY, anchor="end")


def _stages(picture: Drawing, stages: list[dict[str, Any]], top: float) -> None:
    picture.words(20, top, "Pipeline stages", size=14, bold=True)
    layers = stages[-1]["last"] + 1
    wide = WIDTH - LEFT - RIGHT - 40
    for index, stage in enumerate(stages):
        y, colour, pale = top + 12 + index * STAGE, COLOURS[index % len(COLOURS)], PALE[index % len(PALE)]
        start, end = LEFT + 40 + wide * stage["first"] / layers, LEFT + 40 + wide * (stage["last"] + 1) / layers
        picture.words(20, y + 17, f"stage {stage['stage']}", size=12)
        picture.box(start, y, end - start, STAGE - 8, pale, stroke=colour)
        kinds = ", ".join(f"{count} x {name}" if count > 1 else name for name, count in stage["kinds"].items())
        ranks = ", ".join(map(str, stage["ranks"]))
        text = f"layers {stage['first']}-{stage['last']} on rank {ranks}: {kinds}; {stage['parameters']:,} parameters"
        fits = len(text) * 5.6 < end - start
        x, anchor = (start + 8, "start") if fits or start < WIDTH / 2 else (end - 8, "end")
        picture.words(x, y + 17, text, size=11, anchor=anchor)


def main() -> int:
    """Return 1, with one line on standard error, if the folder holds no run that has made a step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="output_dir of a run")
    parser.add_argument("--out", type=Path, help="where the picture goes; default: RUN/run.svg")
    args = parser.parse_args()
    metrics = read_lines(args.run / "metrics.jsonl")
    if not metrics or not (args.run / "run.json").is_file():
        print(
            f"draw_run: {args.run} holds no metrics.jsonl and run.json of a run: name its output_dir", file=sys.stderr
        )
        return 1
    run = json.loads((args.run / "run.json").read_text(encoding="utf-8"))
    picture = draw(metrics, read_lines(args.run / "evaluations.jsonl"), run)
    out = args.out or args.run / "run.svg"
    out.write_text(picture.text(), encoding="utf-8")
    print(f"the picture is {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
