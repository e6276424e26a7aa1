"""Draw the picture of a plan in the docs: the best layouts of a 70B Llama on 64 H100, as `ds-harness plan` ranks them.

python scripts/draw_plan.py
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from harness.cli import main as ds_harness  # noqa: E402
from scripts.svg import COLOURS, GREY, INK, Drawing  # noqa: E402

PICTURE = ROOT / "docs/images/plan.svg"
MODEL = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
TITLE = "Llama 70B on 64 H100, 512 samples of 4,096 tokens a step"
FLAGS = ["--world_size", "64", "--hardware", "h100", "--global_batch_size", "512", "--block_size", "4096"]
SECONDS = ("compute", "bubble", "tensor", "pipeline", "data", "optimizer")
GIB = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers")
SHOWN, TOP, ROW = 8, 92, 26  # rows, and pixels
NAMES_END, TIME, MEMORY, BAR, WIDTH = 262, 272, 700, 320, 1110  # pixels from the left


def planned() -> list[dict[str, Any]]:
    """Return the rows of `ds-harness plan --json`, best first."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as printed:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
        if ds_harness(["plan", "--model", folder, *FLAGS, "--json"]):
            sys.exit("draw_plan: ds-harness plan failed")
    rows: list[dict[str, Any]] = json.loads(printed.getvalue())
    return rows


def distinct(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the best row of each parallel layout."""
    best: dict[str, dict[str, Any]] = {}
    for row in rows:
        best.setdefault(json.dumps(row["layout"]), row)
    return list(best.values())[:SHOWN]


def name(row: dict[str, Any]) -> str:
    """Return a layout in the words of the docs."""
    layout = row["layout"]
    sizes = f"pp{layout['pipeline']} x tp{layout['tensor']} x dp{layout['data']}, ZeRO-{row['zero_stage']}"
    checkpointing = ", ckpt" if row["activation_checkpointing"] else ""
    return sizes + checkpointing + (", offload" if row["offload"] != "none" else "")


def bar(drawing: Drawing, x: float, y: float, parts: list[float], scale: float) -> float:
    """Draw one stacked bar; return where it ends."""
    for part, colour in zip(parts, COLOURS, strict=False):
        drawing.box(x, y + 5, part * scale, ROW - 9, colour, radius=0)
        x += part * scale
    return x


def legend(drawing: Drawing, x: float, names: tuple[str, ...]) -> None:
    """Draw the colours of a column's parts."""
    for each, colour in zip(names, COLOURS, strict=False):
        drawing.box(x, 62, 9, 9, colour, radius=1)
        drawing.words(x + 12, 70, each, size=10, fill=GREY)
        x += 22 + 5.4 * len(each)


def picture(rows: list[dict[str, Any]]) -> str:
    """Return the layouts, one a line: the time of a step, and the memory of the fullest stage."""
    drawing = Drawing(WIDTH, TOP + ROW * len(rows) + 14, f"The best layouts of {TITLE}")
    drawing.words(12, 22, TITLE, size=14, bold=True)
    drawing.words(TIME, 48, "seconds a step, and tokens/s", bold=True)
    drawing.words(MEMORY, 48, f"GiB on the fullest stage, of {rows[0]['memory_gib']['limit']:.0f}", bold=True)
    legend(drawing, TIME, SECONDS)
    legend(drawing, MEMORY, GIB)
    limit = rows[0]["memory_gib"]["limit"]
    slowest = max(row["step_seconds"]["total"] for row in rows)
    for place, row in enumerate(rows):
        y = TOP + ROW * place - 8
        drawing.words(NAMES_END, y + 17, name(row), anchor="end", size=11)
        seconds = row["step_seconds"]
        end = bar(drawing, TIME, y, [seconds[part] for part in SECONDS], BAR / slowest)
        speed = f"{seconds['total']:.1f} s, {row['tokens_per_second'] / 1e3:,.0f} k"
        drawing.words(end + 6, y + 17, speed, size=11)
        stage = max(row["memory_gib"]["stages"], key=lambda stage: stage["total"])
        end = bar(drawing, MEMORY, y, [stage[part] for part in GIB], BAR / limit)
        drawing.words(max(end + 6, MEMORY), y + 17, f"{stage['total']:.0f}", size=11)
    drawing.line([(MEMORY + BAR, TOP - 8), (MEMORY + BAR, TOP + ROW * len(rows) - 6)], INK)
    return drawing.text()


if __name__ == "__main__":
    PICTURE.write_text(picture(distinct(planned())), encoding="utf-8")
