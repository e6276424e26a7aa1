"""The arguments of a run, with names and defaults as in HuggingFace's TrainingArguments and run_clm.py.

The dataclasses, one file per theme, are the only list of flags: the command line, `--help` and docs/flags.md are
generated from them. Neither torch nor transformers is imported, so a wrong argument is refused at once.
"""

from harness.arguments.themes.flags import Flags, flag
from harness.arguments.training_arguments import TrainingArguments
from harness.config.values.arguments import SCHEDULES

__all__ = ["SCHEDULES", "Flags", "TrainingArguments", "flag"]
