"""Which tensor goes to which place in which file: planned by rank 0 out of what the stages hold.

The first rank of each stage tells rank 0 what its stage writes, and hears where; it passes that on within its stage. So
rank 0 alone knows all tensors of the model, and every other rank those of its stage, whatever the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch.distributed as dist

from harness.checkpoint.tensors.tensor_writer import Entry, FileRegion, split_by_size
from harness.errors import UserError
from harness.hf.weights.conversion import CheckpointFormat
from harness.hf.weights.tensor_files import SINGLE
from harness.topology.groups import Groups
from harness.topology.hosts import host_id
from harness.topology.layout import Axis, Coordinate

PASSED_ALONG: tuple[Axis, ...] = ("pipeline", "tensor", "data")
"""The axes along which places are passed on from rank 0, one after the other."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one stage writes: the tensors all of whose values it holds."""

    host: str
    entries: list[Entry]


def dealt_regions(
    entries: list[Entry], groups: Groups, plan: Callable[[list[Share]], Mapping[str, FileRegion]]
) -> dict[str, FileRegion]:
    """Return the place of each of `entries`, those of this rank's stage; all ranks call it.

    `plan` is called on rank 0 with the shares of all stages, in order of stage. Raises UserError on every rank if it
    raises that or OSError.
    """
    shares = _shares(entries, groups)
    dealt: list[list[FileRegion]] | None = None
    failed: list[str | None] = [None]
    if shares is not None:
        try:
            regions = plan(shares)
            dealt = [[regions[entry.name] for entry in share.entries] for share in shares]
        except (UserError, OSError) as error:
            failed = [str(error)]
    dist.broadcast_object_list(failed, src=0)
    if failed[0] is not None:
        raise UserError(failed[0])
    return {region.entry.name: region for region in _deal(dealt, groups)}


def plan_files(shares: list[Share], form: CheckpointFormat) -> dict[str, list[Entry]]:
    """File name -> its tensors: the files of `form` while they do not grow, else files of its size for each host.

    UserError if a tensor is in no share.
    """
    found: dict[str, Entry] = {}
    for entry in (entry for share in shares for entry in share.entries):
        found.setdefault(entry.name, entry)
    scattered = [name for name in form.tensors if name not in found]
    if scattered:
        raise UserError(f"the model cannot be saved: {scattered[0]} combines tensors of several pipeline stages")
    if form.files is not None and len({share.host for share in shares}) == 1:
        kept = {file: [found[name] for name in names] for file, names in form.files.items()}
        largest = max(sum(entry.nbytes for entry in entries) for entries in kept.values())
        if largest <= form.max_file_bytes:
            return kept
    order = list(dict.fromkeys(name for names in (form.files or {}).values() for name in names)) or list(found)
    hosts: dict[str, dict[str, None]] = {}
    for share in shares:
        hosts.setdefault(share.host, {}).update(dict.fromkeys(entry.name for entry in share.entries))
    taken: set[str] = set()
    files: list[list[Entry]] = []
    for names in hosts.values():
        here = [name for name in order if name in names and name not in taken]
        taken.update(here)
        files += split_by_size((found[name] for name in here), form.max_file_bytes)
    if len(files) == 1:
        return {SINGLE: files[0]}
    return {f"model-{i + 1:05d}-of-{len(files):05d}.safetensors": entries for i, entries in enumerate(files)}


def _shares(entries: list[Entry], groups: Groups) -> list[Share] | None:
    """Return what each stage writes, in order of stage; None on all ranks but rank 0."""
    share = Share(host=host_id(), entries=entries)
    if groups.pp_group is None:
        return [share] if groups.rank == 0 else None
    if not takes_part(groups.coordinate, "pipeline"):
        return None
    shares = [share] * groups.layout.pp_size if groups.rank == 0 else None
    dist.gather_object(share, shares, dst=0, group=groups.pp_group)
    return shares


def _deal(dealt: list[list[FileRegion]] | None, groups: Groups) -> list[FileRegion]:
    """From rank 0 the first rank of each stage gets what its stage needs, and passes it on."""
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
    """Whether a rank takes part when places are passed along an axis: its group's first rank has them by then."""
    later = PASSED_ALONG[PASSED_ALONG.index(axis) + 1 :]
    return all(coordinate.along(other) == 0 for other in later)
