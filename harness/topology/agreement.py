"""Do all ranks run the same thing? One small collective at start, before anything is built.

Hosts drift: an edited config, a stale checkout. Ranks that differ train something that nobody asked for, or
hang in a collective that the others never enter. So each rank hashes its resolved config, its layout and its
code, all ranks exchange the digests (96 bytes each) and every one of them raises the same error, which names
who differs and in what. Call it on the whole world, before process groups are made from the layout.
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
    config: Mapping[str, object],
    layout: Layout,
    *,
    code: str | None = None,
    others: Mapping[str, object] | None = None,
) -> None:
    """Raise UserError on every rank unless all ranks hold the same config, layout and code.

    `config` must be JSON; what is meant to differ between ranks (paths of logs, ...) does not belong into
    it. `code` is this package's digest unless given. `others` are further subjects, by the name that an error calls
    them. Without a process group there is nobody to disagree with.
    """
    if not dist.is_initialized():
        return
    code = code_version() if code is None else code
    require_alike({"config": config, "layout": layout.sizes(), "code": code, **(others or {})})


def host_group() -> dist.ProcessGroup | None:
    """Return the group in which the hosts of all ranks agree; None for the default group if that takes host tensors.

    What is said in it is on the host already: on a GPU nobody has to wait for what the device still computes. All ranks
    call this together the first time.
    """
    assert dist.group.WORLD is not None
    return _beside(dist.group.WORLD)


@lru_cache(maxsize=1)
def _beside(world: dist.ProcessGroup) -> dist.ProcessGroup | None:
    if "cpu:" in dist.get_backend_config(world):
        return None
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=run_timeout())
    return group


def largest(values: Sequence[int]) -> list[int]:
    """Return each value's maximum over all ranks; all of them call it, with equally many values."""
    if dist.get_world_size() == 1:
        return list(values)
    found = torch.tensor(values)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=host_group())
    return [int(value) for value in found.tolist()]


def any_rank(requested: bool) -> bool:
    """Whether `requested` is true on any rank; all of them call it."""
    return bool(largest([int(requested)])[0])


def require_alike(subjects: Mapping[str, object]) -> None:
    """Raise UserError on every rank unless all ranks hold the same `subjects`: JSON by the name that an error uses.

    All ranks call it, with the same names.
    """
    digests = b"".join(map(digest, subjects.values()))
    words = struct.unpack(f">{len(digests) // 4}I", digests)
    most = largest([*words, *(-word for word in words)])  # the least of each word, too: equal where all are alike
    if most[: len(words)] == [-word for word in most[len(words) :]]:
        return  # a thousand ranks need not tell each other that they agree
    mine = torch.frombuffer(bytearray(digests), dtype=torch.uint8)
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine, group=host_group())
    rows = [bytes(row.tolist()) for row in gathered]
    columns = {
        subject: [row[i * DIGEST_BYTES : (i + 1) * DIGEST_BYTES] for row in rows] for i, subject in enumerate(subjects)
    }
    if found := [told for subject, column in columns.items() if (told := disagreement(subject, column))]:
        raise UserError("; ".join(found) + ": give every host the same files and arguments")


def values_of_all(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the value of each rank, in rank order; all ranks of the group, or of the world, call it."""
    values = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group or host_group())
    return values


def values_on_first(value: T) -> list[T]:
    """Return the value of each rank, in rank order, on rank 0; elsewhere nothing. All ranks of the world call it.

    For what is large: of `values_of_all` every rank would hold as much as rank 0 does.
    """
    is_first = dist.get_rank() == 0
    values = [value] * dist.get_world_size() if is_first else []
    dist.gather_object(value, values if is_first else None, dst=0, group=host_group())
    return values


def value_of_first(value: T) -> T:
    """Return rank 0's value; all ranks of the world call it."""
    values = [value]
    dist.broadcast_object_list(values, src=0, group=host_group())
    return values[0]


@dataclass(frozen=True, kw_only=True)
class Beside(Generic[T]):
    """What a rank knows of its host.

    Attributes:
        values: of the ranks of this host, in ascending order of the ranks.
        number: of this host, in the order of the hosts' first ranks.
        hosts: how many there are.
    """

    values: dict[int, T]
    number: int
    hosts: int


def values_beside(host: str, value: T) -> Beside[T]:
    """Return the values of the ranks that call their `host` alike; all ranks of the world call it.

    Rank 0 deals them out, so that no other rank holds what all have said.
    """
    parts = dealt_beside(values_on_first((host, value)))
    found: list[Beside[T] | None] = [None]
    dist.scatter_object_list(found, parts or None, src=0, group=host_group())
    assert found[0] is not None
    return found[0]


def dealt_beside(of_all: Sequence[tuple[str, T]]) -> list[Beside[T]]:
    """Return what each rank is told of its host, from the host and the value of each."""
    rows: dict[str, dict[int, T]] = {}
    for rank, (name, each) in enumerate(of_all):
        rows.setdefault(name, {})[rank] = each
    numbers = {name: number for number, name in enumerate(rows)}
    return [Beside(values=rows[name], number=numbers[name], hosts=len(rows)) for name, _ in of_all]


def all_or_none(action: Callable[[], T]) -> T:
    """Return what `action` returns, once it has succeeded on all ranks; all of them call this.

    Raises UserError on every rank, with the first one's words, if it raises UserError or OSError on any. It must not
    wait for other ranks itself.
    """
    problem: str | None = None
    try:
        value = action()
    except (UserError, OSError) as error:
        problem = str(error)
        if isinstance(error, OSError) and error.filename:
            problem = f"{error.filename}: {reason(error)}"
    is_somewhere = any_rank(bool(problem))
    if problem or is_somewhere:
        raise UserError(next(filter(None, values_of_all(problem)), "another rank has failed"))
    return value


def disagreement(subject: str, values: Sequence[object]) -> str | None:
    """Name the ranks (indices of `values`) that differ from the rest; None if all are equal.

    The value that most ranks hold is right; among values held by equally many, the one met first from rank 0
    on.
    """
    right, count = Counter(values).most_common(1)[0]  # in a tie, Counter keeps the order of first meeting
    wrong = [rank for rank, value in enumerate(values) if value != right]
    if not wrong:
        return None
    example = next(rank for rank, value in enumerate(values) if value == right)
    have = "has" if len(wrong) == 1 else "have"
    others = f"rank {example}" if count == 1 else f"the other {count} ranks (rank {example}, ...)"
    return f"{spell_ranks(wrong)} {have} another {subject} than {others}"


def digest(value: object) -> bytes:
    """SHA-256 of the value's canonical JSON (keys sorted, no blanks). TypeError for what is not JSON."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).digest()


@cache
def code_version() -> str:
    """Return the installed version of the harness and a digest of its code and plans, as they lie on this host.

    A process reads them once: it goes on with the code that it has imported.
    """
    try:
        installed = version("ds-harness")
    except PackageNotFoundError:  # run from a checkout that was never installed
        installed = "not installed"
    return f"{installed} {tree_digest(PACKAGE)}"


def tree_digest(root: Path) -> str:
    """SHA-256, in hex, over the names and contents of the code under `root`: Python files and plans."""
    total = hashlib.sha256()
    for folder, folders, files in os.walk(root, followlinks=True):  # models/ is a link in a checkout
        folders.sort()
        for name in sorted(files):
            path = Path(folder, name)
            if path.suffix == ".py" or (path.suffix == ".json" and path.parent.name == "plans"):
                total.update(f"{path.relative_to(root).as_posix()}\0".encode())
                total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()


def spell_ranks(ranks: Sequence[int]) -> str:
    """Ascending ranks in short: "rank 6", "ranks 0-3, 6"."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    text = ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"
