"""What a checkpoint's files may hold: tensors, plain values, and what DeepSpeed stores, as every Python pickles it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.config import ZeroStageEnum

from harness.checkpoint.safe_loading import read_values
from harness.errors import UserError


class Attribute:
    """Pickled as Python before 3.11.4 pickles a member of an enum: a call of getattr."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.owner, self.name)


def saved(path: Path, value: Any) -> Path:
    torch.save({"zero_stage": value, "step": torch.ones(2)}, path)
    return path


@pytest.mark.parametrize("stage", [ZeroStageEnum.weights, Attribute(ZeroStageEnum, "weights")], ids=["new", "old"])
def test_a_stage_is_read_as_every_python_writes_it(tmp_path: Path, stage: Any) -> None:
    read = read_values(saved(tmp_path / "states.pt", stage))
    assert read["zero_stage"] is ZeroStageEnum.weights and read["step"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    "value",
    [Attribute(ZeroStageEnum, "__class__"), Attribute(ZeroStageEnum, "mro"), Attribute(torch.Size, "__new__")],
    ids=["class", "method", "other"],
)
def test_getattr_of_anything_else_is_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(UserError, match="contains more than tensors and plain values"):
        read_values(saved(tmp_path / "states.pt", value))
