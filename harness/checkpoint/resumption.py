"""Choose the checkpoint that a run resumes: rank 0 finds it, and all ranks verify it."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from harness.checkpoint import training_state
from harness.checkpoint.directories import set_aside_foreign, set_aside_newer
from harness.checkpoint.integrity import damaged, find_resume, foreign, unlisted, wait_until_seen
from harness.checkpoint.saved_run import SavedRun
from harness.console import Console
from harness.topology.agreement import all_or_none, broadcast_object


@dataclass(frozen=True, kw_only=True)
class ResumeRequest:
    """Which checkpoint a run wants to resume, and what that must contain.

    Attributes:
        wanted: the checkpoint's path; "auto" for the newest intact one in `output_dir`; None to begin at step 0.
        overwrites: whether the run may overwrite another one in `output_dir`.
        trains: whether the run trains; an evaluation leaves all checkpoints where they are.
        optimizer, adapters, objective: the run's, as checkpoints store them.
    """

    output_dir: Path
    wanted: str | None
    overwrites: bool
    trains: bool
    optimizer: str
    adapters: str
    objective: str

    def find(self) -> Path | None:
        """Return the checkpoint; None if there is none. Raises UserError if the run cannot continue it."""
        checkpoint = find_resume(self.output_dir, self.wanted, overwrites=self.overwrites)
        if checkpoint is not None:
            self.read(checkpoint)
        return checkpoint

    def read(self, checkpoint: Path) -> SavedRun:
        """Return the state in a checkpoint. Raises UserError if it has another optimizer, adapters or objective."""
        saved = SavedRun.read(checkpoint)
        saved.require_same_optimizer(self.optimizer)
        saved.require_same_adapters(self.adapters)
        saved.require_same_objective(self.objective)
        return saved


def saved_run(request: ResumeRequest, console: Console) -> SavedRun | None:
    """Return the state in the checkpoint to resume; None for a run that begins at step 0. All ranks call it.

    The checkpoint's files are verified by their checksums. With `auto`, a damaged checkpoint is replaced by the newest
    intact one; if none is intact, the run begins at step 0. Both cases are reported.

    Raises:
        UserError: on all ranks, if the run cannot continue the checkpoint, or it is damaged and not chosen by `auto`.
    """
    if request.wanted is None:
        return None
    auto = request.wanted == "auto"
    is_first = dist.get_rank() == 0
    output_dir = request.output_dir
    found = chosen_by_rank_0(request.find)
    incomplete = all_or_none(lambda: damaged(output_dir, found) if auto and is_first else [])
    chosen, changed = training_state.first_unchanged(found, output_dir, auto=auto)
    # An older checkpoint in place of a damaged one has not been compared with this run yet.
    saved = all_or_none(lambda: None if chosen is None else request.read(chosen))
    tidied = all_or_none(lambda: _tidied(request, chosen, auto=auto) if is_first else [])
    left_out = [*incomplete, *changed]
    for line in [*tidied, *(f"{line}: ignored" for line in left_out)]:
        console.warn(line)
    if auto and chosen is None:
        console.say(f"no {'whole ' if left_out else ''}checkpoint in {output_dir}: starting from scratch")
    return saved


def chosen_by_rank_0(find: Callable[[], Path | None]) -> Path | None:
    """Return the checkpoint that rank 0 finds, once this host sees all of it; all ranks call it.

    Raises:
        UserError: on all ranks, if rank 0 finds no usable checkpoint, or a host does not see the one it finds.
    """
    # A host may see the newest checkpoint late (NFS), and must not take an older one than the others.
    chosen = broadcast_object(all_or_none(lambda: find() if dist.get_rank() == 0 else None))
    if chosen is not None:
        all_or_none(lambda: wait_until_seen(chosen, socket.gethostname()))
    return chosen


def _tidied(request: ResumeRequest, chosen: Path | None, *, auto: bool) -> list[str]:
    """Rename the checkpoints that this run will not continue; return warnings about them and about `chosen`."""
    lines, output_dir = [], request.output_dir
    if request.trains and auto:
        renamed = set_aside_foreign(foreign(output_dir))
        lines = [f"{path} was saved by another run: it is now {moved}" for path, moved in renamed]
    elif request.trains and chosen is not None and chosen.resolve().parent == output_dir.resolve():
        newer = set_aside_newer(output_dir, output_dir / chosen.name)
        lines = [f"resuming from {chosen}: a newer checkpoint is now {path}" for path in newer]
    if chosen is not None and (others := unlisted(chosen)):
        lines.append(f"{chosen} contains {', '.join(others)}, which it was not saved with: ignored")
    return lines
