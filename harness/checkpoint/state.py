"""Save and load what DeepSpeed's engine holds, with the random-number states beside it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine

from harness.checkpoint.directories import Progress, finish, partial_name, prune, read_progress
from harness.checkpoint.integrity import Files, changed_file, contents, newest, newest_whole
from harness.checkpoint.safe_loading import read_values, values_only
from harness.deepspeed.checkpoint_files import RECOVERY_SCRIPTS
from harness.errors import UserError


def save(engine: DeepSpeedEngine, output_dir: Path, progress: Progress, keep: int | None) -> Path:
    """Write a checkpoint; all ranks call it. Returns its directory.

    Beside adapters, frozen weights are not written: they are read from where they came, each time.

    Args:
        keep: how many newest checkpoints remain; None for all.
    """
    tag = partial_name(progress.step)
    engine.save_checkpoint(
        str(output_dir), tag=tag, save_latest=False, exclude_frozen_parameters=bool(progress.adapters)
    )
    rank = dist.get_rank()
    torch.save(_random_state(), output_dir / tag / f"random_state_{rank}.pt")
    dist.barrier()
    shares: list[Files] = [{}] * dist.get_world_size()
    dist.all_gather_object(shares, contents(output_dir / tag, rank, len(shares)))
    if rank == 0:
        for script in RECOVERY_SCRIPTS:
            (output_dir / script).unlink(missing_ok=True)
        finish(output_dir, replace(progress, files={name: file for share in shares for name, file in share.items()}))
        prune(output_dir, newest(output_dir, keep))
    dist.barrier()
    return output_dir / f"checkpoint-{progress.step}"


def first_unchanged(checkpoint: Path | None, output_dir: Path, *, auto: bool) -> tuple[Path | None, list[str]]:
    """Return the checkpoint, or with `auto` the newest older one, all of whose files are what was saved; all ranks
    call it.

    Returns with it what is wrong with those that are left out. Raises UserError, on all ranks alike, if the one that
    was named is damaged.
    """
    left_out: list[str] = []
    while checkpoint is not None:
        found: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(found, changed_file(checkpoint, dist.get_rank(), len(found)))
        reason = next(filter(None, found), None)
        if reason is None:
            break
        left_out.append(f"{checkpoint} is damaged ({reason})")
        if not auto:
            raise UserError(f"{left_out[0]}: resume from another checkpoint")
        checkpoint = newest_whole(output_dir, before=checkpoint)
    return checkpoint, left_out


def load(engine: DeepSpeedEngine, checkpoint: Path) -> Progress:
    """Load a checkpoint, saved in this layout, into the engine; all ranks call it.

    The schedule of the learning rate is left as it was built.

    UserError, on the rank that finds it, if that fails, as where a file is missing or damaged.
    """
    progress = read_progress(checkpoint)
    try:
        with values_only(engine):
            path, _ = engine.load_checkpoint(
                str(checkpoint.parent),
                tag=checkpoint.name,
                load_module_strict=not progress.adapters,
                load_lr_scheduler_states=False,
            )
        random_state = read_values(checkpoint / f"random_state_{dist.get_rank()}.pt")
    except UserError:
        raise
    except Exception as error:  # DeepSpeed's readers assert, and let through what torch and the system raise
        reason = (str(error).strip().splitlines() or ["a file that DeepSpeed looks for is missing"])[0]
        raise UserError(
            f"{checkpoint} cannot be loaded: {reason}; if a file of it is missing or damaged, resume from another"
        ) from error
    if path is None:
        raise UserError(f"{checkpoint}: DeepSpeed finds no state of this rank in it")
    _set_random_state(random_state)
    return progress


def _random_state() -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(state: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
