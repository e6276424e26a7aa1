"""Read a DeepSpeed JSON, and resolve what a run makes of it.

`load` reads a file or preset, `resolve` fills in every "auto". Nothing here imports torch or deepspeed, so a config is
read in milliseconds, before any process starts.
"""

from harness.config.resolving.config_check import ConfigCheck
from harness.config.resolving.resolve import resolve
from harness.config.resolving.resolved import Filled, Resolved
from harness.config.text.diagnostic import ConfigError, Diagnostic, Severity
from harness.config.text.document import Document, load
from harness.config.values.arguments import AutoValues
from harness.errors import UserError

__all__ = [
    "AutoValues",
    "ConfigCheck",
    "ConfigError",
    "Diagnostic",
    "Document",
    "Filled",
    "Resolved",
    "Severity",
    "UserError",
    "load",
    "resolve",
]
