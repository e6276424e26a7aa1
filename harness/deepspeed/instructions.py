"""Replace or wrap the functions that execute a pipeline's instructions: the only place that changes DeepSpeed's map.

An engine executes a list of instructions (`ForwardPass`, `SendActivation`, `ReduceGrads`, ...) and looks up the
function for each in a map of its class. Every change here makes a new map for that one engine, so that other engines of
the process keep DeepSpeed's. A later change wraps the result of an earlier one, so the order of changes matters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeAlias

from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.schedule import ForwardPass, PipeInstruction

InstructionType: TypeAlias = type[PipeInstruction]
Execute: TypeAlias = Callable[..., None]
"""Called with the engine and the instruction's `buffer_id`, `micro_batch` and the like by name."""


def executing(engine: PipelineEngine, kind: InstructionType) -> Execute:
    """Return the function that executes an instruction now."""
    execute: Execute = engine._INSTRUCTION_MAP[kind]
    return execute


def execute_by(engine: PipelineEngine, changed: Mapping[InstructionType, Execute]) -> Callable[[], None]:
    """Have these functions execute their instructions; return a function that undoes the change."""
    before = engine._INSTRUCTION_MAP
    engine._INSTRUCTION_MAP = {**before, **changed}
    return partial(setattr, engine, "_INSTRUCTION_MAP", before)


def run_before(engine: PipelineEngine, kind: InstructionType, act: Callable[[], object]) -> None:
    """Have `act` called before each instruction of one kind."""
    execute = executing(engine, kind)

    def run(self: PipelineEngine, **arguments: int) -> None:
        act()
        execute(self, **arguments)

    execute_by(engine, {kind: run})


def tell_labels(engine: PipelineEngine, tell: Callable[..., None]) -> None:
    """Have `tell` called with the labels of a micro-batch before its forward pass on this stage, and None after it."""
    forward = executing(engine, ForwardPass)

    def run(self: PipelineEngine, buffer_id: int, **arguments: int) -> None:
        labels = self.pipe_buffers["labels"]
        tell(labels[buffer_id] if self.is_last_stage() and buffer_id < len(labels) else None)
        forward(self, buffer_id=buffer_id, **arguments)
        tell(None)

    execute_by(engine, {ForwardPass: run})


def watch_instructions(
    engine: PipelineEngine, begin: Callable[[str, Mapping[str, int]], None], finished: Callable[[], None] = lambda: None
) -> Callable[[], None]:
    """Have `begin` called before each instruction, with its name and its arguments, and `finished` after it.

    The arguments are a `buffer_id`, and in a schedule that is not DeepSpeed's own also a `micro_batch` and a `chunk`.
    Return a function that undoes this.
    """

    def announced(name: str, execute: Execute) -> Execute:
        def run(self: PipelineEngine, **arguments: int) -> None:
            begin(name, arguments)
            execute(self, **arguments)
            finished()

        return run

    # a copy: `execute_by` replaces the map, and each function must call the one that was there before
    kinds = dict(engine._INSTRUCTION_MAP)
    return execute_by(engine, {kind: announced(kind.__name__, execute) for kind, execute in kinds.items()})


def announce_instructions(
    engine: PipelineEngine, announce: Callable[[str], None], finished: Callable[[], None] = lambda: None
) -> Callable[[], None]:
    """Have `announce` called before each instruction, with text such as `RecvGrad(0)`, and `finished` after it.

    Return a function that undoes this.
    """

    def begin(name: str, arguments: Mapping[str, int]) -> None:
        announce(f"{name}({arguments['buffer_id']})" if "buffer_id" in arguments else name)

    return watch_instructions(engine, begin, finished)
