"""Analyse what a model's forward does around its decoder layers, by running it.

A probe runs the forward with random tensors as the outputs of all layers and of the modules around them. Two probes
that differ in one of these tensors, or in the token ids, show which layers' inputs depend on it, and whether the
operations after the last layer do. If a layer after the next one depends on a tensor, that is a state, which must be
passed on (`payload.py`).
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from traceback import walk_tb

import torch
from torch import Tensor

from harness.errors import UserError, text_of
from harness.hf.forward.payload import CarriedTensor, PayloadSpec, Tokens, hidden_name
from harness.hf.forward.placeholders import ForwardRun, PlaceholderForward
from harness.hf.layers.call import Call, LayerInputs, same
from harness.hf.layers.dry_run import CANNOT_RUN
from harness.parallel.dropout import ShapeRecorder
from harness.parallel.generators import own_generators
from harness.wording import counted

BATCH, SEQUENCE = 2, 8
NOT_THE_MODELS = ("harness", "torch", "contextlib")


@dataclass(frozen=True, kw_only=True)
class ForwardAnalysis:
    """The results of the analysis of a forward.

    Attributes:
        prologue: names of the modules that are called before the first layer.
        called: names of all modules outside the layers that are called.
        schema: the tensors that are passed on besides the hidden state.
        uses_rng: whether random numbers were drawn.
    """

    prologue: frozenset[str]
    called: frozenset[str]
    schema: PayloadSpec
    uses_rng: bool


class ForwardProbe(ForwardRun):
    """A run on random tensors that records the arguments of every layer.

    Attributes:
        random: the random tensors, except the ones in `changed`; drawn once for all probes.
        sources: name of each random tensor -> index of the layer that returns it; -1 before the first layer.
        calls: the arguments of each layer: hidden state and inputs.
        outputs: the hidden state that each layer returns.
        tail: the arguments of the modules after the last layer, and the logits.
        phases: name of a module -> numbers of layers that had been reached at its calls.
    """

    def __init__(
        self, forward: PlaceholderForward, random: dict[str, Tensor], changed: Collection[str] = (), seed: int = 0
    ) -> None:
        super().__init__(self._at_layer, torch.float32)
        self.forward = forward
        self.random = random
        self.changed = frozenset(changed)
        self.sources: dict[str, int] = {}
        self.calls: list[tuple[Tensor, LayerInputs]] = []
        self.outputs: list[Tensor] = []
        self.tail: list[object] = []
        self.phases: defaultdict[str, set[int]] = defaultdict(set)
        # Ids below 8 are in every vocabulary.
        ids = torch.randint(0, 8, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(seed))
        # The same draws in every probe, or a jitter would look like a dependence.
        with torch.no_grad(), own_generators(0, forward.device):
            self.tail.append(forward.run(Tokens(ids.to(forward.device)), self))

    def module_output(self, module: str, like: Tensor, arguments: Call) -> Tensor:
        """Return a random tensor of the shape of `like`; record how many layers have been reached."""
        reached = len(self.calls)
        self.phases[module].add(reached)
        name = self.next_name(module)
        if reached == len(self.forward.layers):
            self.tail.append(arguments)
            return self._random(name, like)
        return self._source(name, -1, like)

    def passes_on(self, index: int) -> bool:
        """Return whether layer `index` receives exactly the hidden state that the previous layer returned."""
        return index == 0 or same(self.calls[index][0], self.outputs[index - 1])

    def _at_layer(self, index: int, inputs: LayerInputs, hidden: Tensor) -> Tensor:
        if index != len(self.calls):
            raise UserError(
                f"{self.forward.described} does not call each of its layers once and in order, "
                "so it cannot be split into stages"
            )
        # A copy, as layers write to mappings.
        self.calls.append((hidden, inputs.mapped(lambda tensor: tensor)))
        self.outputs.append(self._source(hidden_name(index), index, hidden))
        further = self.forward.facts.observe(index, inputs, hidden).tensors
        self.known = {name: self._source(name, index, like) for name, like in further.items()}
        return self.outputs[-1]

    def _source(self, name: str, made: int, like: Tensor) -> Tensor:
        self.sources[name] = made
        return self._random(name, like)

    def _random(self, name: str, like: Tensor) -> Tensor:
        # Not `hash`, which differs between processes: all ranks must find the same payload.
        if name in self.changed:
            return self._draw(zlib.crc32(name.encode()) + 1, like)
        tensor = self.random.get(name)
        if tensor is None or tensor.shape != like.shape or tensor.dtype != like.dtype:
            tensor = self.random[name] = self._draw(zlib.crc32(name.encode()), like)
        # A forward may write in place to a module's output.
        return tensor.clone()

    def _draw(self, seed: int, like: Tensor) -> Tensor:
        # On the CPU, whose generator gives the same numbers for every device.
        generator = torch.Generator().manual_seed(seed)
        if like.is_floating_point():
            value = torch.randn(like.shape, generator=generator, dtype=torch.float32).to(like.dtype)
        else:
            value = torch.randint(0, 2, like.shape, generator=generator).to(like.dtype)
        return value.to(self.forward.device)


def analyze(forward: PlaceholderForward) -> ForwardAnalysis:
    """Find the modules before the first layer and the tensors that layers pass on.

    Raises UserError if the model cannot be cut.
    """
    with ShapeRecorder() as drawn:
        try:
            base = ForwardProbe(forward, {})
            prologue = _prologue(forward, base)
            other_ids = ForwardProbe(forward, base.random, seed=1)
        except CANNOT_RUN as error:
            raise UserError(
                f"{forward.described}: {_failed_in(error)} does not run with placeholders for the model's modules "
                f"({type(error).__name__}: {text_of(error, 120)}), so it cannot be split into stages"
            ) from error
        last_use = _last_uses(forward, base)
    states = tuple(state for name, made in base.sources.items() if (state := _state(name, made, last_use)) is not None)
    replayed = bool(states) or any(not base.passes_on(index) for index in range(len(base.calls)))
    # Masks need the shape of the ids, which a hidden state that does not begin with [batch, sequence] does not show.
    shapes_differ = any(hidden.shape[:2] != (BATCH, SEQUENCE) for hidden, _ in base.calls)
    tokens = replayed or shapes_differ or _last_change(base, other_ids) >= 0
    return ForwardAnalysis(
        prologue=prologue,
        called=frozenset(base.phases),
        schema=PayloadSpec(states=states, tokens=tokens, replayed=replayed),
        uses_rng=bool(drawn.shapes),
    )


def _failed_in(error: BaseException) -> str:
    """Return the qualified name of the innermost function in an error's traceback that is the model's own code."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    own = [frame for frame in frames if frame.f_globals.get("__name__", "").partition(".")[0] not in NOT_THE_MODELS]
    return own[-1].f_code.co_qualname.partition(".<locals>")[0] if own else "its forward"


def _prologue(forward: PlaceholderForward, base: ForwardProbe) -> frozenset[str]:
    depth = len(forward.layers)
    if len(base.calls) != depth:
        raise UserError(
            f"{forward.described} calls {len(base.calls) or 'none'} of the {counted(depth, 'layer')} in "
            f"{forward.stack} when its input is token ids only, so it cannot be split into stages"
        )
    for name, phases in base.phases.items():
        if len(phases) > 1 or not phases <= {0, depth}:
            raise UserError(
                f"{forward.described} calls {name}, not a layer, between its layers, so it cannot be split into stages"
            )
    return frozenset(name for name, phases in base.phases.items() if phases == {0})


def _state(name: str, made: int, last_use: dict[str, int]) -> CarriedTensor | None:
    used = last_use.get(name, -1)
    # The next layer receives it as its hidden state.
    if name == hidden_name(made):
        made += 1
    return CarriedTensor(name=name, made=made, used=used) if used > made else None


def _last_uses(forward: PlaceholderForward, base: ForwardProbe) -> dict[str, int]:
    """Return source -> index of the last layer that depends on it; the number of layers means the epilogue."""

    def search(sources: Sequence[str]) -> dict[str, int]:
        """Change all sources at once, then bisect: most models depend on none, so a few probes suffice."""
        last = _last_change(base, ForwardProbe(forward, base.random, changed=sources)) if sources else -1
        if last < 0:
            return {}
        if len(sources) == 1:
            return {sources[0]: last}
        half = len(sources) // 2
        return search(sources[:half]) | search(sources[half:])

    # Except the last hidden state, which the epilogue reads in every model.
    return search([name for name in base.sources if name != hidden_name(len(base.calls) - 1)])


def _last_change(base: ForwardProbe, other: ForwardProbe) -> int:
    """Return the index of the last layer whose arguments differ between two probes.

    The previous layer's hidden state does not count as an argument. Returns the number of layers if the epilogue's
    arguments or the logits differ, and -1 if nothing differs.
    """
    if not same(base.tail, other.tail):
        return len(base.calls)
    for index in reversed(range(len(base.calls))):
        hidden, inputs = base.calls[index]
        other_hidden, other_inputs = other.calls[index]
        if not inputs.equals(other_inputs) or not (base.passes_on(index) or same(hidden, other_hidden)):
            return index
    return -1
