"""Prepared data on disk: made once on each host, under a name that says what it was made of, and mapped from there."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, TypeVar

from harness.data.tokenizer import ByteTokenizer, Tokenizer
from harness.errors import UserError, reason
from harness.topology.env import LaunchEnv
from harness.topology.placement import host_id

if TYPE_CHECKING:
    from datasets import Dataset
    from torch.distributed import Store

T = TypeVar("T")

_PATIENCE_S = 10.0
_LOOKS = 512  # a second


@dataclass(frozen=True)
class Preparation:
    """How data is prepared.

    Attributes:
        cache_dir: where it is kept; by default HF_DATASETS_CACHE.
        say: gets a line of progress now and then.
        workers: processes, by default one a core.
    """

    cache_dir: str | os.PathLike[str] | None = None
    say: Callable[[str], None] = lambda _: None
    workers: int | None = None

    def folder(self, *key: object) -> Path:
        """Return where what is made of `key` lies."""
        return prepared_folder(self.cache_dir) / fingerprint(*key)

    def error(self, error: OSError) -> UserError:
        """Return the error for data that cannot be kept."""
        return cache_error(error, self.cache_dir)


USUAL = Preparation()


def prepared_folder(cache_dir: str | os.PathLike[str] | None) -> Path:
    """Return where prepared data lies: in `cache_dir`, by default HF_DATASETS_CACHE."""
    from datasets.config import HF_DATASETS_CACHE

    return Path(cache_dir or HF_DATASETS_CACHE).absolute() / "prepared"


def cache_error(error: OSError, cache_dir: str | os.PathLike[str] | None) -> UserError:
    """Return the error for prepared data that cannot be written: the disk is full, the directory is not ours."""
    from datasets.config import HF_DATASETS_CACHE

    place = cache_dir or HF_DATASETS_CACHE
    return UserError(f"cannot keep prepared data in {place} ({reason(error)}): set HF_DATASETS_CACHE")


def once_per_host(
    build: Callable[[], T], *, env: LaunchEnv, store: Store, host: str | None = None, poll_s: float = 0.5
) -> T:
    """Let one rank of each host build what the others then read from its cache; all ranks call it.

    On the host of rank 0, which speaks to the user, that one builds; elsewhere the first that comes. Nobody is in a
    collective meanwhile: the others look into the store, for as long as it takes, and return when all ranks have their
    data. They look every `poll_s` seconds at first, then less often, so that all ranks together ask the store some
    _LOOKS times a second. A UserError of one rank is raised by all.

    Args:
        host: which host this is; by default what the host says.
    """
    host = host_id() if host is None else host
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
        deadline = time.monotonic() + _PATIENCE_S  # the store may end with this process: let the others hear first
        while store.add(heard, 0) < env.world_size and time.monotonic() < deadline:
            time.sleep(poll_s)
        raise


def fingerprint(*parts: object) -> str:
    """Return a name for prepared data, the same in every process and run: made of what it was made of, of no pickled
    code."""
    return hashlib.sha256("\0".join(map(str, parts)).encode(errors="surrogatepass")).hexdigest()[:32]


def fingerprint_of(rows: Dataset) -> str:
    """Return the name that stands for the content of a data set."""
    name: str = rows._fingerprint  # noqa: SLF001  # datasets has no public name for it
    return name


def set_fingerprint(rows: Dataset, name: str) -> None:
    """Let `name` stand for the content of a data set."""
    rows._fingerprint = name  # noqa: SLF001  # datasets has no public name for it


def identity(tokenizer: Tokenizer) -> str:
    """All that decides how a tokenizer cuts text: not its pickle, which changes with use."""
    if isinstance(tokenizer, ByteTokenizer):
        return repr(tokenizer)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        rules = json.loads(backend.to_str())
        for state_of_the_last_call in ("truncation", "padding"):
            rules.pop(state_of_the_last_call, None)
        parts = [json.dumps(rules, sort_keys=True)]
    else:
        with TemporaryDirectory() as folder:
            tokenizer.save_pretrained(folder)
            parts = [file.read_text(encoding="latin-1") for file in sorted(Path(folder).iterdir())]
    return "\0".join((type(tokenizer).__name__, str(tokenizer.eos_token_id), *parts))
