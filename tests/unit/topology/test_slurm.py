"""Slurm's commands may be slow, or gone: a line says so, and nobody waits for ever."""

import pytest

from harness.errors import UserError
from harness.topology import slurm
from harness.topology.slurm import Allocation, address_of


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
    with pytest.raises(UserError, match="`scontrol show hostnames n"):
        Allocation.from_environ({"SLURM_JOB_NODELIST": "n[1-2]"})
    scontrol("#!/gone\n")
    with pytest.raises(UserError, match="`scontrol show node n1` cannot be started: No such file"):
        address_of("n1")
    scontrol("#!/bin/sh\necho 'NodeName=n1 NodeAddr=10.0.0.7 Port=1'\n")
    assert address_of("n1") == "10.0.0.7"


@pytest.mark.parametrize("answer", ["echo down >&2; exit 1", "exit 0", r"printf '\377\001 a'", "echo 'a /etc;b'"])
def test_an_answer_that_names_no_hosts_is_one_line(scontrol, answer):
    scontrol(f"#!/bin/sh\n{answer}\n")
    with pytest.raises(
        UserError, match=r"^`scontrol show hostnames n1` gives no names of hosts: ask whether Slurm is up"
    ):
        Allocation.from_environ({"SLURM_JOB_NODELIST": "n1"})
