"""Draw the pictures of docs/layouts.md: python scripts/draw_layouts.py [FOLDER]."""

import argparse
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from schedule_timeline import UNITS, end_of, idle_share, timeline
from svg import COLOURS, GREY, INK, PALE, RULE, Drawing

from harness.schedules import DEFAULT, INTERLEAVED, SCHEDULES, Kind, ModelChunks, model_chunks

LAYERS = ("embedding", "layer 1", "layer 2", "layer 3", "layer 4", "head")
ROW, WIDE = 22, 120


def _column(picture: Drawing, x: float, name: str, note: str) -> None:
    picture.words(x, 24, name, size=14, bold=True)
    picture.words(x, 42, note, size=11, fill=GREY)


def _legend(picture: Drawing, x: float, y: float, ranks: int) -> None:
    for rank in range(ranks):
        picture.box(x + rank * 62, y, 12, 12, COLOURS[rank])
        picture.words(x + rank * 62 + 17, y + 10.5, f"rank {rank}", size=11)


def ways() -> Drawing:
    """Draw one model on two ranks, cut in each of four ways."""
    picture = Drawing(740, 250, "One model on two ranks, cut in four ways")
    notes = (
        ("Data parallel", "a copy each, other samples"),
        ("Pipeline", "some layers each"),
        ("Tensor parallel", "a part of every layer each"),
        ("ZeRO-3", "pieces of every tensor each"),
    )
    for index, (name, note) in enumerate(notes):
        x, top = 20 + 175 * index, 56.0
        _column(picture, x, name, note)
        for row, layer in enumerate(LAYERS):
            y = top + row * (ROW + 3)
            match name:
                case "Data parallel":
                    picture.box(x, y, WIDE / 2 - 2, ROW, COLOURS[0])
                    picture.box(x + WIDE / 2 + 2, y, WIDE / 2 - 2, ROW, COLOURS[1])
                case "Pipeline":
                    picture.box(x, y, WIDE, ROW, COLOURS[row >= 3])
                case "Tensor parallel":
                    picture.box(x, y, WIDE / 2, ROW, COLOURS[0], radius=0)
                    picture.box(x + WIDE / 2, y, WIDE / 2, ROW, COLOURS[1], radius=0)
                case _:
                    for piece in range(6):
                        picture.box(x + piece * WIDE / 6, y, WIDE / 6, ROW, COLOURS[piece % 2], radius=0)
            picture.words(x + WIDE + 4, y + 15, layer if index == 3 else "", size=9, fill=GREY)
            if name in ("Pipeline", "Tensor parallel"):
                picture.words(x + WIDE / 2, y + 15, layer, size=11, fill="#ffffff", anchor="middle")
    _legend(picture, 20, 226, 2)
    return picture


def grid(stages: int = 2, data: int = 2, tensor: int = 2, of_stage: str = "") -> Drawing:
    """Draw the ranks of a layout with all three: tensor-parallel neighbours have consecutive ranks.

    `of_stage` is what has a whole stage, such as a host.
    """
    wide, high = 330, 82
    end = 46 + data * (high + 10)
    title = f"{stages} stages x {data} data-parallel x {tensor} tensor-parallel ranks"
    picture = Drawing(720, end + 20, title)
    for stage in range(stages):
        x = 20 + stage * (wide + 20)
        words = f"{of_stage} {stage}: stage {stage}" if of_stage else f"stage {stage}"
        picture.words(x, 24, words, size=14, bold=True)
        picture.words(
            x + 16 + 7.2 * len(words), 24, "first layers" if stage == 0 else "last layers", size=11, fill=GREY
        )
        for replica in range(data):
            y = 36 + replica * (high + 10)
            picture.box(x, y, wide, high, PALE[replica], stroke=COLOURS[replica])
            picture.words(x + 8, y + 16, f"replica {replica}: its own samples", size=11, fill=COLOURS[replica])
            for part in range(tensor):
                rank = (stage * data + replica) * tensor + part
                left, each = x + 10 + part * (wide - 10) / tensor, (wide - 10) / tensor - 10
                picture.box(left, y + 26, each, 44, "#ffffff", stroke=GREY)
                picture.words(left + each / 2, y + 45, f"rank {rank}", anchor="middle", bold=True)
                picture.words(
                    left + each / 2, y + 61, f"half {part} of each layer", size=10, fill=GREY, anchor="middle"
                )
    picture.words(20, end + 8, "within a box: several sums a layer, inside a host", size=11, fill=GREY)
    picture.words(
        700,
        end + 8,
        "from stage to stage: one activation a micro-batch, between hosts",
        size=11,
        fill=GREY,
        anchor="end",
    )
    return picture


@dataclass(frozen=True)
class Step:
    """One step of a pipeline by a schedule.

    Attributes:
        formula: of the idle share.
        passes: of each kind its colour and its name.
    """

    title: str
    schedule: str
    formula: str
    passes: Mapping[Kind, tuple[str, str]]


WHOLE = {Kind.FORWARD: (COLOURS[0], "forward"), Kind.BACKWARD: (COLOURS[2], "backward")}
SPLIT = {
    Kind.FORWARD: (COLOURS[0], "forward"),
    Kind.INPUT_GRADIENTS: (COLOURS[2], "gradients of inputs"),
    Kind.WEIGHT_GRADIENTS: (COLOURS[1], "of weights"),
}
STEPS = {
    "schedule": Step("1F1B", DEFAULT, "(stages - 1) / (micro-batches + stages - 1)", WHOLE),
    "zero-bubble": Step("Zero-bubble", "zero-bubble", "(stages - 1) / (3 x micro-batches + stages - 1)", SPLIT),
    "interleaved": Step("Interleaved 1F1B", INTERLEAVED, "(stages - 1) / (2 x micro-batches + stages - 1)", WHOLE),
    "zero-bubble-v": Step("ZB-V", "zero-bubble-v", "(stages - 1) / (6 x micro-batches + stages - 1)", SPLIT),
    "dualpipe-v": Step(
        "DualPipeV",
        "dualpipe-v",
        "(stages - 1) / (6 x micro-batches + stages - 1)",
        {**SPLIT, Kind.BACKWARD: ("#7a2f5b", "both")},
    ),
}


def schedule(step: Step, stages: int = 4, batches: int = 8) -> Drawing:
    """Draw a step of a pipeline: who computes what, and who waits. All schedules have one scale."""
    chunks = model_chunks(stages, step.schedule)
    begins = timeline(SCHEDULES[step.schedule].order, chunks, batches)
    title = f"{stages} stages, {batches} micro-batches: one step by {step.title}"
    picture = Drawing(720, 56 + stages * 30 + 52, title)
    whole = end_of(timeline(SCHEDULES[DEFAULT].order, ModelChunks(stages), batches))
    left, unit = 70, (700 - 70) / whole / chunks.per_stage
    several = f", {chunks.per_stage} model chunks each; white bar: the later" if chunks.per_stage > 1 else ""
    picture.words(20, 24, f"One step by {step.title}", size=14, bold=True)
    picture.words(
        215, 24, f"{stages} stages{several}, {batches} micro-batches; grey: the stage waits", size=11, fill=GREY
    )
    for stage in range(stages):
        y = 40 + stage * 30
        picture.words(20, y + 16, f"stage {stage}", size=12)
        picture.box(left, y, end_of(begins) * unit, 24, RULE, radius=0)
    for (stage, each), begin in begins.items():
        x, wide, (colour, _) = left + begin * unit, unit * UNITS[each.kind], step.passes[each.kind]
        picture.box(x, 40 + stage * 30, wide - 1, 24, colour, radius=0)
        if each.chunk >= stages:
            picture.box(x, 42 + stage * 30, wide - 1, 2, "#ffffff", radius=0)
        picture.words(
            x + wide / 2, 56 + stage * 30, str(each.micro_batch + 1), size=10, fill="#ffffff", anchor="middle"
        )
    x, y = 70, 40 + stages * 30 + 16
    for colour, text in (*step.passes.values(), (RULE, "idle")):
        picture.box(x, y - 10, 12, 12, colour)
        picture.words(x + 17, y, text, size=11)
        x += 32 + 6 * len(text)
    picture.words(70, y + 22, f"idle share: {step.formula} = {idle_share(begins):.0%}", size=11, fill=INK)
    return picture


def main() -> None:
    """Write every picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path("docs/images"))
    folder = parser.parse_args().folder
    pictures = {
        "ways": ways(),
        "grid": grid(),
        "hosts": grid(data=4, of_stage="host"),
        **{name: schedule(step) for name, step in STEPS.items()},
    }
    for name, picture in pictures.items():
        (folder / f"{name}.svg").write_text(picture.text(), encoding="utf-8")


if __name__ == "__main__":
    main()
