"""All tests of this folder run on the simulated device; they are skipped where it cannot be built."""

from collections.abc import Iterator

import pytest

from tests.distributed import ranks
from tests.simulated_device import device


@pytest.fixture(scope="package", autouse=True)
def simulated_device() -> Iterator[None]:
    """Let ranks run on the simulated device."""
    if reason := device.why_not():
        pytest.skip(reason)
    before, ranks.DEVICE[0] = ranks.DEVICE[0], "simulated"
    yield
    ranks.DEVICE[0] = before
