"""Read a run's checkpoint back from its second place, if its own folder has lost it."""

from __future__ import annotations

from pathlib import Path

from harness.atomic import free_name, sync_folder
from harness.checkpoint.directories import MANIFEST, finished_name, partial_name, read_manifest, remove
from harness.checkpoint.integrity import changed_file, damage, newest_whole, own_run
from harness.console import Console
from harness.errors import UserError
from harness.extras.pushing.store import CANNOT, FLAG, Store, why


def read_back(store: Store, output_dir: Path, console: Console, name: str | None = None) -> Path | None:
    """Copy a checkpoint of the store to `output_dir`; one that is damaged in the store is left out, with a warning.

    Only checkpoints of this directory's own run count, if it knows it.

    Args:
        store: where to read from.
        output_dir: the run's directory.
        console: takes what is said.
        name: the checkpoint's; None for the newest, unless a newer one is whole in `output_dir`.

    Returns:
        The checkpoint here; None if none was read.

    Raises:
        UserError: the store cannot be read.
    """
    kept = newest_whole(output_dir) if name is None else None
    here = -1 if kept is None else read_manifest(kept).step
    try:
        for step, found in store.checkpoints():
            if step <= here:
                return None
            if name not in (None, found):
                continue
            console.say(f"reading {found} back from {store.url}")
            problem = _read(store, found, step, output_dir)
            if problem is None:
                return output_dir / finished_name(step)
            console.warn(f"{store.url}/{found} cannot be resumed ({problem}): ignored")
    except CANNOT as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{FLAG} {store.url}: cannot be read: {why(error)}") from error
    return None


def _read(store: Store, name: str, step: int, output_dir: Path) -> str | None:
    """Copy a checkpoint; return what is wrong with it, None if nothing is."""
    partial = output_dir / partial_name(step)
    final = output_dir / finished_name(step)
    remove([partial])
    try:
        store.get(f"{name}/{MANIFEST}", partial / MANIFEST)
        manifest = read_manifest(partial)
        if (run := own_run(output_dir)) and manifest.run_id != run:
            return "it is of another run"
        for file in manifest.files:
            store.get(f"{name}/{file}", partial / file)
        problem = damage(partial) or changed_file(partial, 0, 1)
        if problem is None:
            if final.exists():
                final.rename(free_name(output_dir / f"damaged-{final.name}"))
            partial.rename(final)
            sync_folder(output_dir)
        return problem
    except FileNotFoundError as error:
        return f"{error.filename or error} is missing"
    except UserError as error:
        return str(error)
    finally:
        remove([partial])
