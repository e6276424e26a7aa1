"""Slurm's commands may be slow, or gone: a line says so, and nobody waits for ever."""

import pytest

from harness.errors import UserError
from harness.topology import slurm
from harness.topology.slurm import address_of


@pytest.fixture
def scontrol(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))  # no other scontrol, on a machine that has Slurm

    def write(content):
        (tmp_path / "scontrol").write_text(content)
        (tmp_path / "scontrol").chmod(0o755)

    return write


def test_a_command_that_does_not_answer_is_one_line(scontrol, monkeypatch):
    monkeypatch.setattr(slurm, "ANSWER_S", 0.2)
    scontrol("#!/bin/sh\nexec /bin/sleep 100\n")
    with pytest.raises(
        UserError, match=r"^`scontrol show node n1` has not answered for 0\.2 s: ask whether Slurm is up"
    ):
        address_of("n1")
    scontrol("#!/gone\n")
    with pytest.raises(UserError, match="`scontrol show node n1` cannot be started: No such file"):
        address_of("n1")
    scontrol("#!/bin/sh\necho 'NodeName=n1 NodeAddr=10.0.0.7 Port=1'\n")
    assert address_of("n1") == "10.0.0.7"
