"""What shows a log when instructions and layers begin and end, for as long as a step is profiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import ParamSpec, TypeVar

from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from harness.deepspeed.instructions import watch_instructions
from harness.deepspeed.pipeline import GivenStages
from harness.parallel.pipeline.staged_module import LayerSequence
from harness.report.profiling.span_log import SpanLog

P = ParamSpec("P")
R = TypeVar("R")

KINDS = {
    "ForwardPass": "forward",
    "BackwardPass": "backward",
    "InputGradients": "backward",
    "WeightGradients": "backward",
    "SendActivation": "send",
    "SendGrad": "send",
    "AwaitSends": "send",
    "RecvActivation": "receive",
    "RecvGrad": "receive",
    "ReduceGrads": "reduce",
    "ReduceTiedGrads": "reduce",
    "OptimizerStep": "step",
    "LoadMicroBatch": "data",
}
"""Kind of work of each instruction of the pipeline."""


def log_instructions(engine: DeepSpeedEngine, log: SpanLog, before_update: Callable[[], object]) -> ExitStack:
    """Log what an engine does in a step, until the returned stack is closed; `before_update` is called before the
    optimizer's step."""
    stack = ExitStack()
    if isinstance(engine, PipelineEngine):
        begin = partial(_begin_instruction, log, before_update)
        stack.callback(watch_instructions(engine, begin, log.end))
        return stack
    # the loss, which lies between forward and backward, counts as forward
    hook = engine.module.register_forward_pre_hook(lambda *_: log.begin("forward", "Forward"))
    stack.callback(hook.remove)

    def backward(*args: object, **kwargs: object) -> object:
        log.end_all()
        return _logged(log, "backward", "Backward", of_engine["backward"])(*args, **kwargs)

    def step(*args: object, **kwargs: object) -> object:
        if not engine.is_gradient_accumulation_boundary():
            return of_engine["step"](*args, **kwargs)
        before_update()
        return _logged(log, "step", "OptimizerStep", of_engine["step"])(*args, **kwargs)

    reduce = _logged(log, "reduce", "ReduceGrads", engine.allreduce_gradients)
    own = {"backward": backward, "step": step, "allreduce_gradients": reduce}
    of_engine = {name: getattr(engine, name) for name in own}
    for name, method in own.items():
        setattr(engine, name, method)
        stack.callback(delattr, engine, name)
    return stack


def _begin_instruction(log: SpanLog, before_update: Callable[[], object], name: str, place: Mapping[str, int]) -> None:
    kind = KINDS.get(name, "other")
    if kind == "step":
        before_update()
    log.begin(kind, name, part=place.get("chunk"), micro_batch=place.get("micro_batch"))


def _logged(log: SpanLog, kind: str, name: str, method: Callable[P, R]) -> Callable[P, R]:
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        log.begin(kind, name)
        result = method(*args, **kwargs)
        log.end()
        return result

    return run


def layers_of(module: nn.Module) -> Iterator[tuple[int, nn.Module]]:
    """Yield the layers of a stage, or of the whole model, that are modules, with their indices; each module once."""
    if isinstance(module, GivenStages):
        calls = module.indexed_layers()
    else:
        assert isinstance(module, LayerSequence)
        calls = list(enumerate(module.calls))
    first = {call: index for index, call in reversed(calls) if isinstance(call, nn.Module)}
    yield from ((index, call) for call, index in first.items())


def log_layers(module: nn.Module, names: Sequence[str], log: SpanLog, instructions: SpanLog) -> ExitStack:
    """Log the forward and backward of each layer, until the returned stack is closed.

    A backward begins when the gradient of the layer's output is there, and ends when that of another layer's is. A
    forward within a backward pass is one that activation checkpointing runs again.
    """
    stack = ExitStack()
    for index, layer in layers_of(module):
        before = partial(_before, log, instructions, names[index], index)
        after = partial(_after, log, names[index], index)
        stack.callback(layer.register_forward_pre_hook(before, prepend=True).remove)
        # always: recomputation may stop a layer half-way, by an exception
        stack.callback(layer.register_forward_hook(after, always_call=True).remove)
    return stack


def _before(log: SpanLog, instructions: SpanLog, name: str, index: int, _layer: nn.Module, _inputs: object) -> None:
    if instructions.kind in ("forward", "backward"):
        log.begin("forward" if instructions.kind == "forward" else "recompute", name, index)


def _after(log: SpanLog, name: str, index: int, _layer: nn.Module, _inputs: object, output: object) -> None:
    if log.kind not in ("forward", "recompute"):
        return
    log.end()
    for tensor in tree_leaves(output):
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(partial(_begin_backward, log, name, index))
            return


def _begin_backward(log: SpanLog, name: str, index: int, _gradient: Tensor) -> None:
    log.end_all()
    log.begin("backward", name, index)
