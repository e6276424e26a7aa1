"""What holds for every test: how many examples hypothesis draws, what Python's collector of garbage looks through, and
that a file leaves nothing of a run in its process.

Hypothesis measures no time, as the machine may be busy with other ranks. It draws other examples in every run, so that
few of them a run are enough; `--hypothesis-profile thorough` draws many.
"""

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("thorough", deadline=None, max_examples=1000)
settings.register_profile("harness", deadline=None, max_examples=15)
settings.load_profile("harness")
gc.disable()  # while test files are imported: there is next to no garbage, and looking for it is a sixth of the time


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--device`: ranks run on the simulated device, or on the GPUs of this machine, in the place of the CPU."""
    parser.addoption("--device", choices=("cpu", "simulated", "cuda"), default="cpu", help="what tests start ranks on")


def pytest_configure(config: pytest.Config) -> None:
    """Hand the device on to what starts ranks, and to all processes that tests start: this one stays on the CPU."""
    if config.getoption("--device") == "simulated":
        from tests.support import ranks
        from tests.support.simulated_device import device

        if reason := device.why_not():
            pytest.exit(reason, 0)
        ranks.DEVICE[0] = "simulated"
        os.environ.update(device.environment())
    elif config.getoption("--device") == "cuda":
        from tests.support import ranks

        ranks.DEVICE[0] = "cuda"
        if ranks.GPUS not in os.environ:  # else a worker, which has it from the process that starts the tests
            import torch

            count = torch.cuda.device_count()
            if count == 0:
                pytest.exit("--device cuda: no GPU is here", 0)
            every = ",".join(map(str, range(count)))
            os.environ[ranks.GPUS] = os.environ.get("CUDA_VISIBLE_DEVICES", every)
        os.environ.update(CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip on a device what cannot hold there, with the reason that the test gives; leave out the widest checks of all.

    A run without paths, `./scripts/test`, leaves out what is marked `thorough`.
    Files of `tests/e2e` come between those of `tests/distributed`: they mostly wait for processes that end or are
    given time, and leave the cores to the other worker.
    """
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        left_out = [item for item in items if item.get_closest_marker("thorough")]
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)
    folders: dict[Path, dict[Path, None]] = {}
    for item in items:
        folders.setdefault(item.path.parent, {})[item.path] = None
    share = {path: index / len(paths) for paths in folders.values() for index, path in enumerate(paths)}
    mixed = (Path(__file__).parent / "distributed", Path(__file__).parent / "e2e")
    items.sort(key=lambda item: (0, share[item.path]) if item.path.parent in mixed else (1, 0))
    for item in items if config.getoption("--device") != "cpu" else []:
        for mark in item.iter_markers("on_host"):
            item.add_marker(pytest.mark.skip(reason=mark.args[0]))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Spare collections of garbage, of which a Trainer asks for some, all that was imported: it is half their time."""
    gc.freeze()
    gc.enable()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """As above, with what the tests of a file have imported."""
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


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
