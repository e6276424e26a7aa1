"""Files of whole tensors that all ranks write together and any layout reads: each rank its own boxes, at their places.

No values travel between ranks, and none are converted but to the file's dtype.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from harness.checkpoint.file_plan import Share, dealt_places
from harness.checkpoint.held import Held
from harness.checkpoint.tensor_writer import Entry, OpenFiles, Place, create, index_content, places_in, split_by_size
from harness.errors import UserError
from harness.hf.weights.slices import TensorSource
from harness.hf.weights.tensor_files import open_safetensors
from harness.topology.agreement import all_or_none, values_of_all
from harness.topology.groups import Groups

FILE_BYTES = 5 * 10**9  # where another file begins, so that many ranks can verify a checkpoint


def write_tensors(folder: Path, stem: str, tensors: Sequence[Held], groups: Groups, *, one_file: bool = False) -> None:
    """Write `STEM.safetensors`, or `STEM-00001-of-00002.safetensors` and so on with an index; all ranks call it.

    Raises UserError on all ranks if the files cannot be written.
    """
    entries = [_entry(held) for held in tensors]

    def plan(shares: list[Share]) -> dict[str, Place]:
        unique = {entry.name: entry for share in shares for entry in share.entries}
        return _create_files(folder, stem, split_by_size(unique.values(), 2**63 if one_file else FILE_BYTES))

    places = dealt_places(entries, groups, plan)

    def write() -> None:
        with OpenFiles() as opened:
            for held in tensors:
                for box, values in held.pieces() if held.owned else ():
                    opened.write(places[held.name], [start for start, _ in box], values)

    all_or_none(write)


def open_whole_tensors(folder: Path, stem: str) -> dict[str, TensorSource]:
    """Return the tensors that `write_tensors` has written, by name; UserError for a file that cannot be read."""
    paths = [folder / f"{stem}.safetensors", *sorted(folder.glob(f"{stem}-*-of-*.safetensors"))]
    opened = [open_safetensors(path) for path in paths if path.is_file()]
    return {name: next(lazy.leaves()) for tensors in opened for name, lazy in tensors.items()}


@torch.no_grad()
def read_tensors(stored: dict[str, TensorSource], tensors: Sequence[Held]) -> None:
    """Fill what this rank holds with the stored values; `require_stored` must have found them all."""
    for held in tensors:
        for box, values in held.pieces():
            stored[held.name].read(values, box)


def require_stored(folder: Path, stored: dict[str, TensorSource], tensors: Sequence[Held]) -> None:
    """Raise UserError, on all ranks alike, for the first tensor that is not stored, or in another shape."""
    own = next(filter(None, (_problem(stored, held) for held in tensors)), None)
    if problem := next(filter(None, values_of_all(own)), None):
        raise UserError(f"{folder}: {problem}: resume with the model that was saved")


def _problem(stored: dict[str, TensorSource], held: Held) -> str | None:
    if held.name not in stored:
        return f"{held.name} is not in the checkpoint"
    shape = tuple(stored[held.name].shape)
    if shape != held.full_shape:
        return f"{held.name} has shape {shape} in the checkpoint, but {held.full_shape} in this run"
    return None


def _entry(held: Held) -> Entry:
    trained = held.stepped is not None
    dtype = torch.float32 if trained and held.values.is_floating_point() else held.values.dtype
    return Entry(name=held.name, shape=held.full_shape, dtype=dtype, trained=trained)


def _create_files(folder: Path, stem: str, parts: list[list[Entry]]) -> dict[str, Place]:
    names = [f"{stem}-{number:05d}-of-{len(parts):05d}.safetensors" for number in range(1, len(parts) + 1)]
    files = dict(zip(names if len(parts) > 1 else [f"{stem}.safetensors"], parts, strict=True))
    found: dict[str, Place] = {}
    for name, entries in files.items():
        header, places = places_in(folder / name, entries)
        create(folder / name, header, places)
        found |= {place.entry.name: place for place in places}
    if len(files) > 1:
        text = json.dumps(index_content(files), indent=2, sort_keys=True)
        (folder / f"{stem}.safetensors.index.json").write_text(text + "\n", encoding="utf-8")
    return found
