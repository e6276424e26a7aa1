"""The tensors that one pipeline layer passes to the next: the hidden state and others that later layers need.

Most decoders pass on only a hidden state. Some need more: token ids or position ids, from which layer arguments are
made; tensors that one layer computes and a later one reads; router logits for the loss. Then layers pass on a flat
tuple, `(hidden, *states, ids[, positions])`. The same states cross a boundary for every micro-batch, so their names are
never sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from torch import Tensor

from harness.parallel.values import Value

ForwardOutput: TypeAlias = Any
"""The output of a causal model's forward: an object with `logits`, and perhaps `loss` and `aux_loss`."""


@dataclass(frozen=True)
class Tokens:
    """Token ids of a micro-batch, and position ids if the data has them; both [batch, sequence].

    `is_packed` says whether position ids may restart within a row.
    """

    ids: Tensor
    positions: Tensor | None = None
    is_packed: bool = field(default=True, kw_only=True)

    @classmethod
    def of(cls, inputs: Value) -> Tokens:
        """Read the first layer's input: ids, or (ids, position ids)."""
        return cls(inputs) if isinstance(inputs, Tensor) else cls(*inputs)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return ids and position ids, both [batch, sequence], in their order at the end of the tuple."""
        return (self.ids,) if self.positions is None else (self.ids, self.positions)


@dataclass(frozen=True, kw_only=True)
class StagePayload:
    """The tensors that reach a layer.

    Attributes:
        hidden: the hidden state from the previous layer, [batch, sequence, width].
        states: name -> tensor of an earlier layer, with its gradient.
        tokens: present if more than the hidden state is passed on.
    """

    hidden: Tensor
    states: Mapping[str, Tensor] = field(default_factory=dict)
    tokens: Tokens | None = None

    def with_state(self, name: str, value: Tensor) -> StagePayload:
        return replace(self, states={**self.states, name: value})


@dataclass(frozen=True, kw_only=True)
class CarriedTensor:
    """A tensor that crosses boundaries between layers. Boundary i is before layer i, the last before the epilogue.

    Attributes:
        made: index of the layer that computes it; -1 for the prologue.
        used: index of the last layer that reads it; the number of layers for the epilogue.
    """

    name: str
    made: int
    used: int


@dataclass(frozen=True, kw_only=True)
class PayloadSpec:
    """The tensors that cross the boundaries between a model's layers.

    Attributes:
        states: all states, in tuple order.
        tokens: whether the arguments of layers depend on the token ids.
        replayed: whether they depend on outputs of modules or layers. Then each layer runs the forward up to it again,
            with the states in place of the real layers' outputs.
    """

    states: tuple[CarriedTensor, ...] = ()
    tokens: bool = False
    replayed: bool = False

    @property
    def bare(self) -> bool:
        """Whether only the hidden state is passed on, unless the data has position ids."""
        return not self.states and not self.tokens

    def names(self, boundary: int) -> list[str]:
        return [state.name for state in self.states if state.made < boundary <= state.used]

    def open(self, boundary: int, value: Value) -> StagePayload:
        """Unpack the value that has crossed a boundary into a payload."""
        if isinstance(value, Tensor):
            return StagePayload(hidden=value)
        names = self.names(boundary)
        hidden, *rest = value
        # Ids and positions come last.
        tokens = Tokens(*rest[len(names) :]) if len(rest) > len(names) else None
        return StagePayload(hidden=hidden, states=dict(zip(names, rest, strict=False)), tokens=tokens)

    def close(self, boundary: int, payload: StagePayload) -> Value:
        """Pack a payload for a boundary: the hidden state alone, or the tuple."""
        # A new tensor object for each state, because activation checkpointing may empty its input tensors.
        states = [payload.states[name].view_as(payload.states[name]) for name in self.names(boundary)]
        tokens = () if payload.tokens is None else payload.tokens.tensors()
        return (payload.hidden, *states, *tokens) if states or tokens else payload.hidden


def hidden_name(index: int) -> str:
    """Return the name of layer `index`'s hidden state if a layer after the next one reads it too."""
    return f"hidden:{index}"
