"""The config check: all rules over a config, alone or with the arguments of its run."""

from harness.checking.check import check, refusals
from harness.checking.of_run import ConfigRules, resolve

__all__ = ["ConfigRules", "check", "refusals", "resolve"]
