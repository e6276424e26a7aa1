"""Build an engine of the harness's own class with `deepspeed.initialize`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import deepspeed
from deepspeed.runtime import engine as engine_module
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero import stage3

from harness.deepspeed.kept_in_fp32 import by_dtype
from harness.deepspeed.update import DividedOptimizer, Stage3Optimizer
from harness.deepspeed.zero3_parameters import restore_linear


def initialize(build: Callable[..., DeepSpeedEngine], *, zero_stage: int, **options: object) -> DeepSpeedEngine:
    """Return the engine that `build`, called in place of DeepSpeed's engine class, makes; all ranks call it.

    Args:
        options: the arguments of `deepspeed.initialize`.
    """
    if zero_stage != 3:
        # An earlier ZeRO-3 engine in this process has replaced torch.nn.functional.linear, and does not put it back.
        restore_linear()
    # All that is replaced inside DeepSpeed while it builds an engine, and only then:
    with replacing(
        # `deepspeed.initialize` names the classes of its engines, and so do the engines those of their optimizers.
        (deepspeed, "PipelineEngine", build),
        (deepspeed, "DeepSpeedEngine", build),
        (engine_module, "DeepSpeedZeroOptimizer", DividedOptimizer),
        (stage3, "DeepSpeedZeroOptimizer_Stage3", Stage3Optimizer),
        # ZeRO-3's constructor joins all parameters in one flat tensor of one dtype; some may be kept in float32.
        (stage3, "defragment", by_dtype(stage3.defragment)),
    ):
        engine, *_ = deepspeed.initialize(**options)
    return engine


@contextmanager
def replacing(*changes: tuple[object, str, object]) -> Iterator[None]:
    """Give attributes of modules other values in this context: (module, name, value) each."""
    with ExitStack() as stack:
        for module, name, value in changes:
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, value)
        yield
