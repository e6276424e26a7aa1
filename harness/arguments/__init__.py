"""The arguments of a run, named and defaulted as in HuggingFace's TrainingArguments and run_clm.py.

The dataclasses, one file a theme, are the only list of flags: command line, `--help` and docs/flags.md are made from
them. Neither torch nor transformers is imported, so a wrong argument is refused at once.
"""

from harness.arguments.themes.flags import Flags, flag
from harness.arguments.training_arguments import TrainingArguments
from harness.config.values.arguments import SCHEDULES

__all__ = ["SCHEDULES", "Flags", "TrainingArguments", "flag"]
