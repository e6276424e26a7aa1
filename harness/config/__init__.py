"""Read a DeepSpeed JSON and resolve it for a run.

`resolving/` replaces every "auto". `text/` reads a file with lines and columns for the config check; without the check,
Python's own reader is used. Imports neither torch nor deepspeed, so a config is read in milliseconds, before any
process starts.
"""

from harness.config.resolving.config_check import ConfigCheck
from harness.config.resolving.resolved import Filled, Resolved
from harness.config.values.arguments import AutoValues
from harness.errors import UserError

__all__ = ["AutoValues", "ConfigCheck", "Filled", "Resolved", "UserError"]
