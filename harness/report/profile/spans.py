"""Log the spans of a profiled step: when instructions of the engine and layers of the model begin and end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ParamSpec, TypeVar

from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from harness.deepspeed.pipeline import GivenStages
from harness.deepspeed.schedule import Observer, Operands, ScheduledEngine
from harness.device.moments import Moment
from harness.parallel.pipeline.staged_module import LayerSequence
from harness.report.profile.clocks import Clock
from harness.report.profile.record import Span

OF_MICRO_BATCHES = ("forward", "recompute", "backward", "send", "receive", "data")
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
"""Kind of work of each instruction of a pipeline."""


@dataclass(slots=True)
class _Doing:
    """Something that began at `start`; `number` is its micro-batch, or how many of its kind and layer came before."""

    kind: str
    name: str
    layer: int | None
    chunk: int | None
    number: int
    start: Moment


@dataclass
class SpanLog:
    """A log of spans that do not overlap: a span that begins within another interrupts it and splits it in two.

    Attributes:
        inner: the log of finer spans (layers within instructions); those end when a span here begins or ends.
    """

    clock: Clock
    inner: SpanLog | None = None
    _noted: list[tuple[_Doing, Moment]] = field(default_factory=list)
    _open: list[_Doing] = field(default_factory=list)
    _counts: Counter[tuple[str, int | None]] = field(default_factory=Counter)

    @property
    def kind(self) -> str:
        """Kind of the span that is open now; empty if none is."""
        return self._open[-1].kind if self._open else ""

    def begin(
        self,
        kind: str,
        name: str,
        layer: int | None = None,
        *,
        chunk: int | None = None,
        micro_batch: int | None = None,
    ) -> None:
        """Begin a span, and interrupt the one that is open.

        Without `micro_batch`, spans of the same name and layer are numbered in their order: DeepSpeed's own schedule
        passes no micro-batch numbers, but executes micro-batches in order.
        """
        self._end_inner()
        now = self.clock.now()
        thing = (name, layer) if layer is None else (kind, layer)
        if self._open:
            self._noted.append((self._open[-1], now))
        number = self._counts[thing] if micro_batch is None else micro_batch
        self._open.append(_Doing(kind, name, layer, chunk, number, now))
        self._counts[thing] += 1

    def end(self) -> None:
        """End the span that began last, and resume the one that it interrupted."""
        self._end_inner()
        if self._open:
            now = self.clock.now()
            self._noted.append((self._open.pop(), now))
            if self._open:
                self._open[-1] = replace(self._open[-1], start=now)

    def end_all(self) -> None:
        """End all open spans."""
        while self._open:
            self.end()

    def _end_inner(self) -> None:
        if self.inner is not None:
            self.inner.end_all()

    def spans(self, origin: float) -> list[Span]:
        """Return the spans in seconds since `origin`, without those that took no time."""
        return [
            Span(
                kind=doing.kind,
                name=doing.name,
                start=self.clock.seconds(doing.start) - origin,
                end=self.clock.seconds(end) - origin,
                micro_batch=doing.number if doing.kind in OF_MICRO_BATCHES else None,
                layer=doing.layer,
                chunk=doing.chunk,
            )
            for doing, end in self._noted
            if self.clock.seconds(end) > self.clock.seconds(doing.start)
        ]


def log_instructions(engine: DeepSpeedEngine, log: SpanLog, before_update: Callable[[], object]) -> ExitStack:
    """Log what an engine does until the returned stack is closed; call `before_update` before the optimizer's step."""
    stack = ExitStack()
    if isinstance(engine, ScheduledEngine):
        begin = partial(_begin_instruction, log, before_update)
        stack.callback(engine.observe(Observer(begin=begin, end=lambda _name, _place: log.end())))
        return stack
    # a forward ends only when the backward begins, so the loss, computed between the two, counts as forward
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


def _begin_instruction(log: SpanLog, before_update: Callable[[], object], name: str, place: Operands) -> None:
    kind = KINDS.get(name, "other")
    if kind == "step":
        before_update()
    log.begin(kind, name, chunk=place.get("chunk"), micro_batch=place.get("micro_batch"))


def _logged(log: SpanLog, kind: str, name: str, method: Callable[P, R]) -> Callable[P, R]:
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        log.begin(kind, name)
        result = method(*args, **kwargs)
        log.end()
        return result

    return run


def layers_of(module: nn.Module) -> Iterator[tuple[int, nn.Module]]:
    """Yield the layers of a stage or of the whole model, with their indices: only modules, and each module once."""
    if isinstance(module, GivenStages):
        calls = module.indexed_layers()
    else:
        assert isinstance(module, LayerSequence)
        calls = list(enumerate(module.calls))
    first = {call: index for index, call in reversed(calls) if isinstance(call, nn.Module)}
    yield from ((index, call) for call, index in first.items())


def log_layers(module: nn.Module, names: Sequence[str], log: SpanLog, instructions: SpanLog) -> ExitStack:
    """Log the forward and backward of each layer, until the returned stack is closed.

    The backward of a layer begins when the gradient of its output is computed, and ends when that of another layer's
    output is: hooks on tensors, because a full backward hook would change what a module returns. A forward within a
    backward pass is a recomputation by activation checkpointing.
    """
    stack = ExitStack()
    for index, layer in layers_of(module):
        before = partial(_before, log, instructions, names[index], index)
        after = partial(_after, log, names[index], index)
        stack.callback(layer.register_forward_pre_hook(before, prepend=True).remove)
        # always_call: torch stops a recomputation by an exception as soon as it has all the tensors that it needs
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
