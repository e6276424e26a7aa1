"""Check that all ranks hold the same config, layout and code; and small collectives of Python values.

Hosts may differ: an edited config, a stale checkout. Ranks that differ train something that nobody asked for, or hang
in a collective that the others never enter. So before anything is built, all ranks compare digests of resolved config,
layout and code, and raise the same error, which names the differing ranks and what differs. All ranks of the world call
it, before process groups are created from the layout.
"""

import hashlib
import json
import os
import struct
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Generic, TypeVar

import torch
import torch.distributed as dist

from harness.errors import UserError, reason
from harness.topology.env import run_timeout
from harness.topology.layout import Layout

DIGEST_BYTES = hashlib.sha256().digest_size
T = TypeVar("T")
PACKAGE = Path(__file__).resolve().parents[1]


def check_agreement(
    config: Mapping[str, object], layout: Layout, *, code: str | None = None, others: Mapping[str, object] | None = None
) -> None:
    """Raise UserError on every rank unless all ranks hold the same config, layout and code.

    Does nothing without a process group.

    Args:
        config: JSON without values that may differ between ranks, such as log paths.
        code: the code digest to compare; by default this package's.
        others: further values to compare, by their names in the error.
    """
    if not dist.is_initialized():
        return
    code = code_version() if code is None else code
    require_alike({"config": config, "layout": layout.sizes(), "code": code, **(others or {})})


def host_group() -> dist.ProcessGroup | None:
    """Return a gloo group of all ranks for host tensors; None if the default group takes host tensors itself.

    The first call creates the group, so all ranks must make it together.
    """
    assert dist.group.WORLD is not None
    return _beside(dist.group.WORLD)


# Kept by the default group: if torch.distributed is initialised again in this process, that group needs another one.
@lru_cache(maxsize=1)
def _beside(world: dist.ProcessGroup) -> dist.ProcessGroup | None:
    # A backend for each kind of device, as in cpu:gloo,cuda:nccl.
    if "cpu:" in dist.get_backend_config(world):
        return None
    # NCCL takes only tensors on the GPU, where a small value would wait for all computation queued before it.
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=run_timeout())
    return group


def all_reduce_max(values: Sequence[int]) -> list[int]:
    """All-reduce each value to its maximum; all ranks call it with the same number of values."""
    if dist.get_world_size() == 1:
        return list(values)
    found = torch.tensor(values)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=host_group())
    return [int(value) for value in found.tolist()]


def any_rank(requested: bool) -> bool:
    """Return whether `requested` is true on any rank; all ranks call it."""
    return bool(all_reduce_max([int(requested)])[0])


def require_alike(subjects: Mapping[str, object]) -> None:
    """Raise UserError on every rank unless all ranks hold the same `subjects`: name in the error -> JSON value.

    All ranks call it with the same names.
    """
    digests = b"".join(map(json_digest, subjects.values()))
    # Unsigned words of 32 bits, because an int64 tensor holds each of them and its negative.
    words = struct.unpack(f">{len(digests) // 4}I", digests)
    # One all-reduce yields the maximum and the minimum of each word. If they are equal, all ranks agree, and a thousand
    # ranks need not gather a thousand digests each.
    most = all_reduce_max([*words, *(-word for word in words)])
    if most[: len(words)] == [-word for word in most[len(words) :]]:
        return
    mine = torch.frombuffer(bytearray(digests), dtype=torch.uint8)
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine, group=host_group())
    rows = [bytes(row.tolist()) for row in gathered]
    columns = {
        subject: [row[i * DIGEST_BYTES : (i + 1) * DIGEST_BYTES] for row in rows] for i, subject in enumerate(subjects)
    }
    if found := [told for subject, column in columns.items() if (told := disagreement(subject, column))]:
        raise UserError("; ".join(found) + ": give every host the same files and arguments")


def all_gather_object(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """All-gather Python values in rank order; all ranks of the group (by default the world) call it."""
    values = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group or host_group())
    return values


def gather_object(value: T) -> list[T]:
    """Gather Python values in rank order on rank 0, [] elsewhere; all ranks of the world call it."""
    # For large values, of which `all_gather_object` would leave a copy on every rank.
    is_first = dist.get_rank() == 0
    values = [value] * dist.get_world_size() if is_first else []
    dist.gather_object(value, values if is_first else None, dst=0, group=host_group())
    return values


def broadcast_object(value: T) -> T:
    """Return rank 0's value; all ranks of the world call it."""
    values = [value]
    dist.broadcast_object_list(values, src=0, group=host_group())
    return values[0]


@dataclass(frozen=True, kw_only=True)
class HostValues(Generic[T]):
    """The values of the ranks of one host.

    Attributes:
        values: rank -> value, for the ranks of this host in ascending order.
        number: this host's number, in the order of the hosts' first ranks.
        hosts: number of hosts.
    """

    values: dict[int, T]
    number: int
    hosts: int


def all_gather_on_host(host: str, value: T) -> HostValues[T]:
    """Return the values of the ranks with the same `host`; all ranks of the world call it."""
    # Gathered and scattered by rank 0, so that no other rank holds the values of all ranks.
    parts = group_by_host(gather_object((host, value)))
    found: list[HostValues[T] | None] = [None]
    dist.scatter_object_list(found, parts or None, src=0, group=host_group())
    assert found[0] is not None
    return found[0]


def group_by_host(of_all: Sequence[tuple[str, T]]) -> list[HostValues[T]]:
    """Return each rank's `HostValues`, given (host, value) of all ranks."""
    rows: dict[str, dict[int, T]] = {}
    for rank, (name, each) in enumerate(of_all):
        rows.setdefault(name, {})[rank] = each
    numbers = {name: number for number, name in enumerate(rows)}
    return [HostValues(values=rows[name], number=numbers[name], hosts=len(rows)) for name, _ in of_all]


def all_or_none(action: Callable[[], T]) -> T:
    """Run `action` on every rank and return its result once it has succeeded on all; all ranks call this.

    If it raises UserError or OSError on any rank, every rank raises UserError with the message of the lowest such rank.
    `action` must not run collectives: a rank that fails before one would leave the others waiting in it.
    """
    problem: str | None = None
    try:
        value = action()
    except (UserError, OSError) as error:
        problem = str(error)
        if isinstance(error, OSError):
            # A rename has a second name, its target, which is usually the one that cannot be written.
            path = error.filename2 or error.filename
            problem = f"{path}: {reason(error)}" if path else reason(error)
    # Usually this is all: one small all-reduce. The messages are gathered only after a failure.
    if any_rank(bool(problem)):
        raise UserError(next(filter(None, all_gather_object(problem))))
    return value


def disagreement(subject: str, values: Sequence[object]) -> str | None:
    """Return a message naming the ranks (indices of `values`) that differ from the rest; None if all are equal.

    The most frequent value counts as right; in a tie, the value of the lowest rank.
    """
    # In a tie, Counter keeps the order of first occurrence, so all ranks choose the same value.
    right, count = Counter(values).most_common(1)[0]
    wrong = [rank for rank, value in enumerate(values) if value != right]
    if not wrong:
        return None
    example = next(rank for rank, value in enumerate(values) if value == right)
    have = "has" if len(wrong) == 1 else "have"
    others = f"rank {example}" if count == 1 else f"the other {count} ranks (rank {example}, ...)"
    return f"{spell_ranks(wrong)} {have} another {subject} than {others}"


def json_digest(value: object) -> bytes:
    """Return the SHA-256 of a value's canonical JSON (sorted keys, no blanks). Raises TypeError unless it is JSON."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).digest()


# Kept, because a later change of the files does not change the code that this process has imported.
@cache
def code_version() -> str:
    """Return the installed version of the harness, and a digest of its code, tables and plans on this host."""
    try:
        installed = version("ds-harness")
    # Run from a checkout that was never installed.
    except PackageNotFoundError:
        installed = "not installed"
    return f"{installed} {tree_digest(PACKAGE)}"


def tree_digest(root: Path) -> str:
    """Return the SHA-256, in hex, of names and contents of Python files, their tables, and plans under `root`."""
    total = hashlib.sha256()
    # In a checkout, models/ is a link. Sorted in place: `os.walk` then visits the folders in this order on every host.
    for folder, folders, files in os.walk(root, followlinks=True):
        folders.sort()
        for name in sorted(files):
            path = Path(folder, name)
            is_table = path.suffix == ".json" and (path.parent.name == "plans" or "__init__.py" in files)
            if path.suffix == ".py" or is_table:
                total.update(f"{path.relative_to(root).as_posix()}\0".encode())
                total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()


def spell_ranks(ranks: Sequence[int]) -> str:
    """Return ascending ranks in short form: "rank 6", "ranks 0-3, 6"."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    text = ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"
