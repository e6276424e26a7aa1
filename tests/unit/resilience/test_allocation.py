"""The hosts of a Slurm job, as `scontrol` tells them."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.errors import UserError
from harness.resilience.hosts import Allocation
from harness.topology import slurm


@pytest.mark.parametrize(
    ("answer", "refusal"),
    [
        ("exec /bin/sleep 100", r"`scontrol show hostnames n1` has not answered for 0\.2 s: ask whether Slurm is up"),
        *(
            (answer, r"`scontrol show hostnames n1` gives no names of hosts: ask whether Slurm is up")
            for answer in ("echo down >&2; exit 1", "exit 0", r"printf '\377\001 a'", "echo 'a /etc;b'")
        ),
    ],
)
def test_an_answer_that_names_no_hosts_is_one_line(
    answer: str, refusal: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no other scontrol, on a machine that has Slurm
    monkeypatch.setattr(slurm, "ANSWER_S", 0.2)
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\n{answer}\n")
    (tmp_path / "scontrol").chmod(0o755)
    with pytest.raises(UserError, match=f"^{refusal}"):
        Allocation.from_environ({"SLURM_JOB_NODELIST": "n1"})
