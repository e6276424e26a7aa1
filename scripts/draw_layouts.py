"""Draw the pictures of docs/layouts.md: python scripts/draw_layouts.py [FOLDER]."""

import argparse
from pathlib import Path

from svg import COLOURS, GREY, INK, PALE, RULE, Drawing

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


def grid(stages: int = 2, data: int = 2, tensor: int = 2) -> Drawing:
    """Draw the ranks of a layout with all three: tensor-parallel neighbours have consecutive ranks."""
    picture = Drawing(720, 250, f"{stages} stages x {data} data-parallel x {tensor} tensor-parallel ranks")
    wide, high = 330, 82
    for stage in range(stages):
        x = 20 + stage * (wide + 20)
        picture.words(x, 24, f"stage {stage}", size=14, bold=True)
        picture.words(x + 66, 24, "first layers" if stage == 0 else "last layers", size=11, fill=GREY)
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
    picture.words(20, 238, "within a box: several sums a layer, inside a host", size=11, fill=GREY)
    picture.words(
        700, 238, "from stage to stage: one activation a micro-batch, between hosts", size=11, fill=GREY, anchor="end"
    )
    return picture


def one_forward_one_backward(stages: int, batches: int) -> dict[tuple[int, str, int], int]:
    """Return when each (stage, pass, micro-batch) begins in the 1F1B schedule; a backward takes two units."""
    orders = []
    for stage in range(stages):
        ahead = min(stages - stage - 1, batches)
        order = [("F", index) for index in range(ahead)]
        for index in range(batches):
            if ahead + index < batches:
                order.append(("F", ahead + index))
            order.append(("B", index))
        orders.append(order)
    begins: dict[tuple[int, str, int], int] = {}
    free, position = [0] * stages, [0] * stages
    while any(position[stage] < len(orders[stage]) for stage in range(stages)):
        for stage in range(stages):
            while position[stage] < len(orders[stage]):
                kind, index = orders[stage][position[stage]]
                if kind == "F":
                    needs, takes = ((stage - 1, "F", index), 1) if stage else (None, 0)
                else:
                    needs, takes = ((stage + 1, "B", index), 2) if stage < stages - 1 else ((stage, "F", index), 1)
                if needs is not None and needs not in begins:
                    break
                begins[stage, kind, index] = max(free[stage], begins[needs] + takes if needs else 0)
                free[stage] = begins[stage, kind, index] + (1 if kind == "F" else 2)
                position[stage] += 1
    return begins


def schedule(stages: int = 4, batches: int = 8) -> Drawing:
    """Draw a step of a pipeline: who computes what, and who waits."""
    begins = one_forward_one_backward(stages, batches)
    end = max(begin + (1 if kind == "F" else 2) for (_, kind, _), begin in begins.items())
    picture = Drawing(720, 56 + stages * 30 + 34, f"{stages} stages, {batches} micro-batches: one step")
    left, unit = 70, (700 - 70) / end
    picture.words(20, 24, "One step of a pipeline", size=14, bold=True)
    picture.words(215, 24, f"{stages} stages, {batches} micro-batches; grey: the stage waits", size=11, fill=GREY)
    for stage in range(stages):
        y = 40 + stage * 30
        picture.words(20, y + 16, f"stage {stage}", size=12)
        picture.box(left, y, end * unit, 24, RULE, radius=0)
    for (stage, kind, index), begin in begins.items():
        x, wide = left + begin * unit, unit * (1 if kind == "F" else 2)
        picture.box(x, 40 + stage * 30, wide - 1, 24, COLOURS[0] if kind == "F" else COLOURS[2], radius=0)
        picture.words(x + wide / 2, 56 + stage * 30, str(index + 1), size=10, fill="#ffffff", anchor="middle")
    y = 40 + stages * 30 + 16
    for x, colour, text in ((70, COLOURS[0], "forward"), (160, COLOURS[2], "backward"), (260, RULE, "idle")):
        picture.box(x, y - 10, 12, 12, colour)
        picture.words(x + 17, y, text, size=11)
    share = (stages - 1) / (batches + stages - 1)
    words = f"idle share: (stages - 1) / (micro-batches + stages - 1) = {share:.0%}"
    picture.words(700, y, words, size=11, fill=INK, anchor="end")
    return picture


def main() -> None:
    """Write every picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path("docs/images"))
    folder = parser.parse_args().folder
    for name, picture in {"ways": ways(), "grid": grid(), "schedule": schedule()}.items():
        (folder / f"{name}.svg").write_text(picture.text(), encoding="utf-8")


if __name__ == "__main__":
    main()
