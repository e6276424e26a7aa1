"""What one pipeline layer passes to the next: the hidden state, and whatever else later layers need.

Most decoders pass on a bare hidden state. Some need more: token ids or position ids that their layers' arguments are
made from, tensors that an earlier module gave and a later one reads, sums that the loss reads. Then layers pass on a
flat tuple, `(hidden, *states, ids[, positions])`. Which states lie at which boundary is the same for every
micro-batch, so their names never travel.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias

from torch import Tensor, nn

from harness.hf.layers.call import LayerOutput
from harness.parallel.values import Value

ForwardOutput: TypeAlias = Any
"""What a causal model's forward returns: an object with `logits`, and perhaps `loss` and `aux_loss`."""
"""What layers pass on: a bare hidden state or a tuple."""


@dataclass(frozen=True)
class Tokens:
    """What a batch is made of, both [batch, sequence]: token ids, and position ids where the data gives them."""

    ids: Tensor
    positions: Tensor | None = None

    @classmethod
    def of(cls, inputs: Value) -> Tokens:
        """Read the first layer's input: ids, or (ids, position ids)."""
        return cls(inputs) if isinstance(inputs, Tensor) else cls(*inputs)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return both, as they stand at the end of a tuple."""
        return (self.ids,) if self.positions is None else (self.ids, self.positions)


@dataclass(frozen=True, kw_only=True)
class StagePayload:
    """What reaches a layer.

    Attributes:
        hidden: the output of the layer before.
        states: name -> what else is passed on. Those that need a gradient have one.
        tokens: present if anything but the hidden state is passed on.
    """

    hidden: Tensor
    states: Mapping[str, Tensor] = field(default_factory=dict)
    tokens: Tokens | None = None

    def with_state(self, name: str, value: Tensor) -> StagePayload:
        """Return the same with one state added or changed."""
        return replace(self, states={**self.states, name: value})


@dataclass(frozen=True, kw_only=True)
class CarriedTensor:
    """A tensor that is passed on; boundary i lies before layer i, the last one before the epilogue.

    Attributes:
        name: its name.
        made: index of the layer that gives it first; -1: the prologue.
        used: index of the last layer that reads it; the number of layers: the epilogue.
    """

    name: str
    made: int
    used: int


@dataclass(frozen=True, kw_only=True)
class PayloadSpec:
    """What is passed on at each boundary of a model.

    Attributes:
        states: in the order in which they stand in a tuple.
        tokens: whether the layers' arguments depend on the token ids.
        replayed: whether they depend on what modules or layers gave, so that the forward between the layers is run
            again for each layer with what travelled.
    """

    states: tuple[CarriedTensor, ...] = ()
    tokens: bool = False
    replayed: bool = False

    @property
    def bare(self) -> bool:
        """Whether nothing but the hidden state travels, unless the data carries position ids."""
        return not self.states and not self.tokens

    def names(self, boundary: int) -> list[str]:
        """Return the names of the states that are passed on at a boundary."""
        return [state.name for state in self.states if state.made < boundary <= state.used]

    def open(self, boundary: int, value: Value) -> StagePayload:
        """Read what was passed on at a boundary."""
        if isinstance(value, Tensor):
            return StagePayload(hidden=value)
        names = self.names(boundary)
        hidden, *rest = value
        tokens = Tokens(*rest[len(names) :]) if len(rest) > len(names) else None
        return StagePayload(hidden=hidden, states=dict(zip(names, rest, strict=False)), tokens=tokens)

    def close(self, boundary: int, payload: StagePayload) -> Value:
        """Return what is passed on at a boundary."""
        # a new tensor object for each: activation checkpointing may empty those that it was given
        states = [payload.states[name].view_as(payload.states[name]) for name in self.names(boundary)]
        tokens = () if payload.tokens is None else payload.tokens.tensors()
        return (payload.hidden, *states, *tokens) if states or tokens else payload.hidden

    def with_state(self, state: CarriedTensor) -> PayloadSpec:
        """Return the same with one more state."""
        return replace(self, states=(*self.states, state))


def hidden_name(index: int) -> str:
    """Return the name of the hidden state that layer `index` gives, where it travels further than to the next layer."""
    return f"hidden:{index}"


class LayerCapture(Protocol):
    """Takes something out of layers as they run, for the end of the forward.

    Attributes:
        name: of what is taken.
        layers: indices of the layers that it is taken from.
    """

    @property
    def name(self) -> str: ...

    @property
    def layers(self) -> Collection[int]: ...

    def run(self, layer: nn.Module, call: Callable[[], LayerOutput]) -> tuple[LayerOutput, Tensor]:
        """Call `call`, which runs `layer`; return what it returned, and what was taken.

        It may run twice for one micro-batch (activation checkpointing), and must give the same both times.
        """

    def finish(
        self, model: nn.Module, taken: Sequence[Tensor], forward: Callable[..., ForwardOutput]
    ) -> tuple[Tensor, ...]:
        """Return the logits, and what is made of all that was taken, layer by layer.

        `forward`, given further arguments, ends the forward of `model`.
        """


def captured_name(capture: LayerCapture, index: int) -> str:
    """Return the name of the state that is taken out of layer `index`."""
    return f"{capture.name}:{index}"
