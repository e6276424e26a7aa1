"""A hostfile is read as the deepspeed launcher reads it; a bad line is told."""

from pathlib import Path

import pytest
from deepspeed.launcher.runner import _parse_hostfile

from harness.errors import UserError
from harness.resilience.hostfile import read_hostfile


def test_a_hostfile_is_read_as_deepspeed_reads_it(tmp_path: Path) -> None:
    text = "# fast ones\nworker-0 slots=4\n\n  worker-1   slots=2   # spare\n10.0.0.3 slots=16 max_slots=16\n"
    (tmp_path / "hostfile").write_text(text)
    ours = {host.name: host.slots for host in read_hostfile(tmp_path / "hostfile")}
    assert ours == dict(_parse_hostfile(text.splitlines())) == {"worker-0": 4, "worker-1": 2, "10.0.0.3": 16}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a slots=2\nb 4\n", "hostfile:2: 'b 4' is not `host slots=N`"),
        ("a slots=2\na slots=4\n", "hostfile:2: host a appears twice"),
        ("a slots=0\n", "hostfile:1: 'a slots=0' is not `host slots=N` with N of at least 1"),
        ("# nothing\n\n", "contains no host"),
        (None, "cannot read hostfile .*No such file"),
        (b"\xff\xfe slots=2", "cannot read hostfile"),
    ],
)
def test_a_bad_hostfile_is_told_with_its_line(tmp_path: Path, text: str | bytes | None, message: str) -> None:
    path = tmp_path / "hostfile"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=message):
        read_hostfile(path)
