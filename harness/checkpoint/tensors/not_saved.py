"""Turn any failure to save files into one error on all ranks: NotSaved, one line of text."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from harness.errors import UserError, headline
from harness.topology.agreement import all_or_none

T = TypeVar("T")
NO_MEMORY = "has no memory for it"


class NotSaved(UserError):
    """A checkpoint or a model could not be written."""


def all_save(action: Callable[[], T]) -> T:
    """Run `action`, which saves something, on every rank, and return its result; all ranks call this.

    `action` must not run collectives. Any exception on any rank, from any library, becomes NotSaved on all ranks.
    """
    try:
        return all_or_none(lambda: saving(action))
    except UserError as error:
        raise NotSaved(str(error)) from error


def saving(action: Callable[[], T]) -> T:
    """Run `action`; convert any exception to UserError or OSError."""
    try:
        return action()
    except (UserError, OSError):
        raise
    except MemoryError as error:
        raise UserError(f"rank {dist.get_rank()} {NO_MEMORY}: {error or 'out of memory'}") from error
    # Libraries report a full disk or memory in their own ways: tokenizers raises a plain Exception, torch's allocator
    # and a thread that cannot be started raise RuntimeError.
    except Exception as error:
        text = headline(error)
        if any(words in str(error) for words in ("can't allocate memory", "out of memory", "can't start new thread")):
            raise UserError(f"rank {dist.get_rank()} {NO_MEMORY}: {text}") from error
        # Into this rank's log, since it may be more than a full disk.
        traceback.print_exc()
        kind = "" if type(error) is Exception else f"{type(error).__name__}: "
        raise UserError(f"rank {dist.get_rank()}: {kind}{text}") from error
