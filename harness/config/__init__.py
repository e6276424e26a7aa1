"""Read a DeepSpeed JSON, and resolve what a run makes of it.

`resolve` fills in every "auto". `text/` reads a file with line and column, for the config check; without the check
Python's own reader does. Nothing here imports torch or deepspeed, so a config is read in milliseconds, before any
process starts.
"""

from harness.config.resolving.config_check import ConfigCheck
from harness.config.resolving.resolve import resolve
from harness.config.resolving.resolved import Filled, Resolved
from harness.config.values.arguments import AutoValues
from harness.errors import UserError

__all__ = [
    "AutoValues",
    "ConfigCheck",
    "Filled",
    "Resolved",
    "UserError",
    "resolve",
]
