"""A world of one rank, for engines."""

import pytest


@pytest.fixture(scope="module")
def one_rank() -> None:
    """Start the only rank; `no_run_is_left` ends it."""
    from harness.device.process_group import start
    from harness.topology.env import LaunchEnv

    start(LaunchEnv())
