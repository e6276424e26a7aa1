"""Write docs/flags.md, the list of every flag, from the argument dataclasses: python scripts/write_flags.py [FILE]."""

import argparse
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from harness.arguments import TrainingArguments
from harness.arguments.themes.flags import Help, groups
from harness.arguments.themes.lora import LoraArguments
from harness.arguments.themes.preferences import PreferenceArguments
from harness.arguments.themes.script import ScriptArguments
from harness.command_line.parsing import shown_default

HEAD = """# Every flag

These are the flags of `ds-harness train` and of `scripts/train.py`. Except for "Model and data", "LoRA" and
"Preferences" they are also the fields of `harness.TrainingArguments`. A flag that contradicts the DeepSpeed JSON is an
error that names both. Written by `python scripts/write_flags.py`.

`--config FILE` reads flags, such as `max_steps: 100`, from a YAML or JSON file; the command line overrides it.
The `run.json` of a run is such a file: `--config runs/mine/run.json --output_dir runs/again` repeats the run.

Dashes equal underscores, and `--no_NAME` means `--NAME false`. Flags of HuggingFace's `TrainingArguments` and
`run_clm.py` that are not listed are refused with the reason; they are accepted with values that would change nothing.
"""
TABLES = (*groups(ScriptArguments), *groups(TrainingArguments), *groups(LoraArguments), *groups(PreferenceArguments))


def row(item: Any) -> str:
    """Return the table row of a field: flag, default, meaning."""
    default = shown_default(item)
    shown = f"`{default}`" if default else ""
    text = Help.of(item).plain.replace("|", "\\|")
    return f"| `--{item.name}` | {shown} | {text} |"


def page() -> str:
    """Return the page in Markdown."""
    parts = [HEAD]
    for kind in TABLES:
        parts += [f"## {kind.TITLE}\n", "| flag | default | meaning |\n|---|---|---|", *map(row, fields(kind)), ""]
    return "\n".join(parts)


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="?", type=Path, default=Path("docs/flags.md"))
    parser.parse_args().file.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
