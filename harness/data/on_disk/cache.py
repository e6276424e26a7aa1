"""Name prepared data on disk by a hash of its inputs, and let one rank of each host write it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from harness.batches.stream import fingerprint
from harness.errors import UserError, reason
from harness.topology.env import LaunchEnv
from harness.topology.hosts import host_id

if TYPE_CHECKING:
    from datasets import Dataset
    from torch.distributed import Store

T = TypeVar("T")

_PATIENCE_S = 10.0  # how long the other ranks have to read an error from the store
_LOOKS = 512  # requests a second from all ranks together to the store, which is one process on rank 0


@dataclass(frozen=True)
class Preparation:
    """Options for preparing data.

    Attributes:
        cache_dir: folder of the prepared data; by default HF_DATASETS_CACHE.
        say: prints a line of progress now and then.
        workers: number of processes, by default one a core.
    """

    cache_dir: str | os.PathLike[str] | None = None
    say: Callable[[str], None] = lambda _: None
    workers: int | None = None

    def folder(self, *key: object) -> Path:
        """Return the folder for data that is determined by `key`."""
        return prepared_folder(self.cache_dir) / fingerprint(*key)

    def error(self, error: OSError) -> UserError:
        """Return the UserError for a failure to write prepared data."""
        return cache_error(error, self.cache_dir)


USUAL = Preparation()


def prepared_folder(cache_dir: str | os.PathLike[str] | None) -> Path:
    """Return the folder of all prepared data, in `cache_dir` or HF_DATASETS_CACHE."""
    from datasets.config import HF_DATASETS_CACHE

    return Path(cache_dir or HF_DATASETS_CACHE).absolute() / "prepared"


def cache_error(error: OSError, cache_dir: str | os.PathLike[str] | None) -> UserError:
    """Return the UserError for prepared data that cannot be written: disk full, no permission."""
    from datasets.config import HF_DATASETS_CACHE

    place = cache_dir or HF_DATASETS_CACHE
    return UserError(f"cannot keep prepared data in {place} ({reason(error)}): set HF_DATASETS_CACHE")


def once_per_host(
    build: Callable[[], T], *, env: LaunchEnv, store: Store, host: str | None = None, poll_s: float = 0.5
) -> T:
    """Call `build` on one rank of each host first, then on the others, which find its cache; all ranks call this.

    On rank 0's host rank 0 builds, as it prints progress; on other hosts the rank that arrives first. The others poll
    the store, however long it takes: a collective would run into its timeout. They poll every `poll_s` seconds at
    first, then less often, so that all ranks together ask the store at most about _LOOKS times a second.

    Args:
        host: identifies this host; by default by its boot id and name.

    Returns:
        The result of `build` on this rank, when all ranks have theirs.

    Raises:
        UserError: `build` failed on some rank; raised on all ranks.
    """
    host = host_id() if host is None else host
    # Keys contain the number of the call: each rank counts its calls, and all ranks make them in the same order.
    turn = store.add(f"prepared/{env.rank}/turns", 1)
    first, comers, built_here = (f"prepared/{turn}/{name}" for name in ("first", f"come/{host}", f"built/{host}"))
    ready, failed, heard = (f"prepared/{turn}/{name}" for name in ("ready", "failed", "heard"))

    def wait(is_over: Callable[[], bool]) -> None:
        pause = poll_s
        while not is_over():
            if store.check([failed]):
                raise UserError(store.get(failed).decode())
            time.sleep(pause)
            pause = min(1.5 * pause, max(poll_s, env.world_size / _LOOKS))

    try:
        if env.rank == 0:
            store.set(first, host)
        wait(lambda: store.check([first]))
        if env.rank != 0 and (host == store.get(first).decode() or store.add(comers, 1) > 1):
            wait(lambda: store.check([built_here]))
        built = build()
        store.set(built_here, "")
        store.add(ready, 1)
        wait(lambda: store.add(ready, 0) == env.world_size)
        return built
    except Exception as error:
        if not store.check([failed]):
            store.set(failed, str(error) if isinstance(error, UserError) else f"data: {type(error).__name__}: {error}")
        store.add(heard, 1)
        # The store may run in this process. Before it ends, wait until all other ranks have read the error.
        deadline = time.monotonic() + _PATIENCE_S
        while store.add(heard, 0) < env.world_size and time.monotonic() < deadline:
            time.sleep(poll_s)
        raise


def fingerprint_of(rows: Dataset) -> str:
    """Return the fingerprint of a data set, which identifies its content."""
    name: str = rows._fingerprint  # noqa: SLF001  # datasets has no public name for it
    return name


def set_fingerprint(rows: Dataset, name: str) -> None:
    """Set the fingerprint of a data set, which identifies its content."""
    rows._fingerprint = name  # noqa: SLF001  # datasets has no public name for it
