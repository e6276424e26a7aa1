"""What unit tests leave behind for those of the next file: nothing of a run in their own process."""

import os
import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def no_run_is_left() -> Iterator[None]:
    """End the process group of a Trainer in this process, and give back the environment that it has changed."""
    environment = dict(os.environ)
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
    if (groups := sys.modules.get("deepspeed.utils.groups")) is not None:  # it keeps its own, for the next engine
        groups._release_process_group_references()
    os.environ.clear()
    os.environ.update(environment)
