"""Find by running it what a model's forward does around its decoder layers.

A probe runs the forward with random tensors for whatever layers and the modules around them give. Two probes that
differ in one of these tensors, or in the token ids, tell what depends on it: a layer's arguments, or what comes after
the last layer. A tensor that matters to a later layer than the next is a state that must travel (`carry.py`).
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from harness.errors import UserError
from harness.hf.forward.layer_inputs import LayerInputs, same
from harness.hf.forward.payload import CarriedTensor, PayloadSpec, Tokens, hidden_name
from harness.hf.forward.placeholders import ForwardRun
from harness.parallel.draws import DrawnShapes
from harness.parallel.generators import own_generators
from harness.wording import counted

if TYPE_CHECKING:
    from harness.hf.forward.outer_forward import OuterForward

BATCH, SEQUENCE = 2, 8
# what a forward raises that asks of a stand-in what it cannot give
CANNOT_RUN = (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True, kw_only=True)
class ForwardAnalysis:
    """What was found: which modules are called before the first layer, which are called at all, and what travels."""

    prologue: frozenset[str]
    called: frozenset[str]
    schema: PayloadSpec


class ForwardProbe(ForwardRun):
    """A run on random tensors that notes what comes where.

    Attributes:
        drawn: the random tensors, but for `changed` ones; they are drawn once for all probes.
        sources: name of each random tensor -> index of the layer that gives it, -1: a module before the first layer.
        calls: what each layer is given: hidden state and arguments.
        outputs: the hidden state that each layer gives.
        tail: what the modules after the last layer are given, and the logits.
        phases: name of a module -> how many layers had been reached when it was called.
    """

    def __init__(
        self, outer: OuterForward, drawn: dict[str, Tensor], changed: Collection[str] = (), seed: int = 0
    ) -> None:
        super().__init__(self._at_layer, torch.float32)
        self.outer = outer
        self.drawn = drawn
        self.changed = frozenset(changed)
        self.sources: dict[str, int] = {}
        self.calls: list[tuple[Tensor, LayerInputs]] = []
        self.outputs: list[Tensor] = []
        self.tail: list[Any] = []
        self.phases: defaultdict[str, set[int]] = defaultdict(set)
        ids = torch.randint(0, 8, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(seed))
        with torch.no_grad(), own_generators(0, outer.device), DrawnShapes() as seen:
            self.tail.append(outer.run(Tokens(ids.to(outer.device)), self))
        outer.draws |= bool(seen.shapes)

    def stand_in(self, module: str, like: Tensor, arguments: Any) -> Tensor:
        reached = len(self.calls)
        self.phases[module].add(reached)
        name = self.next_name(module)
        if reached == len(self.outer.layers):
            self.tail.append(arguments)
            return self._random(name, like)
        return self._source(name, -1, like)

    def _at_layer(self, index: int, call: LayerInputs, hidden: Tensor) -> Tensor:
        if index != len(self.calls):
            raise UserError(
                f"{self.outer.described} does not call each of its layers once and in order, "
                "so it cannot be split into stages"
            )
        self.calls.append((hidden, call.mapped(lambda tensor: tensor)))
        self.outputs.append(self._source(hidden_name(index), index, hidden))
        further = self.outer.outline(index, call, hidden).tensors
        self.given = {name: self._source(name, index, like) for name, like in further.items()}
        return self.outputs[-1]

    def _source(self, name: str, made: int, like: Tensor) -> Tensor:
        self.sources[name] = made
        return self._random(name, like)

    def _random(self, name: str, like: Tensor) -> Tensor:
        if name in self.changed:
            return self._draw(zlib.crc32(name.encode()) + 1, like)
        known = self.drawn.get(name)
        if known is None or known.shape != like.shape or known.dtype != like.dtype:
            known = self.drawn[name] = self._draw(zlib.crc32(name.encode()), like)
        return known.clone()  # a forward may write to what a module gave

    def _draw(self, seed: int, like: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        if like.is_floating_point():
            value = torch.randn(like.shape, generator=generator, dtype=torch.float32).to(like.dtype)
        else:
            value = torch.randint(0, 2, like.shape, generator=generator).to(like.dtype)
        return value.to(self.outer.device)

    def passes_on(self, index: int) -> bool:
        """Whether layer `index` is given the very hidden state that the layer before it gave."""
        return index == 0 or same(self.calls[index][0], self.outputs[index - 1])


def analyze(outer: OuterForward) -> ForwardAnalysis:
    """Find the modules before the first layer, and what travels; UserError if the model cannot be cut."""
    try:
        drawn: dict[str, Tensor] = {}
        base = ForwardProbe(outer, drawn)
        prologue = _prologue(outer, base)
        other_ids = ForwardProbe(outer, drawn, seed=1)
    except CANNOT_RUN as error:
        raise UserError(
            f"{outer.described}: its forward does not run with its layers replaced by stubs "
            f"({type(error).__name__}: {' '.join(str(error).split())[:120]}), so it cannot be split into stages"
        ) from error
    depth = len(outer.layers)
    # the last hidden state is what the epilogue is there for
    last_use = _influence(outer, base, [name for name in base.sources if name != hidden_name(depth - 1)])
    states = tuple(state for name, made in base.sources.items() if (state := _state(name, made, last_use)) is not None)
    mended = any(not base.passes_on(index) for index in range(depth))
    replayed = mended or bool(states)
    # from a hidden state that begins otherwise than [batch, sequence] no layer could tell the shape of the ids
    shapes_differ = any(hidden.shape[:2] != (BATCH, SEQUENCE) for hidden, _ in base.calls)
    tokens = replayed or shapes_differ or _last_change(base, other_ids) >= 0
    return ForwardAnalysis(
        prologue=prologue,
        called=frozenset(base.phases),
        schema=PayloadSpec(states=states, tokens=tokens, replayed=replayed),
    )


def _prologue(outer: OuterForward, base: ForwardProbe) -> frozenset[str]:
    depth = len(outer.layers)
    if len(base.calls) != depth:
        raise UserError(
            f"{outer.described} calls {len(base.calls) or 'none'} of the {counted(depth, 'layer')} in {outer.stack} "
            "when its input is token ids only, so it cannot be split into stages"
        )
    for name, phases in base.phases.items():
        if len(phases) > 1 or not phases <= {0, depth}:
            raise UserError(
                f"{outer.described} calls {name}, not a layer, between its layers, so it cannot be split into stages"
            )
    return frozenset(name for name, phases in base.phases.items() if phases == {0})


def _state(name: str, made: int, last_use: dict[str, int]) -> CarriedTensor | None:
    used = last_use.get(name, -1)
    if name == hidden_name(made):  # to the next layer it goes as the hidden state
        made += 1
    return CarriedTensor(name=name, made=made, used=used) if used > made else None


def _influence(outer: OuterForward, base: ForwardProbe, sources: Sequence[str]) -> dict[str, int]:
    """Source -> index of the last layer that it matters to; the number of layers: what comes after them."""
    if not sources:
        return {}
    last = _last_change(base, ForwardProbe(outer, base.drawn, changed=sources))
    if last < 0:
        return {}
    if len(sources) == 1:
        return {sources[0]: last}
    half = len(sources) // 2
    return _influence(outer, base, sources[:half]) | _influence(outer, base, sources[half:])


def _last_change(base: ForwardProbe, other: ForwardProbe) -> int:
    """Index of the last layer whose arguments differ, or its hidden state if it is not just passed on; -1: none."""
    depth = len(base.calls)
    if not same(base.tail, other.tail):
        return depth
    for index in reversed(range(depth)):
        (hidden, call), (other_hidden, other_call) = base.calls[index], other.calls[index]
        if not call.equals(other_call) or not (base.passes_on(index) or same(hidden, other_hidden)):
            return index
    return -1
