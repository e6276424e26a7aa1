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
    """Return the engine made by `build`, which replaces DeepSpeed's engine class; all ranks call it.

    Args:
        options: the arguments of `deepspeed.initialize`.
    """
    if zero_stage != 3:
        # An earlier ZeRO-3 engine in this process may have replaced torch.nn.functional.linear without restoring it.
        restore_linear()
    # Everything that is replaced inside DeepSpeed, only while it builds an engine:
    with replacing(
        # `deepspeed.initialize` hard-codes the engine classes, and the engines hard-code their optimizer classes.
        (deepspeed, "PipelineEngine", build),
        (deepspeed, "DeepSpeedEngine", build),
        (engine_module, "DeepSpeedZeroOptimizer", DividedOptimizer),
        (stage3, "DeepSpeedZeroOptimizer_Stage3", Stage3Optimizer),
        # ZeRO-3's constructor flattens all parameters into one tensor of one dtype, but some may be kept in float32.
        (stage3, "defragment", by_dtype(stage3.defragment)),
    ):
        engine, *_ = deepspeed.initialize(**options)
    return engine


@contextmanager
def replacing(*changes: tuple[object, str, object]) -> Iterator[None]:
    """In this context, replace attributes of modules; each change is (module, name, value)."""
    with ExitStack() as stack:
        for module, name, value in changes:
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, value)
        yield
