"""Read a checkpoint as a HuggingFace directory without the files that were added to it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.checkpoint.directories import read_manifest


@contextmanager
def listed_files(directory: Path) -> Iterator[Path]:
    """Yield a temporary folder of links to exactly the files that a checkpoint's manifest lists.

    transformers selects files by name, so it could read a file that was added to the checkpoint.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, directory.absolute().name)
        folder.mkdir()
        for file in read_manifest(directory).files:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).symlink_to((directory / file).resolve())
        yield folder
