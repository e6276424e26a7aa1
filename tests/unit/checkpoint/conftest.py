"""A world of one rank, for what asks all ranks."""

import pytest

from harness.topology.groups import Groups, build_groups
from harness.topology.layout import Layout


@pytest.fixture
def groups() -> Groups:
    """The groups of the only rank; it is started, so that all ranks can be asked."""
    from harness.device.process_group import start
    from harness.topology.env import LaunchEnv

    start(LaunchEnv())
    return build_groups(Layout())
