"""How DeepSpeed reads and writes a checkpoint's files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pickle import UnpicklingError

from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address


def stage_named(kind: object, name: str) -> ZeroStageEnum:
    """Return a ZeRO stage as Python before 3.11.4 pickles it, by `getattr(ZeroStageEnum, name)`; nothing else."""
    if kind is not ZeroStageEnum or name not in kind.__members__:
        raise UnpicklingError(f"getattr of {name!r} is not a ZeRO stage")
    return kind[name]


STORED_CLASSES = [
    fragment_address,
    LossScaler,
    DynamicLossScaler,
    ZeroStageEnum,
    (stage_named, "__builtin__.getattr"),
    (stage_named, "builtins.getattr"),
]
"""What DeepSpeed stores besides tensors and plain values; none of them does anything when it is made."""

RECOVERY_SCRIPTS = ("zero_to_fp32.py", "zero_to_torch.py")
"""Files that DeepSpeed writes beside the model on every save."""


def is_universal(engine: DeepSpeedEngine) -> bool:
    """Whether `engine` loads universal checkpoints, whose files `reading_with` does not reach."""
    return bool(engine.load_universal_checkpoint())


@contextmanager
def reading_with(engine: DeepSpeedEngine, read: Callable[..., object]) -> Iterator[None]:
    """Have `engine` read the files of a checkpoint by `read(path, map_location=...)` meanwhile."""
    reader = engine.checkpoint_engine
    reader.load = read
    try:
        yield
    finally:
        del reader.load  # the class's own again
