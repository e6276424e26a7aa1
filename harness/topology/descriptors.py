"""Wait for file descriptors, whatever their numbers are: select() knows none from 1024 on."""

from __future__ import annotations

import selectors
from collections.abc import Iterable


def wait_readable(descriptors: Iterable[int], seconds: float) -> list[int]:
    """Return which of these file descriptors can be read, or have been closed, within some seconds.

    No descriptor is needed for that, so it works where the process may open no more of them.
    """
    with selectors.PollSelector() as waiting:
        for descriptor in dict.fromkeys(descriptors):
            waiting.register(descriptor, selectors.EVENT_READ)
        return [key.fd for key, _ in waiting.select(seconds)]
