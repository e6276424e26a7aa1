"""Descriptors are waited for whatever their numbers are, and where no more of them can be opened."""

import os
import resource
import time

from harness.topology.descriptors import wait_readable


def test_a_descriptor_of_a_high_number_is_waited_for():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, limits[1]), limits[1]))
    source, target = os.pipe()
    high = source if limits[1] <= 1500 else os.dup2(source, 1500)
    try:
        assert wait_readable([high], 0) == []
        os.write(target, b"x")
        assert wait_readable([high, high], 5) == [high]
        os.close(target)
        os.read(high, 1)
        assert wait_readable([high], 5) == [high]  # closed: read() returns at once
        begun = time.monotonic()
        assert wait_readable([], 0.01) == [] and time.monotonic() - begun > 0.009
    finally:
        for descriptor in {high, source}:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
