"""Find models and tokenizers of the HuggingFace hub by id in the local cache, or download them into it.

An id is `organisation/name`, followed by `@revision` for a revision other than `main`.
"""

from __future__ import annotations

import fcntl
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness.config.model.files import INDEX, indexed_files
from harness.errors import UserError, headline, text_of

ID = re.compile(r"(?P<name>\w[\w.-]*(?:/\w[\w.-]*)?)(?:@(?P<revision>[\w./-]+))?")
TEXTS = ("*.json", "tokenizer*", "*.model", "*.txt", "*.jinja")  # configs and tokenizers
NOT_NEEDED = ("*/*", "consolidated*")  # other forms of the same weights


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What to find on the hub: a model or a tokenizer.

    Attributes:
        flag: the flag that names it, for messages.
        files: patterns of the files to download.
        is_whole: returns whether a folder has all the required files.
        lacking: what an incomplete folder lacks, for messages.
    """

    flag: str
    files: tuple[str, ...]
    is_whole: Callable[[Path], bool]
    lacking: str


def cached(source: str) -> Path | None:
    """Return a model's folder in the local cache, or None."""
    from huggingface_hub import constants

    if (match := ID.fullmatch(source)) is None or Path(source).exists():
        return None
    folder = Path(constants.HF_HUB_CACHE) / f"models--{match['name'].replace('/', '--')}"
    revision = match["revision"] or "main"
    reference = folder / "refs" / revision
    # A branch or tag is a file that holds its commit; a revision may also be a commit itself.
    try:
        commit = reference.read_text(encoding="utf-8").strip() if reference.is_file() else revision
    except OSError:
        return None
    snapshot = folder / "snapshots" / commit
    return snapshot if snapshot.is_dir() else None


def fetch(source: str, wanted: Wanted) -> Path | None:
    """Return the cache folder with the files of `source`, after downloading missing files.

    One process per host downloads; the others wait. Returns None if `source` cannot be downloaded by its form: a path,
    or a name without an organisation that is not in the cache.

    Raises UserError if it is not in the cache and cannot be downloaded.
    """
    found = cached(source)
    if found is not None and wanted.is_whole(found):
        return found
    match = ID.fullmatch(source)
    if match is None or "/" not in match["name"] or Path(source).exists():
        return None
    with _one_at_a_time(match["name"]):
        # Again, as another process may have downloaded it in the meantime.
        found = cached(source)
        if found is None or not wanted.is_whole(found):
            found = _download(match["name"], match["revision"], wanted)
    if not wanted.is_whole(found):
        raise UserError(f"{wanted.flag} {source}: on the hub it has {wanted.lacking}")
    return found


def holds_model(folder: Path) -> bool:
    """Return whether a folder contains a config.json and all weight files."""
    if not (folder / "config.json").is_file():
        return False
    try:
        files = indexed_files(folder / INDEX)
    # There is no index.
    except (OSError, ValueError):
        return any(folder.glob("*.safetensors"))
    return all((folder / file).is_file() for file in files)


MODEL = Wanted(
    flag="--model_name_or_path",
    files=("*.safetensors", *TEXTS),
    is_whole=holds_model,
    lacking="no config.json, or no weights in safetensors",
)


def _download(name: str, revision: str | None, wanted: Wanted) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    command = f"`hf download {name}{f' --revision {revision}' if revision else ''}`"
    missing = f"{wanted.flag} {name}: no such directory, and not in the cache of the hub ({constants.HF_HUB_CACHE})"
    if constants.HF_HUB_OFFLINE:
        raise UserError(f"{missing}; HF_HUB_OFFLINE is set: unset it, run {command}, or give a directory")
    try:
        return Path(
            snapshot_download(
                name,
                revision=revision,
                cache_dir=constants.HF_HUB_CACHE,
                allow_patterns=list(wanted.files),
                ignore_patterns=list(NOT_NEEDED),
            )
        )
    except HfHubHTTPError as error:  # not there, private, gated, or the hub itself is in trouble
        raise UserError(f"{missing}; the hub says: {text_of(error, 300)}") from error
    except (OSError, ValueError) as error:
        raise UserError(
            f"{missing}; it cannot be downloaded ({headline(error)[:200]}): run {command} where there is a network, "
            "or give a directory"
        ) from error


@contextmanager
def _one_at_a_time(name: str) -> Iterator[None]:
    """Hold this host's download lock for a model; do nothing if the cache is read-only."""
    from huggingface_hub import constants

    file = Path(constants.HF_HUB_CACHE) / ".locks" / f"ds-harness--{name.replace('/', '--')}.lock"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = file.open("w")
    except OSError:
        yield
        return
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
