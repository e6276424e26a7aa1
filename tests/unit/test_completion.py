"""Completion in a shell: the documented line, and what it proposes for a line of `ds-harness`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SETUP = 'eval "$(register-python-argcomplete ds-harness)"'
BIN = Path(sys.executable).parent
ASK = """
COMP_LINE=$LINE COMP_POINT=${#LINE} COMP_TYPE=9
_python_argcomplete ds-harness
printf '%s\\n' "${COMPREPLY[@]}"
"""


def proposals(line: str, folder: Path) -> set[str]:
    """What bash proposes for a line after the documented setup."""
    environment = {**os.environ, "LINE": line, "PATH": f"{BIN}:{os.environ['PATH']}"}
    command = ["bash", "--norc", "-c", SETUP + ASK]
    found = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=True)
    return {word.strip() for word in found.stdout.splitlines()}


def test_the_documented_setup_is_the_tested_one() -> None:
    assert SETUP in (ROOT / "docs/quick-start.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("line", "proposed"),
    [
        ("ds-harness ch", {"check", "checkpoint"}),
        ("ds-harness check --f", {"--fix", "--format", "--fp8"}),
        ("ds-harness check a.json --format s", {"sarif"}),
        ("ds-harness check a", {"a.json"}),
        ("ds-harness train --num_train_e", {"--num_train_epochs"}),
        ("ds-harness train --lr_scheduler_type cosine_wa", {"cosine_warmup_with_min_lr"}),
        ("ds-harness train --model_name_or_path a", {"a.json"}),
        ("ds-harness launch --max_res", {"--max_restarts"}),
        ("ds-harness check --frob", {""}),
    ],
)
def test_verbs_flags_values_and_files_are_proposed(line: str, proposed: set[str], tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{}")
    assert proposals(line, tmp_path) == proposed
