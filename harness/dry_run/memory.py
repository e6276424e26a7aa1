"""Sort the bytes that a rank holds in a step by their purpose."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor

from harness.deepspeed.flat_tensors import EngineOptimizer
from harness.deepspeed.no_peers import gradients_of
from harness.deepspeed.optimizer_states import torch_optimizer
from harness.deepspeed.zero3_parameters import held_tensor
from harness.dry_run.ledger import Ledger

OF_FORWARD = ("RecvActivation", "LoadMicroBatch", "ForwardPass", "SendActivation")
BACKWARD = ("BackwardPass", "InputGradients", "LastBackward")
"""When the first of these begins, all activations of a micro-batch are in memory."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes that a rank holds, by dtype where several are possible.

    Attributes:
        optimizer: the optimizer's states, and the copies of parameters that it updates.
        activations: those of one micro-batch that are kept for its backward pass.
        in_flight: number of micro-batches whose activations are kept at once; a fraction if a stage has several model
            chunks, as these differ in size.
        buffers: everything else that outlasts a step: masks, rotary tables, DeepSpeed's flat tensors.
        peak: the most at any moment of a step, without `host`.
        host: bytes in the host's memory: offloaded states, and hidden states that wait for recomputation.
    """

    parameters: dict[str, int]
    gradients: dict[str, int]
    optimizer: dict[str, int]
    activations: int
    in_flight: float
    buffers: int
    peak: int
    host: int = 0


@dataclass
class Step:
    """Takes notes on a step while it runs, in a dry run or in a real one.

    Attributes:
        gradients: bytes of gradients by dtype, when they were largest.
        kept: bytes that the forward passes of the last step have left in memory, by model chunk.
    """

    ledger: Ledger
    engine: DeepSpeedEngine
    gradients: dict[str, int] = field(default_factory=dict)
    kept: Counter[int] = field(default_factory=Counter)
    _part: int | None = None
    _before: int = 0

    @property
    def parameters(self) -> list[Tensor]:
        """The model's parameters on this rank."""
        return list(self.engine.module.parameters())

    def begin_at(self, instruction: str, place: Mapping[str, int]) -> None:
        """Begin an instruction of a schedule with several model chunks."""
        self.begin(instruction)
        self._part = place["chunk"] if instruction in OF_FORWARD else None
        self._before = self.ledger.live

    def end(self) -> None:
        """End an instruction, and note the bytes that it has left in memory."""
        if self._part is not None:
            self.kept[self._part] += self.ledger.live - self._before

    def begin(self, phase: str) -> None:
        """Begin a phase of the step."""
        if phase.startswith(BACKWARD):
            gc.collect()  # recomputation leaves tensors in reference cycles, which would count as live
        if phase in ("ReduceGrads", "OptimizerStep", "LastStep"):
            now = by_dtype(gradients_of(self.engine, self.parameters))
            self.gradients = max(now, self.gradients, key=lambda sizes: sum(sizes.values()))
        self.ledger.begin(phase)

    def memory(self, in_flight: float) -> Memory:
        """Return the bytes of the step that has ended.

        Args:
            in_flight: number of micro-batches whose activations the schedule keeps at once. The step here has run with
                one of them; the others are added.
        """
        marks = self.ledger.marks
        activations = next((live for phase, live in marks.items() if phase in BACKWARD), 0) - marks["step"]
        parameters = by_dtype(held_tensor(parameter) for parameter in self.parameters)
        optimizer = by_dtype(held_by_optimizer(self.engine.optimizer, self.parameters))
        lasting = by_dtype(gradients_of(self.engine, self.parameters))
        known = sum(sum(sizes.values()) for sizes in (parameters, optimizer, lasting))
        return Memory(
            parameters=parameters,
            gradients=self.gradients,
            optimizer=optimizer,
            activations=activations,
            in_flight=in_flight,
            buffers=max(0, marks["step"] - known),
            peak=round(self.ledger.peak + (in_flight - 1) * activations),
        )


def by_dtype(tensors: Iterable[Tensor]) -> dict[str, int]:
    """Return the bytes of tensors by dtype, as `float32`."""
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        sizes[str(tensor.dtype).removeprefix("torch.")] += tensor.nbytes
    return dict(sizes)


def held_by_optimizer(optimizer: EngineOptimizer, parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors that an engine's optimizer holds after its first step, besides `parameters`.

    These are its states, and the tensors that it updates instead of parameters, such as float32 copies.
    """
    inner = torch_optimizer(optimizer)
    of_model = {id(parameter) for parameter in parameters}
    updated = [tensor for tensor in inner.state if id(tensor) not in of_model]
    states = (value for state in inner.state.values() for value in state.values() if isinstance(value, Tensor))
    return [*updated, *states]
