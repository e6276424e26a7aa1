"""Measure a step for `--profile`: when instructions and layers begin and end, and what is in memory.

Ranks of several hosts first measure how far their clocks differ.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ParamSpec, TypeVar

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from harness.deepspeed.engine import gradients_of
from harness.deepspeed.pipeline import GivenStages
from harness.deepspeed.schedule import Observer, Operands, ScheduledEngine
from harness.deepspeed.zero3_parameters import held_tensor
from harness.device.memory import EarlierPeaks, host_bytes, peak_bytes, reset_peak
from harness.device.moments import Moment, moment, seconds_between
from harness.device.process_group import shared_store
from harness.parallel.memory import malloc_trim
from harness.parallel.pipeline.staged_module import LayerSequence
from harness.report.profile.record import Span
from harness.topology.agreement import all_gather_on_host, gather_object
from harness.topology.hosts import host_id

# How far each host's clock is ahead of rank 0's. All processes of a host share one clock (CLOCK_MONOTONIC, which
# `time.perf_counter` reads), so only the first rank of every other host asks rank 0 for its time. It takes the answer
# with the shortest round trip: its error is at most half of that.
ROUND_TRIPS = 9


@dataclass(frozen=True)
class Offset:
    """How many seconds a clock is ahead of rank 0's, and the largest error of that in seconds."""

    seconds: float = 0.0
    error: float = 0.0


def offset_to_first() -> Offset:
    """Return how far this process's clock is ahead of rank 0's; all ranks must call it."""
    rank, found = dist.get_rank(), Offset()
    here = all_gather_on_host(host_id(), rank)
    leader = min(here.values)
    leaders = dict.fromkeys(gather_object(leader))
    if here.hosts > 1:
        store = dist.PrefixStore("clocks", shared_store())
        if rank == 0:
            answer(store, list(leaders)[1:], time.perf_counter)
        elif rank == leader:
            found = ask(store, rank, time.perf_counter)
    return all_gather_on_host(host_id(), found).values[leader]


def answer(store: dist.Store, ranks: Sequence[int], now: Callable[[], float]) -> None:
    """Answer each rank's requests for the time, `ROUND_TRIPS` of them."""
    for rank in ranks:
        for trip in range(ROUND_TRIPS):
            store.wait([f"{rank}/{trip}"])
            store.delete_key(f"{rank}/{trip}")  # so that a later call waits for its own
            store.set(f"{rank}/{trip}/time", repr(now()))


def ask(store: dist.Store, rank: int, now: Callable[[], float]) -> Offset:
    """Return how far the clock `now` is ahead of the clock that answers."""
    trips = []
    for trip in range(ROUND_TRIPS):
        sent = now()
        store.set(f"{rank}/{trip}", "")
        theirs = float(store.get(f"{rank}/{trip}/time"))
        received = now()
        store.delete_key(f"{rank}/{trip}/time")
        trips.append((received - sent, (sent + received) / 2 - theirs))
    seconds, ahead = min(trips)
    return Offset(ahead, seconds / 2)


OF_MICRO_BATCHES = ("forward", "recompute", "backward", "send", "receive", "data")


@dataclass
class Clock:
    """Takes times on a device, on the scale of this process's `time.perf_counter`, without waiting during a step."""

    device: torch.device
    _base: tuple[float, Moment] = (0.0, 0.0)

    def start(self) -> None:
        """Begin a step; waits for the device."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        self._base = time.perf_counter(), self.now()

    def now(self) -> Moment:
        """Return this moment (on an accelerator an event in its stream), to be handed to `seconds` later."""
        return moment(self.device)

    def seconds(self, at: Moment) -> float:
        """Return a moment in seconds of `time.perf_counter`; waits for the device to reach it."""
        begun, base = self._base
        return at if isinstance(at, float) else begun + seconds_between(base, at)


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
        now, thing = self.clock.now(), (name, layer) if layer is None else (kind, layer)
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


DEPTH = 4  # levels of nested lists and dictionaries that are searched for an optimizer's tensors


@dataclass
class StepMemory:
    """Measures the memory of one step: what is held before it, the gradients, and the peak.

    On a CPU it measures the process's resident set, on an accelerator the bytes that torch's allocator has given out.
    """

    engine: DeepSpeedEngine
    device: torch.device
    earlier_peaks: EarlierPeaks
    _before: int = 0
    _held: dict[str, int] = field(default_factory=dict)
    _gradients: int = 0

    def begin(self) -> None:
        """Begin a step; free pages go back to the system first, so that the resident set holds only what is in use."""
        malloc_trim()
        self._held = held_bytes(self.engine, self.device)
        reset_peak(self.device, self.earlier_peaks)
        self._before = host_bytes() if self.device.type == "cpu" else torch.accelerator.memory_allocated(self.device)

    def note_gradients(self) -> None:
        """Measure the gradients; to be called when they are complete."""
        self._gradients = max(self._gradients, held_bytes(self.engine, self.device)["gradients"])

    def end(self) -> dict[str, int]:
        """Return the parts of the peak in bytes, which add up to `peak`."""
        found = {**self._held, "gradients": max(self._gradients, self._held["gradients"])}
        after = held_bytes(self.engine, self.device)
        found["optimizer"] = after["optimizer"]  # before the first step there were no states
        known = sum(self._held.values())
        made = sum(found.values()) - known
        peak = max(peak_bytes(self.device), self._before)
        found["other"] = max(0, self._before - known)
        found["activations"] = max(0, peak - max(self._before, known) - made)
        return {**found, "peak": sum(found.values())}


def held_bytes(engine: DeepSpeedEngine, device: torch.device) -> dict[str, int]:
    """Return the bytes of parameters, gradients and optimizer state on the device; shared storages count once."""
    seen: set[int] = set()

    def size(tensors: Iterator[Tensor]) -> int:
        total = 0
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if tensor.device.type == device.type and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                total += storage.nbytes()
        return total

    module, optimizer = engine.module, engine.optimizer
    whole = (*module.parameters(), *module.buffers())  # ZeRO-3 keeps small parameters whole, besides their parts
    parameters = size(tensor for one in whole for tensor in (held_tensor(one), one))
    gradients = size(gradient for parameter in module.parameters() for gradient in gradients_of(parameter))
    gradients += size(tensor for is_gradient, tensor in _tensors(optimizer) if is_gradient)
    rest = size(tensor for is_gradient, tensor in _tensors(optimizer) if not is_gradient)
    return {"parameters": parameters, "gradients": gradients, "optimizer": rest}


def _tensors(value: object, is_gradient: bool = False, depth: int = 0) -> Iterator[tuple[bool, Tensor]]:
    """Yield the tensors that an optimizer holds, each with whether the name of its attribute says gradient."""
    if isinstance(value, Tensor):
        yield is_gradient, value
        if value.grad is not None:
            yield True, value.grad
        return
    if depth > DEPTH:
        return
    if depth == 0 or isinstance(value, Optimizer):
        value = vars(value)
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _tensors(item, is_gradient or _names_gradients(name), depth + 1)
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from _tensors(item, is_gradient, depth + 1)


def _names_gradients(name: object) -> bool:
    """Return whether a key names gradients ("ipg" in DeepSpeed's buckets); a key that is a tensor does not."""
    return isinstance(name, str) and ("grad" in name or "ipg" in name)
