"""Draw which rank holds what of the safetensors files of a checkpoint, and of the model exported from it.

python scripts/draw_export.py runs/mine/checkpoint-60 runs/model [--out picture.svg]

Reads the headers of the files, and the stages in the run.json of the checkpoint's run. Draws decoders in pipelines
without tensor parallelism, as tensors are told apart by their names; other counts of parameters are refused.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.svg import COLOURS, GREY, PALE, Drawing  # noqa: E402

RANKS, FILES, EXPORTED, BAR = 20.0, 250.0, 570.0, 260.0  # pixels from the left; of the longest file
WIDTH, TOP, ROW, HIGH = 760.0, 56.0, 72.0, 22.0  # pixels


class Part(NamedTuple):
    """Neighbouring tensors of a file that belong to one layer."""

    layer: str
    stage: int
    size: int  # bytes
    parameters: int


def read_parts(path: Path, stages: list[dict[str, Any]]) -> tuple[list[Part], str]:
    """Return the parts of a safetensors file in its order, and its dtype."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    header.pop("__metadata__", None)
    parts: list[Part] = []
    for name, tensor in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = tensor["data_offsets"]
        found = re.search(r"layers\.(\d+)\.", name)
        layer = f"layers.{found[1]}" if found else name.split(".")[-2]
        # the embedding is the first layer of a pipeline, norm and head are the last one
        place = int(found[1]) + 1 if found else 0 if "embed" in layer else stages[-1]["last"]
        stage = next(row["stage"] for row in stages if row["first"] <= place <= row["last"])
        part = Part(layer, stage, end - begin, prod(tensor["shape"]))
        if parts and parts[-1].layer == layer:
            last = parts.pop()
            part = Part(layer, stage, last.size + part.size, last.parameters + part.parameters)
        parts.append(part)
    held = [sum(part.parameters for part in parts if part.stage == row["stage"]) for row in stages]
    if held != [row["parameters"] for row in stages]:
        raise ValueError(f"{path.name} does not hold the parameters of the run's stages")
    return parts, {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}[tensor["dtype"]]


def draw(checkpoint: Path, model: Path) -> Drawing:
    """Return ranks on the left, the checkpoint's files in the middle and those of the exported model on the right."""
    stages = json.loads((checkpoint.parent / "run.json").read_text(encoding="utf-8"))["stages"]
    paths = sorted(checkpoint.glob("*.safetensors"), key=lambda path: (path.name[:5] != "model", path.name))
    files = [(path, *read_parts(path, stages)) for path in paths]
    exported = [(path, *read_parts(path, stages)) for path in sorted(model.glob("*.safetensors"))]
    scale = BAR / max(sum(part.size for part in parts) for _, parts, _ in files)
    rows = max(len(stages), len(files))
    picture = Drawing(WIDTH, TOP + ROW * rows + 4, f"Which rank writes what of {checkpoint.name}")
    for x, words in ((RANKS, "Ranks"), (FILES, checkpoint.name), (EXPORTED, f"Exported: {model.name}")):
        picture.words(x, 24, words, size=14, bold=True)
    between = ROW * rows / len(stages)
    for row, stage in enumerate(stages):
        middle = TOP + between * (row + 0.5) - 8
        for index in range(len(files)):
            picture.line([(RANKS + 160, middle), (FILES, TOP + ROW * index + 16 + HIGH / 2)], COLOURS[row])
        picture.box(RANKS, middle - 28, 160, 56, PALE[row], stroke=COLOURS[row])
        ranks = ("rank " if len(stage["ranks"]) == 1 else "ranks ") + ", ".join(map(str, stage["ranks"]))
        picture.words(RANKS + 10, middle - 10, ranks, bold=True)
        picture.words(RANKS + 10, middle + 5, f"layers {stage['first']} to {stage['last']} of the pipeline", size=10)
        picture.words(RANKS + 10, middle + 19, f"{stage['parameters']:,} parameters", size=10)
    for index, (path, parts, dtype) in enumerate(files):
        _file(picture, FILES, TOP + ROW * index, scale, path, parts, dtype)
    for index, (path, parts, dtype) in enumerate(exported):
        y = TOP + ROW * index
        picture.line([(FILES + BAR, y + 16 + HIGH / 2), (EXPORTED, y + 16 + HIGH / 2)], GREY)
        _file(picture, EXPORTED, y, scale, path, parts, dtype)
    return picture


def _file(picture: Drawing, x: float, y: float, scale: float, path: Path, parts: list[Part], dtype: str) -> None:
    """Draw a file as a bar of its parts, in their order and with the colours of the ranks that hold them."""
    picture.words(x, y + 10, path.name, size=11)
    picture.words(x, y + 16 + HIGH + 14, f"{dtype}, {path.stat().st_size:,} bytes", size=10, fill=GREY)
    for part in parts:
        wide = part.size * scale
        picture.box(x, y + 16, wide, HIGH, PALE[part.stage], stroke=COLOURS[part.stage], radius=0)
        if len(part.layer) * 5 < wide:
            picture.words(x + wide / 2, y + 16 + HIGH / 2 + 3, part.layer, size=9, anchor="middle")
        x += wide


def main() -> int:
    """Return 1, with one line on standard error, if the folders hold nothing that can be drawn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path, help="a checkpoint in the output_dir of its run")
    parser.add_argument("model", type=Path, help="the folder to which it was exported")
    parser.add_argument("--out", type=Path, help="where the picture goes; default: MODEL/export.svg")
    args = parser.parse_args()
    try:
        picture = draw(args.checkpoint, args.model)
    except (OSError, ValueError, LookupError) as error:
        print(f"draw_export: {args.checkpoint} and {args.model} cannot be drawn: {error}", file=sys.stderr)
        return 1
    out = args.out or args.model / "export.svg"
    out.write_text(picture.text(), encoding="utf-8")
    print(f"the picture is {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
