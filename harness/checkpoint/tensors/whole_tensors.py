"""Write files of whole tensors from all ranks, each rank its own boxes, and read them in any layout.

No values are sent between ranks. The first rank of each stage sends rank 0 the list of the stage's tensors. Rank 0
plans their regions and returns them, and the first rank passes them on within its stage. So only rank 0 knows all
tensors of the model; every other rank knows only the tensors of its stage.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from harness.checkpoint.tensors.local_shard import LocalShard
from harness.checkpoint.tensors.not_saved import all_save, saving
from harness.checkpoint.tensors.tensor_writer import (
    Entry,
    FileRegion,
    OpenFiles,
    create,
    file_regions,
    file_size,
    index_content,
    split_by_size,
)
from harness.errors import UserError
from harness.hf.weights.tensor_files import OpenFile, Stored, open_weights_file
from harness.parallel.host import brought_to_host
from harness.topology.agreement import all_gather_object, all_gather_on_host, all_or_none, host_group
from harness.topology.groups import Groups
from harness.topology.hosts import host_id
from harness.topology.layout import Axis, Coordinate

PASSED_ALONG: tuple[Axis, ...] = ("pipeline", "tensor", "data")
"""The axes along which regions are passed on from rank 0, in this order."""
FILE_BYTES = 5 * 10**9  # largest file of a checkpoint, so that many ranks can share the verification
AHEAD_BYTES = 64 << 20  # bytes of read-ahead


def require_each_value_once(tensors: Sequence[LocalShard], groups: Groups) -> None:
    """Raise UserError on all ranks unless the ranks of each stage own each value of its tensors exactly once.

    All ranks call it.

    Args:
        tensors: this rank's shards, with the same names in the same order on all ranks of a stage.
    """
    # The counts of owned values, summed over the stage's ranks, must give the whole tensor. Otherwise a file of the
    # right size would contain wrong values, unnoticed until a run has resumed from it.
    written = [sum(values.numel() for _, values in held.pieces()) if held.owned else 0 for held in tensors]
    # On the device, because NCCL does not reduce host tensors.
    counts = torch.tensor(written, dtype=torch.int64, device=get_accelerator().current_device_name())
    for group in (groups.tp_group, groups.dp_group):
        # The ranks of a stage hold the same tensors: if this rank has none, no rank of its groups joins an all-reduce.
        if group is not None and tensors:
            dist.all_reduce(counts, group=group)
    pairs = zip(tensors, counts.tolist(), strict=True)
    wrong = next((pair for pair in pairs if pair[1] != prod(pair[0].full_shape)), None)
    own = wrong and f"{wrong[0].name}: the ranks would save {wrong[1]:,} of its {prod(wrong[0].full_shape):,} values"
    if found := next(filter(None, all_gather_object(own)), None):
        raise UserError(f"no checkpoint can be saved in this layout: {found}; please report it")


@dataclass(frozen=True, kw_only=True)
class StageTensors:
    """The tensors that one stage writes, which use only values of this stage."""

    host: str
    entries: list[Entry]


def dealt_regions(
    entries: list[Entry], groups: Groups, plan: Callable[[list[StageTensors]], Mapping[str, FileRegion]]
) -> dict[str, FileRegion]:
    """Return the place of each of `entries`, the tensors of this rank's stage; all ranks call it.

    `plan` runs on rank 0 with the tensors of all stages, in stage order. If it fails, every rank raises UserError.
    """
    stages = _gather_stages(entries, groups)
    dealt: list[list[FileRegion]] | None = None
    failed: list[str | None] = [None]
    if stages is not None:
        try:
            regions = saving(partial(plan, stages))
            dealt = [[regions[entry.name] for entry in stage.entries] for stage in stages]
        except (UserError, OSError) as error:
            failed = [str(error)]
    # First tell all ranks whether the plan failed, so that none waits for regions that never come.
    dist.broadcast_object_list(failed, src=0, group=host_group())
    if failed[0] is not None:
        raise UserError(failed[0])
    return {region.entry.name: region for region in _deal(dealt, groups)}


def _gather_stages(entries: list[Entry], groups: Groups) -> list[StageTensors] | None:
    """Gather the tensors of each stage on rank 0, in stage order; None on other ranks."""
    own = StageTensors(host=host_id(), entries=entries)
    if groups.pp_group is None:
        return [own] if groups.rank == 0 else None
    if not takes_part(groups.coordinate, "pipeline"):
        return None
    stages = [own] * groups.layout.pp_size if groups.rank == 0 else None
    dist.gather_object(own, stages, dst=0, group=groups.pp_group)
    return stages


def _deal(dealt: list[list[FileRegion]] | None, groups: Groups) -> list[FileRegion]:
    """Send each stage's regions from rank 0 to the stage's first rank, and from there to its other ranks."""
    own: list[list[FileRegion]] = [dealt[groups.coordinate.stage] if dealt is not None else []]
    for axis in PASSED_ALONG:
        group = groups.along(axis)
        if group is None or not takes_part(groups.coordinate, axis):
            continue
        first = dist.get_process_group_ranks(group)[0]
        if axis == "pipeline":
            dist.scatter_object_list(own, dealt, src=first, group=group)
        else:
            dist.broadcast_object_list(own, src=first, group=group)
    return own[0]


def takes_part(coordinate: Coordinate, axis: Axis) -> bool:
    """Return whether a rank takes part when regions are passed along an axis."""
    # A group takes part only if its first rank already has the regions: if it is at coordinate 0 of all later axes.
    later = PASSED_ALONG[PASSED_ALONG.index(axis) + 1 :]
    return all(coordinate.along(other) == 0 for other in later)


@dataclass(frozen=True, kw_only=True)
class PlannedFiles:
    """A plan for `STEM.safetensors`, or for `STEM-00001-of-00002.safetensors` and so on with an index.

    Attributes:
        tensors: this rank's shards of the stored tensors.
        regions: each tensor's place, by name.
        created: on rank 0, which creates the files, header and regions of each file; empty elsewhere.
        index: on rank 0, path and content of the index; None without one.
    """

    tensors: Sequence[LocalShard]
    regions: dict[str, FileRegion]
    created: dict[Path, tuple[bytes, list[FileRegion]]]
    index: tuple[Path, str] | None

    @property
    def nbytes(self) -> int:
        """Total size of the files that this rank creates; 0 except on rank 0."""
        return sum(file_size(header, regions) for header, regions in self.created.values())

    def create(self) -> None:
        """Create the files at full size on rank 0. Raises UserError if the disk has no room."""
        for path, (header, regions) in self.created.items():
            create(path, header, regions)
        if self.index is not None:
            self.index[0].write_text(self.index[1], encoding="utf-8")

    def write(self, opened: OpenFiles) -> None:
        """Write this rank's shards without waiting for the disk. Raises UserError if that fails."""
        for held, copied in brought_to_host((held, held.values) for held in self.tensors if held.owned):
            for box, values in replace(held, values=copied).pieces():
                opened.write(self.regions[held.name], [start for start, _ in box], values)


def plan_tensors(
    folder: Path, stem: str, tensors: Sequence[LocalShard], groups: Groups, *, one_file: bool = False
) -> PlannedFiles:
    """Plan the files `STEM*` of `folder` for the tensors of all ranks, writing nothing; all ranks call it.

    Raises UserError on all ranks if they do not own each value exactly once.
    """
    require_each_value_once(tensors, groups)
    created: dict[Path, tuple[bytes, list[FileRegion]]] = {}
    index: list[tuple[Path, str]] = []

    def plan(stages: list[StageTensors]) -> dict[str, FileRegion]:
        unique = {entry.name: entry for stage in stages for entry in stage.entries}
        files = _named(stem, split_by_size(unique.values(), 2**63 if one_file else FILE_BYTES))
        created.update({folder / name: file_regions(folder / name, entries) for name, entries in files.items()})
        if len(files) > 1:
            text = json.dumps(index_content(files), indent=2, sort_keys=True) + "\n"
            index.append((folder / f"{stem}.safetensors.index.json", text))
        return {region.entry.name: region for _, regions in created.values() for region in regions}

    regions = dealt_regions([entry_of(held) for held in tensors], groups, plan)
    return PlannedFiles(tensors=tensors, regions=regions, created=created, index=next(iter(index), None))


def write_tensors(
    folder: Path, stem: str, tensors: Sequence[LocalShard], groups: Groups, *, one_file: bool = False
) -> None:
    """Write the files `STEM*` and wait for the disk; all ranks call it. Raises NotSaved on all ranks if that fails."""
    planned = plan_tensors(folder, stem, tensors, groups, one_file=one_file)
    # When it returns, rank 0 has created the files that all ranks open.
    all_save(planned.create)
    opened = OpenFiles(several_hosts=several_hosts())

    def write() -> None:
        with opened:
            planned.write(opened)
            opened.sync()

    all_save(write)


def several_hosts() -> bool:
    """Return whether ranks run on more than one host; all ranks call it."""
    return all_gather_on_host(host_id(), None).hosts > 1


@dataclass(frozen=True, kw_only=True)
class _File:
    """A file's size, and (name, first byte, shape, dtype) of each tensor in its header."""

    name: str
    nbytes: int
    tensors: list[tuple[str, int, tuple[int, ...], torch.dtype]]


def open_whole_tensors(folder: Path, stem: str, listed: Iterable[str], wanted: Container[str]) -> dict[str, Stored]:
    """Return the `wanted` tensors, by name, from the `listed` files `STEM*`; all ranks call it.

    Each rank opens only files with wanted tensors. Raises UserError on all ranks if one cannot be read.
    """
    of_stem = re.compile(rf"{re.escape(stem)}(-\d{{5}}-of-\d{{5}})?\.safetensors")
    # Only rank 0 reads the headers: a thousand ranks reading all headers would overload a file system.
    paths = [folder / name for name in sorted(filter(of_stem.fullmatch, listed))] if dist.get_rank() == 0 else []
    headers = [all_or_none(lambda: [_header(path) for path in paths if path.is_file()])]
    dist.broadcast_object_list(headers, src=0, group=host_group())
    return all_or_none(lambda: {name: leaf for file in headers[0] for name, leaf in _wanted(folder, file, wanted)})


def _header(path: Path) -> _File:
    leaves = [leaf for lazy in open_weights_file(path).values() for leaf in lazy.leaves() if isinstance(leaf, Stored)]
    tensors = [(leaf.name, leaf.start, leaf.shape, leaf.dtype) for leaf in leaves]
    return _File(name=path.name, nbytes=path.stat().st_size, tensors=tensors)


def _wanted(folder: Path, file: _File, wanted: Container[str]) -> list[tuple[str, Stored]]:
    """Return the wanted tensors of a file, opening it only if it has any."""
    found = [tensor for tensor in file.tensors if tensor[0] in wanted]
    if not found:
        return []
    opened = OpenFile(folder / file.name)
    if opened.size != file.nbytes:
        raise UserError(
            f"{opened.path}: its tensors cannot be read: it has {opened.size:,} bytes, but {file.nbytes:,} as rank 0 "
            "sees it"
        )
    return [(name, Stored(opened, name, start, shape, dtype)) for name, start, shape, dtype in found]


@torch.no_grad()
def read_tensors(stored: dict[str, Stored], tensors: Sequence[LocalShard]) -> None:
    """Fill this rank's shards with the stored values; call `require_stored` first."""
    pieces = [(stored[held.name], box, values) for held in tensors for box, values in held.pieces() if values.numel()]
    # In file order, so that the disk reads ahead.
    pieces.sort(key=lambda piece: (piece[0].position, piece[1]))
    # Request up to AHEAD_BYTES from the disk ahead of the piece being read.
    coming = iter(pieces)
    asked = 0
    for source, box, values in pieces:
        while asked < AHEAD_BYTES and (following := next(coming, None)) is not None:
            following[0].fetch(following[1])
            asked += following[2].nbytes
        source.read(values, box)
        asked -= values.nbytes


def require_stored(folder: Path, stored: dict[str, Stored], tensors: Sequence[LocalShard]) -> None:
    """Raise UserError on all ranks for the first tensor that is missing or has another shape; all ranks call it."""
    own = next(filter(None, (_problem(stored, held) for held in tensors)), None)
    if problem := next(filter(None, all_gather_object(own)), None):
        raise UserError(f"{folder}: {problem}: resume with the model that was saved")


def _problem(stored: dict[str, Stored], held: LocalShard) -> str | None:
    if held.name not in stored:
        return f"{held.name} is not in the checkpoint"
    shape = tuple(stored[held.name].shape)
    if shape != held.full_shape:
        return f"{held.name} has shape {shape} in the checkpoint, but {held.full_shape} in this run"
    return None


def entry_of(held: LocalShard) -> Entry:
    """Return the file entry of the whole tensor of a shard; trained tensors are stored in float32."""
    trained = held.updated is not None
    dtype = torch.float32 if trained and held.values.is_floating_point() else held.values.dtype
    return Entry(name=held.name, shape=held.full_shape, dtype=dtype, trained=trained)


def _named(stem: str, parts: list[list[Entry]]) -> dict[str, list[Entry]]:
    if len(parts) < 2:
        return {f"{stem}.safetensors": parts[0] if parts else []}
    names = [f"{stem}-{number:05d}-of-{len(parts):05d}.safetensors" for number in range(1, len(parts) + 1)]
    return dict(zip(names, parts, strict=True))
