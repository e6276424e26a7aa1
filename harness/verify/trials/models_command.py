"""The verb `ds-harness models`: print the stored matrix of families, or run it now.

Printing the stored matrix imports neither torch nor transformers.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.errors import UserError
from harness.verb_parser import Boolean, VerbParser, number, path_argument
from harness.verify.matrix import (
    CELLS,
    STORED,
    YES,
    Matrix,
    installed_transformers,
    plan_file,
    read_matrix,
    write_matrix,
)

DESCRIPTION = """Print what works for each family of HuggingFace decoders: pipeline stages, tensor parallelism, ZeRO-3,
reading a checkpoint, writing one. Every cell was run on a tiny random model: three training steps against the same
model in one process, and checkpoints compared to the bit."""
EXAMPLE = """example:
  ds-harness models                                 the stored matrix
  ds-harness models FAMILY --run                    run a family now, on two CPU ranks
  ds-harness models --run --compare                 what the installed transformers has changed
  ds-harness models --run --write --results r.jsonl run all and store them; run it again to continue"""
FORMATS = ("text", "json", "markdown")
PAGE = Path("docs/models.md")

Rows = Mapping[str, Mapping[str, str]]


def models(argv: Sequence[str]) -> int:
    """Print, run, compare or store the matrix and return the exit code.

    It is 1 if a cell that was run is wrong, or, with --compare, if a cell that is stored as working no longer works.
    Raises UserError for an option that needs --run, without it.
    """
    parser = VerbParser("models", DESCRIPTION, EXAMPLE)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="model types (default: all)")
    parser.add_argument("--run", action=Boolean, help="run the cells now instead of printing the stored matrix")
    parser.add_argument("--compare", action=Boolean, help="with --run: show what differs from the stored matrix")
    parser.add_argument("--write", action=Boolean, help=f"with --run: store the rows and write {PAGE}")
    parser.add_argument(
        "--results", type=path_argument, help="with --run: a file of rows; rows in it are not run again"
    )
    parser.add_argument(
        "--only", choices=("tensor", "experts"), help="with --run: run only this cell, keep the others as stored"
    )
    parser.add_argument("--limit_s", type=number, default=120.0, help="time limit per family in seconds")
    parser.add_argument("--format", choices=FORMATS, default="text", help="output format")
    args = parser.parse_args(argv)
    stored = read_matrix()
    if not args.run:
        if args.compare or args.write or args.results:
            parser.error("--compare, --write and --results need --run")
        print(render(_some(stored, args.families), args.format))
        return 0
    rows = _run(args.families, args.results, args.limit_s, args.only or "")
    if args.only:
        rows = {name: {**stored.families.get(name, {}), **row} for name, row in rows.items()}
    found = Matrix(transformers=installed_transformers(), families=rows)
    print(render(found, args.format))
    changes = differences(stored, rows, everything=not args.families) if args.compare else []
    for line in changes:
        print(line)
    if args.write:
        kept = {} if not args.families else stored.families
        store(Matrix(transformers=found.transformers, families={**kept, **rows}))
    wrong = any(cell.startswith("wrong") for row in rows.values() for cell in row.values())
    return int(wrong or any(line.startswith("gone") for line in changes))


def _some(matrix: Matrix, families: Sequence[str]) -> Matrix:
    if unknown := [name for name in families if name not in matrix.families]:
        raise UserError(f"{unknown[0]}: not in the matrix of transformers {matrix.transformers}: test it with --run")
    rows = {name: matrix.families[name] for name in families or sorted(matrix.families)}
    return Matrix(transformers=matrix.transformers, families=rows)


def _run(families: Sequence[str], results: Path | None, limit_s: float, only: str) -> Rows:
    from harness.verify.trials.families import run_families

    with tempfile.TemporaryDirectory() as folder:
        return run_families(
            list(families) or known_families(),
            results or Path(folder) / "rows.jsonl",
            limit_s=limit_s,
            report=lambda family, row: print(f"{family}: {spell(row)}", file=sys.stderr, flush=True),
            only=only,
        )


def known_families() -> list[str]:
    """Return the model types that the installed transformers can build as causal language models."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def spell(row: Mapping[str, str]) -> str:
    """Return a row as one line: the cells that work, and the reasons why the others do not."""
    holds = [cell for cell in CELLS if row.get(cell) == YES]
    reasons: dict[str, list[str]] = {}
    for cell in CELLS:
        if row.get(cell) != YES:
            reasons.setdefault(row.get(cell, "not tried"), []).append(cell)
    rest = [f"{', '.join(cells)} {reason}" for reason, cells in reasons.items()]
    return "; ".join([*([", ".join(holds)] if holds else []), *rest])


def differences(stored: Matrix, rows: Rows, *, everything: bool) -> list[str]:
    """Return a line for each difference from the stored matrix: families and cells that came, and that are gone.

    Args:
        everything: `rows` are all families, so that one that is missing in them is gone.
    """
    lines = []
    for family, row in rows.items():
        if family not in stored.families:
            lines.append(f"came: {family} is new: {spell(row)}")
            continue
        before = stored.families[family]
        for cell in CELLS:
            if (before.get(cell) == YES) != (row.get(cell) == YES):
                word = "came" if row.get(cell) == YES else "gone"
                lines.append(f"{word}: {family} {cell}: {before.get(cell)} -> {row.get(cell)}")
    if everything:
        lines += [f"removed: transformers no longer has {family}" for family in stored.families if family not in rows]
    return lines


def store(matrix: Matrix) -> None:
    """Write the matrix to the file that it is read from, and in a checkout also the page of the docs."""
    write_matrix(matrix)
    page = STORED.resolve().parents[1] / PAGE
    if page.parent.is_dir():
        page.write_text(render(matrix, "markdown") + "\n", encoding="utf-8")


# -- rendering ---------------------------------------------------------------------------------------------


def render(matrix: Matrix, form: str) -> str:
    """Return the matrix as text, JSON or markdown."""
    if form == "json":
        return json.dumps({"transformers": matrix.transformers, "families": matrix.families}, indent=2)
    if form == "markdown":
        return _markdown(matrix)
    width = max((len(name) for name in matrix.families), default=0)
    head = f"{'':<{width}}  " + "  ".join(f"{cell:<8}" for cell in CELLS)
    lines = [head.rstrip()]
    for name, row in matrix.families.items():
        words = [row.get(cell, "not tried").split(":")[0] for cell in CELLS]
        lines.append((f"{name:<{width}}  " + "  ".join(f"{word:<8}" for word in words)).rstrip())
        lines += [f"{'':<{width}}  {reason}" for reason in _reasons(row)]
    return "\n".join([*lines, "", _summary(matrix)])


def _reasons(row: Mapping[str, str]) -> list[str]:
    """Return the reasons why cells do not work, each once."""
    return list(dict.fromkeys(row[cell].partition(": ")[2] for cell in CELLS if ": " in row.get(cell, "")))


def _summary(matrix: Matrix) -> str:
    counts = ", ".join(f"{cell} {matrix.count(cell)}" for cell in CELLS)
    return f"transformers {matrix.transformers}, {len(matrix.families)} families: {counts}"


def _markdown(matrix: Matrix) -> str:
    counts = " | ".join(f"**{matrix.count(cell)}**" for cell in CELLS)
    lines = [
        f"| family | {' | '.join(CELLS)} | |",
        f"|---|{'---|' * len(CELLS)}---|",
        f"| all | {counts} | |",
    ]
    for name, row in matrix.families.items():
        words = [row.get(cell, "not tried").split(":")[0] for cell in CELLS]
        notes = [*_reasons(row), *(["packaged plan"] if plan_file(name) else [])]
        text = "; ".join(notes).replace("|", "\\|").replace("<", "&lt;")
        lines.append(f"| {name} | {' | '.join(words)} | {text} |")
    above = Path(__file__).with_name("page.md").read_text(encoding="utf-8")
    return above.format(families=len(matrix.families), transformers=matrix.transformers) + "\n".join(lines)
