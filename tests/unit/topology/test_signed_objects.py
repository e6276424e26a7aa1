"""Objects between ranks: signed with the secret of the run, as torch codes them."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed import distributed_c10d

from harness.topology.env import SECRET
from harness.topology.signed_objects import sign_objects
from tests.unit.resilience.test_elastic import Trap

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def signs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_pickler", "_unpickler"):
        monkeypatch.setattr(distributed_c10d, name, getattr(distributed_c10d, name))
    monkeypatch.setenv(SECRET, "of the run")
    sign_objects()


def test_an_object_of_any_type_arrives() -> None:
    value = {"a": (Path("b"), torch.bfloat16)}
    content, size = distributed_c10d._object_to_tensor(value, CPU, None)
    padded = torch.cat([content, torch.zeros(9, dtype=torch.uint8)])  # to the longest one of all ranks
    assert distributed_c10d._tensor_to_object(padded, size, None) == value


def test_an_object_that_no_rank_of_the_run_has_signed_is_not_unpickled(tmp_path: Path) -> None:
    forged = torch.frombuffer(bytearray(pickle.dumps(Trap(tmp_path / "executed"))), dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="not signed with the secret of the run: give all ranks the same"):
        distributed_c10d._tensor_to_object(forged, len(forged), None)
    assert not (tmp_path / "executed").exists()
