"""All tests of this folder run on the simulated device; they are skipped where it cannot be built.

With `--device cuda` the files of `ON_GPUS` run on GPUs, and the others, which ask the device itself, are skipped.
"""

from collections.abc import Iterator

import pytest

from tests.support import ranks
from tests.support.simulated_device import device

ON_GPUS = ("test_features", "test_fp16", "test_layouts")


@pytest.fixture(scope="package", autouse=True)
def simulated_device() -> Iterator[None]:
    """Let ranks run on the simulated device."""
    if ranks.DEVICE[0] == "cuda":
        yield
        return
    if reason := device.why_not():
        pytest.skip(reason)
    before, ranks.DEVICE[0] = ranks.DEVICE[0], "simulated"
    yield
    ranks.DEVICE[0] = before


@pytest.fixture(scope="module", autouse=True)
def runs_there(request: pytest.FixtureRequest) -> None:
    """Skip on GPUs what needs the simulated device."""
    if ranks.DEVICE[0] == "cuda" and request.path.stem not in ON_GPUS:
        pytest.skip("asks the simulated device")
