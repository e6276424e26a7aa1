"""What a device cannot run of a config."""

from __future__ import annotations

from collections.abc import Mapping

from harness.config.text.diagnostic import Diagnostic, Severity
from harness.config.values.idle_keys import accelerated

REMEDY, ON_A_CPU = "run on an accelerator, or remove it", "fails on a CPU when the kernel is loaded"


def unsupported_on_cpu(config: Mapping[str, object]) -> list[Diagnostic]:
    """Return an error for each feature that a CPU lacks."""
    return [
        Diagnostic(
            code="DS109",
            severity=Severity.ERROR,
            message=message,
            pointer=pointer,
            hint=REMEDY,
            deepspeed=ON_A_CPU,
        )
        for pointer, message in accelerated(config).items()
    ]
