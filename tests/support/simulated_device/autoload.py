"""What torch calls when it has been imported; see `plugin/`."""

from __future__ import annotations


def install() -> None:
    """Install the device, unless it is what imports torch: then it does so itself, at its end."""
    from tests.support.simulated_device import device

    if hasattr(device, "install"):
        device.install()
