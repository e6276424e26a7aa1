"""What a DeepSpeed JSON may say, and what a run makes of it.

`load` reads a file or preset, `check` reports what is wrong with it, `resolve` fills in every "auto". Nothing here
imports torch or deepspeed, so a config is checked in milliseconds, before any process starts.
"""

from harness.config.checking.check import check, refusals
from harness.config.resolving.resolve import resolve
from harness.config.resolving.resolved import Filled, Resolved
from harness.config.text.diagnostic import ConfigError, Diagnostic, Severity
from harness.config.text.document import Document, load
from harness.config.values.arguments import AutoValues
from harness.errors import UserError

__all__ = [
    "AutoValues",
    "ConfigError",
    "Diagnostic",
    "Document",
    "Filled",
    "Resolved",
    "Severity",
    "UserError",
    "check",
    "load",
    "refusals",
    "resolve",
]
