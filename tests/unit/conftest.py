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
    os.environ.clear()
    os.environ.update(environment)
