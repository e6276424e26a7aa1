"""The model's own forward, divided at its decoder layers into the parts before, between and after them.

An `OuterForward` holds a HuggingFace causal decoder on the meta device. By running the model's own forward with
placeholders it finds, without a table of families:

- the prologue: the modules called before the first decoder layer (embeddings, their scaling or norm);
- the inputs of each layer besides the hidden state (masks, positions, rotary tables). Every stage makes its own,
  mostly from shape, dtype and device alone, so that only the hidden state is sent. Some need the token ids, which are
  then sent too, or the position ids of the data;
- the states: tensors that a layer receives from an embedding or from a layer other than the previous one. They are
  sent, and the forward between the layers runs again with them;
- the epilogue: the modules called after the last layer (norm, head, scaling).

The real modules live in the pipeline layers (`harness/hf/decoder.py`), and in the model only while it runs them. If
they form a chain (`chains.py`), the pipeline layers call them directly.

Inputs of layers are cached: masks and rotary tables are the same for every micro-batch of a shape. If they depend on
token or position ids, they are kept for one micro-batch: for its forward and its recomputation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from harness.hf.forward.analysis import analyze
from harness.hf.forward.chains import Chains, find_chains
from harness.hf.forward.payload import ForwardOutput, PayloadSpec, StagePayload, Tokens, hidden_name
from harness.hf.forward.placeholders import ForwardRun, PlaceholderForward, ReachedLayer, call_name, keep_hidden
from harness.hf.layers.call import LayerInputs, LayerOutput
from harness.parallel.dropout import has_dropout, rng_of_layer, separate_rng

# Few, as each holds masks, and batches may come in many lengths.
KEPT_SHAPES = 4
# The micro-batch of the current forward pass, and the one that the current backward pass recomputes.
KEPT_BATCHES = 2

Make = Callable[[Tokens, torch.dtype], list[LayerInputs]]
"""Maps token ids and the dtype of hidden states to the inputs of all layers."""


@dataclass(frozen=True)
class HiddenShape:
    """Batch, sequence length and dtype of a hidden state."""

    batch: int
    sequence: int
    dtype: torch.dtype

    @classmethod
    def of(cls, hidden: Tensor, tokens: Tokens | None) -> HiddenShape:
        """Take the sizes from the ids [batch, sequence] if passed on, else from `hidden` [batch, tokens, width]."""
        rows = hidden.shape if tokens is None else tokens.ids.shape
        return cls(rows[0], rows[1], hidden.dtype)

    def tokens(self, device: torch.device) -> Tokens:
        return Tokens(torch.zeros((self.batch, self.sequence), dtype=torch.long, device=device))


class InputsByShape(dict[HiddenShape, list[LayerInputs]]):
    """The inputs of all layers by micro-batch shape; `make` is called for each new shape."""

    # A dict, so that a layer finds those of a known shape without a call.
    def __init__(self, make: Make, device: torch.device) -> None:
        super().__init__()
        self._make = make
        self._device = device

    def __missing__(self, shape: HiddenShape) -> list[LayerInputs]:
        while len(self) >= KEPT_SHAPES:
            self.pop(next(iter(self)))
        self[shape] = self._make(shape.tokens(self._device), shape.dtype)
        return self[shape]


class LayerInputCache:
    """A cache of the inputs of all layers, filled by `make` on demand.

    Attributes:
        of_shape: shape of the hidden states -> the inputs.
    """

    def __init__(self, make: Make, device: torch.device) -> None:
        self._make = make
        self.of_shape = InputsByShape(make, device)
        self._by_batch: list[tuple[Tokens, torch.dtype, list[LayerInputs]]] = []

    def of_batch(self, tokens: Tokens, dtype: torch.dtype) -> list[LayerInputs]:
        """Return the inputs for one micro-batch."""
        for known, known_dtype, inputs in self._by_batch:
            if known_dtype == dtype and _share_memory(known, tokens):
                return inputs
        # Keeping the tokens with the inputs prevents their memory from being reused for other tokens.
        self._by_batch = self._by_batch[1 - KEPT_BATCHES :]
        self._by_batch.append((tokens, dtype, self._make(tokens, dtype)))
        return self._by_batch[-1][2]


def _share_memory(known: Tokens, tokens: Tokens) -> bool:
    """Return whether both are the same tensors or views of the same memory, as made by activation checkpointing."""
    return len(known.tensors()) == len(tokens.tensors()) and all(
        a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()
        for a, b in zip(known.tensors(), tokens.tensors(), strict=True)
    )


class OuterForward(PlaceholderForward):
    """A decoder's own forward, divided into prologue, layers and epilogue.

    Args:
        model: the causal language model on the meta device; it is taken over and changed.
        device: where the inputs of the layers are made.
        buffers: name -> values of buffers outside the layers that differ from the model's own.

    Attributes:
        prologue, epilogue: name -> module with parameters that runs before and after the layers.
        schema: the tensors passed on besides the hidden state.
        chains: the modules of prologue and epilogue, if these are just called one after the other.
        inputs: the inputs of the layers besides the hidden state.
        uses_rng: whether training draws random numbers (dropout, jitter), as far as runs of its parts show.

    Raises:
        UserError: the model has no single stack of decoder layers that are called one after the other, or a module
            above or between the layers holds parameters: such a model cannot be cut into stages.
    """

    def __init__(
        self, model: PreTrainedModel, device: torch.device, buffers: Mapping[str, Tensor] = MappingProxyType({})
    ) -> None:
        # Before the layers are removed from the model.
        drops = has_dropout(model)
        super().__init__(model, device, buffers)
        self.inputs = LayerInputCache(self.make_inputs, device)
        analysis = analyze(self)
        self.schema: PayloadSpec = analysis.schema
        self.uses_rng = drops or analysis.uses_rng
        # States are recorded in a run of the forward, so that the prologue may not skip it.
        self.chains = Chains() if self.schema.replayed else find_chains(self)
        owners = self.owners
        # A module that the forward never calls goes to the epilogue, unless it is tied to the prologue, where alone its
        # parameters get a gradient.
        first = {parameter for name in analysis.prologue for parameter in owners[name].parameters()}
        tied = {name for name in set(owners) - analysis.called if not first.isdisjoint(owners[name].parameters())}
        self.prologue = {name: m for name, m in owners.items() if name in analysis.prologue | tied}
        self.epilogue = {name: m for name, m in owners.items() if name not in self.prologue}

    def enter(self, tokens: Tokens, modules: dict[str, nn.Module], training: bool) -> StagePayload:
        """Run the prologue with its real `modules`; return the payload for the first layer."""

        def stop(_index: int, inputs: LayerInputs, hidden: Tensor) -> Tensor:
            raise ReachedLayer(hidden, inputs)

        self._switch_mode(training)
        with self.real(modules), _recorded(modules if self.schema.replayed else {}) as outputs:
            reached = self.run_to_layer(tokens, ForwardRun(stop, torch.float32))
        return StagePayload(hidden=reached.hidden, states=outputs)

    def arguments(self, index: int, payload: StagePayload) -> tuple[Tensor, LayerInputs]:
        """Return the arguments of layer `index`: its hidden state [batch, tokens, width], and the other inputs."""
        hidden = payload.hidden
        tokens = payload.tokens
        # Made at every call, so that states get gradients.
        if self.schema.replayed:
            return self._replay(index, payload)
        # Inputs that depend on token or position ids are made once per micro-batch, all others once per shape.
        if tokens is not None and (self.schema.tokens or tokens.positions is not None):
            return hidden, self.inputs.of_batch(tokens, hidden.dtype)[index]
        return hidden, self.inputs.of_shape[HiddenShape.of(hidden, tokens)][index]

    def after(self, index: int, inputs: LayerInputs, output: LayerOutput, payload: StagePayload) -> StagePayload:
        """Return the payload after layer `index`, which returned `output` for `inputs` and `payload`."""
        hidden = output[0] if isinstance(output, (tuple, list)) else output
        if not self.schema.replayed:
            return replace(payload, hidden=hidden)
        further = self.facts.output_specs[index].take(inputs, output)
        states = {**payload.states, hidden_name(index - 1): payload.hidden, **further}
        return replace(payload, hidden=hidden, states=states)

    def leave(
        self, payload: StagePayload, modules: dict[str, nn.Module], training: bool, **options: object
    ) -> ForwardOutput:
        """Run the epilogue with its real `modules` on the last hidden state; return the model's output with `.logits`.

        Args:
            options: further arguments of the forward, such as `output_router_logits`.
        """
        # Ids that were not passed on decide nothing here but shapes, so zeros do.
        tokens = payload.tokens or HiddenShape.of(payload.hidden, None).tokens(self.device)
        self._switch_mode(training)
        with self.real(modules):
            return self.forward(tokens, self._replaying(payload, len(self.layers)), **options)

    @torch.no_grad()
    def finish(self, head: str, output: Tensor, **options: object) -> ForwardOutput:
        """Return the model's output as if its module `head` had returned `output` [batch, sequence, vocabulary]."""
        tokens = HiddenShape.of(output, None).tokens(self.device)
        with self.real({head: _Constant(output)}):
            return self.forward(tokens, ForwardRun(keep_hidden, output.dtype), **options)

    def _replay(self, index: int, payload: StagePayload) -> tuple[Tensor, LayerInputs]:
        """Run the forward again up to layer `index`, without the layers; return that layer's arguments."""
        if payload.tokens is None:
            raise RuntimeError("the token ids were not passed on with the hidden state")
        # As in `enter`, so that dropout before the layers has the same mask.
        with rng_of_layer(0):
            reached = self.run_to_layer(payload.tokens, self._replaying(payload, index))
        return reached.hidden, reached.inputs

    def _replaying(self, payload: StagePayload, stop: int) -> ForwardRun:
        """Return a run in which every layer before `stop` returns its passed-on states."""
        known = {**payload.states, hidden_name(stop - 1): payload.hidden}
        # A forward may write in place to a module's output, and this one runs once for every layer.
        if self.schema.replayed:
            known = {name: value.clone() for name, value in known.items()}

        def handler(index: int, inputs: LayerInputs, hidden: Tensor) -> Tensor:
            if index == stop:
                raise ReachedLayer(hidden if index else payload.hidden, inputs)
            return known.get(hidden_name(index), hidden)

        return ForwardRun(handler, payload.hidden.dtype, known)

    @torch.no_grad()
    def make_inputs(self, tokens: Tokens, dtype: torch.dtype) -> list[LayerInputs]:
        """Make the inputs of all layers for these ids and hidden states of this dtype."""
        made: list[LayerInputs] = []

        def keep(_index: int, inputs: LayerInputs, hidden: Tensor) -> Tensor:
            made.append(inputs)
            if len(made) == len(self.layers):
                raise ReachedLayer(hidden, inputs)
            return hidden

        # A recomputed layer finds these inputs cached, so a draw here would shift the numbers of its first run only.
        with separate_rng(0, self.device):
            self.run_to_layer(tokens, ForwardRun(keep, dtype))
        return made

    def _switch_mode(self, training: bool) -> None:
        # `train` visits every module, in each micro-batch.
        if self.model.training != training:
            self.model.train(training)


@contextmanager
def _recorded(modules: dict[str, nn.Module]) -> Iterator[dict[str, Tensor]]:
    """Record, within this context, name -> output of each call of the prologue's modules."""
    outputs: dict[str, Tensor] = {}

    def record(name: str, _module: nn.Module, _inputs: object, output: Tensor) -> None:
        number = 0
        while call_name(name, number) in outputs:
            number += 1
        # The forward may write to the original.
        outputs[call_name(name, number)] = output.clone()

    handles = [module.register_forward_hook(partial(record, name)) for name, module in modules.items()]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


class _Constant(nn.Module):
    """A module that returns the same tensor for any input."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        # A forward may read the dtype of its head's weight.
        self.value = self.weight = value

    def forward(self, *_args: object, **_kwargs: object) -> Tensor:
        return self.value
