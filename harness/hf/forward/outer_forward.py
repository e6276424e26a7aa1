"""The model's own forward, with its decoder layers lifted out.

A `OuterForward` holds a HuggingFace causal decoder on the meta device and finds, by running the model's own forward
with stand-ins, what no table of families could say for all of them:

- the prologue: the modules called before the first decoder layer (embeddings, their scaling or norm);
- the notes: what each layer is given besides the hidden state (masks, positions, rotary tables). Every stage makes
  its own: mostly from shape, dtype and device alone, so that nothing but the hidden state crosses; else from the
  token ids, which then travel with it, and from position ids where the data gives them;
- the states: what a layer is given that an embedding or an earlier layer gave. It travels, and the forward between
  the layers is run again with it in its place;
- the epilogue: the modules called after the last layer (norm, head, scaling).

In the frame every decoder layer is a stub and every other module with parameters a stand-in that gives zeros of the
right shape; the real modules live in the pipeline layers (`decoder.py`) and are put in their place only there.
"""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from harness.errors import UserError
from harness.hf.forward.analysis import analyze
from harness.hf.forward.dry_run import META, drawn_shapes
from harness.hf.forward.input_cache import HiddenShape, LayerInputCache
from harness.hf.forward.layer_inputs import LayerInputs
from harness.hf.forward.layer_outputs import LayerOutputSpec, kind_of, outline_of
from harness.hf.forward.layer_stack import find_stack, has_own_parameters, parameter_owners, put
from harness.hf.forward.payload import PayloadSpec, StagePayload, Tokens, hidden_name
from harness.hf.forward.placeholders import ForwardRun, PlaceholderLayer, PlaceholderModule, ReachedLayer, call_name
from harness.hf.forward.zero3_leaves import leaves_of
from harness.parallel.draws import draws_apart, draws_of_layer, has_dropout
from harness.parallel.plans.lora import without_adapters


class OuterForward:
    """A decoder's own forward with stubs for layers.

    Args:
        model: the causal language model on the meta device; it is taken over and changed.
        device: where the notes are made.
        buffers: values, by name, of the buffers outside the layers, where they are not what the model computes anew.

    Attributes:
        stack: the name of the list of the model's decoder layers, e.g. `model.layers`.
        layers: the model's decoder layers, in order, on the meta device.
        layer_names: their names in the model, e.g. `model.layers.0`.
        prologue, epilogue: name -> module of everything with parameters that stands before and after them.
        schema: what travels besides the hidden state.
        draws: whether random numbers are drawn in training (dropout, jitter), as far as runs of its parts show.

    Raises:
        UserError: the model has no single stack of decoder layers that are called one after the other, or a module
            above or between the layers holds parameters: such a model cannot be cut into stages.
    """

    def __init__(
        self, model: PreTrainedModel, device: torch.device, buffers: Mapping[str, Tensor] = MappingProxyType({})
    ) -> None:
        self.model = model
        self.device = device
        self.config = model.config
        self._run: ForwardRun | None = None
        self._outlines: dict[int, LayerOutputSpec] = {}
        self._kinds: dict[Hashable, LayerOutputSpec] = {}
        self._examples: dict[Hashable, tuple[LayerInputs, Tensor]] = {}
        self._leaves: dict[Hashable, frozenset[str]] = {}
        self._notes = LayerInputCache(self._take_notes, device)
        self._drawn: dict[Hashable, list[torch.Size]] = {}
        self.draws = has_dropout(model)
        self.stack = stack = find_stack(model)
        self.layers: list[nn.Module] = list(model.get_submodule(stack).children())
        self.layer_names = [f"{stack}.{index}" for index in range(len(self.layers))]
        owners = parameter_owners(model, stack)
        self._revive_buffers(stack, buffers)
        put(model, stack, nn.ModuleList(PlaceholderLayer(layer, i, self) for i, layer in enumerate(self.layers)))
        self._stand_ins = {
            name: PlaceholderModule(without_adapters(module), name, self) for name, module in owners.items()
        }
        for name, stand_in in self._stand_ins.items():
            put(model, name, stand_in)
        findings = analyze(self)
        self.schema: PayloadSpec = findings.schema
        # what is never called stands last; beside the first layer if it is tied there, where alone it has a gradient
        first = {parameter for name in findings.prologue for parameter in owners[name].parameters()}
        tied = {name for name in set(owners) - findings.called if not first.isdisjoint(owners[name].parameters())}
        self.prologue = {name: m for name, m in owners.items() if name in findings.prologue | tied}
        self.epilogue = {name: m for name, m in owners.items() if name not in self.prologue}

    @property
    def described(self) -> str:
        """The model as a message names it."""
        return f"model type {self.config.model_type!r}"

    def _revive_buffers(self, stack: str, values: Mapping[str, Tensor]) -> None:
        """Give the modules outside the layers that own buffers but no parameters (rotary tables) real buffers."""
        for name, module in self.model.named_modules():
            inside = name == stack or name.startswith(stack + ".")
            if inside or has_own_parameters(module) or not any(True for _ in module.buffers(recurse=False)):
                continue
            module.to_empty(device=self.device, recurse=False)
            with torch.no_grad():
                self._model_around(name)._init_weights(module)
                for key, buffer in module.named_buffers(name, recurse=False):
                    if key in values and values[key].dtype == buffer.dtype:  # a half-precision copy has lost digits
                        buffer.copy_(values[key])

    def _model_around(self, name: str) -> PreTrainedModel:
        """The innermost model that a module belongs to: its `_init_weights` may ask for its own attributes."""
        parts = name.split(".") if name else []
        around = (self.model.get_submodule(".".join(parts[:n])) for n in range(len(parts), -1, -1))
        return next(module for module in around if isinstance(module, PreTrainedModel))

    # -- what the pipeline layers ask for ------------------------------------------------------------------

    def enter(self, tokens: Tokens, modules: dict[str, nn.Module], training: bool) -> StagePayload:
        """What the model's forward gives its first layer, by the real prologue `modules`."""

        def stop(index: int, call: LayerInputs, hidden: Tensor) -> Tensor:
            raise ReachedLayer(hidden, call)

        self._switch_mode(training)
        with self._standing(modules), _recorded(modules if self.schema.replayed else {}) as given:
            reached = self._run_until_reached(tokens, ForwardRun(stop, torch.float32))
        return StagePayload(hidden=reached.hidden, states=given)

    def arguments(self, index: int, carry: StagePayload) -> tuple[Tensor, LayerInputs]:
        """What layer `index` is given: a hidden state, and the rest.

        The rest is made once for all hidden states of a shape and dtype; once a micro-batch where it depends on token
        or position ids; and at every call where it is made of states, so that they get their gradient.
        """
        hidden, tokens = carry.hidden, carry.tokens
        if self.schema.replayed:
            return self._replay(index, carry)
        if tokens is not None and (self.schema.tokens or tokens.positions is not None):
            return hidden, self._notes.of_batch(tokens, hidden.dtype)[index]
        return hidden, self._notes.of_shape(HiddenShape.of(hidden, tokens))[index]

    def drawn_shapes(self, index: int, call: LayerInputs, hidden: Tensor) -> list[torch.Size]:
        """The shapes of what layer `index`, uncut, draws when it is given this."""
        key = index, hidden.shape
        if key not in self._drawn:
            self._drawn[key] = drawn_shapes(self.layers[index], call, hidden)
        return self._drawn[key]

    def after(self, index: int, call: LayerInputs, output: Any, carry: StagePayload) -> StagePayload:
        """What layer `index` hands on, having returned `output` for `call` and `carry`."""
        hidden = output[0] if isinstance(output, (tuple, list)) else output
        if not self.schema.replayed:
            return replace(carry, hidden=hidden)
        further = self._outlines[index].take(call, output)
        states = {**carry.states, hidden_name(index - 1): carry.hidden, **further}
        return replace(carry, hidden=hidden, states=states)

    def leave(self, carry: StagePayload, modules: dict[str, nn.Module], training: bool, **options: Any) -> Any:
        """What the model's forward makes of the last hidden state, by the real epilogue `modules`: `.logits`, and
        what `options`, further arguments of the forward, ask for."""
        tokens = carry.tokens or HiddenShape.of(carry.hidden, None).tokens(self.device)
        self._switch_mode(training)
        with self._standing(modules):
            return self.forward(tokens, self._replayed(carry, len(self.layers)), **options)

    @torch.no_grad()
    def finish(self, head: str, output: Tensor, **options: Any) -> Any:
        """What the model's forward makes of the `output` of its module `head`, as in `leave`."""
        tokens = HiddenShape.of(output, None).tokens(self.device)
        with self._standing({head: _Constant(output)}):
            return self.forward(tokens, ForwardRun(lambda index, call, hidden: hidden, output.dtype), **options)

    # -- running the forward -------------------------------------------------------------------------------

    @property
    def takes_positions(self) -> bool:
        """Whether the model's forward takes position ids."""
        return "position_ids" in inspect.signature(self.model.forward).parameters

    def run(self, tokens: Tokens, run: ForwardRun) -> Tensor:
        """The logits of the model's forward, in which stubs and stand-ins do what `run` says."""
        return self.forward(tokens, run).logits

    def forward(self, tokens: Tokens, run: ForwardRun, **options: Any) -> Any:
        """The output of that forward, given `options` too."""
        positions = {} if tokens.positions is None else {"position_ids": tokens.positions}
        if positions and not self.takes_positions:
            raise UserError(f"{self.described} takes no position_ids: remove them from the samples")
        self._run = run
        try:
            return self.model(input_ids=tokens.ids, use_cache=False, **positions, **options)
        finally:
            self._run = None

    def at_layer(self, index: int, call: LayerInputs, hidden: Tensor) -> Any:
        """What the stub of layer `index` returns."""
        run = self._running()
        result = run.handler(index, call, hidden)
        outline = self.outline(index, call, hidden)
        outline.affect(call, run.given)
        return outline.output(result, run.given)

    def at_module(self, name: str, like: Tensor, arguments: Any) -> Tensor:
        """What the stand-in of a module returns."""
        return self._running().stand_in(name, like, arguments)

    def outline(self, index: int, call: LayerInputs, hidden: Tensor) -> LayerOutputSpec:
        """What layer `index` gives besides the hidden state; found at its first call."""
        if index not in self._outlines:
            layer, name = self.layers[index], self.layer_names[index]
            kind = kind_of(layer)  # once for all that are alike: one that looks at values takes a second
            if kind not in self._kinds:
                self._kinds[kind] = outline_of(name, layer, call, hidden)
                self._examples[kind] = call, hidden
            self._outlines[index] = self._kinds[kind].renamed(name)
        return self._outlines[index]

    def leaves(self, index: int) -> frozenset[str]:
        """Names, within layer `index`, of the modules that ZeRO-3 must gather as one."""
        layer = self.layers[index]
        kind = kind_of(layer)
        if kind not in self._leaves:
            call, hidden = self._examples[kind]
            call, hidden = call.mapped(lambda tensor: tensor.to(META)), hidden.to(META)
            self._leaves[kind] = leaves_of(layer, lambda watched: call.apply(watched, hidden))
        return self._leaves[kind]

    def _running(self) -> ForwardRun:
        if self._run is None:
            raise RuntimeError("a stub or stand-in was called outside a run of the frame")
        return self._run

    def _run_until_reached(self, tokens: Tokens, run: ForwardRun) -> ReachedLayer:
        try:
            self.run(tokens, run)
        except ReachedLayer as reached:
            return reached
        raise RuntimeError("the model's forward ended before its decoder layers were reached")

    def _replayed(self, carry: StagePayload, stop: int) -> ForwardRun:
        """A run in which all layers before `stop` give what travelled from them."""
        given = {**carry.states, hidden_name(stop - 1): carry.hidden}
        if self.schema.replayed:  # copies: a forward may write to what a module gave, and this one runs many times
            given = {name: value.clone() for name, value in given.items()}

        def handler(index: int, call: LayerInputs, hidden: Tensor) -> Tensor:
            if index == stop:
                raise ReachedLayer(hidden if index else carry.hidden, call)
            return given.get(hidden_name(index), hidden)

        return ForwardRun(handler, carry.hidden.dtype, given)

    def _replay(self, index: int, carry: StagePayload) -> tuple[Tensor, LayerInputs]:
        if carry.tokens is None:
            raise RuntimeError("the token ids have not travelled with the hidden state")
        with draws_of_layer(0):  # as in `enter`, so that dropout before the layers has the same mask
            reached = self._run_until_reached(carry.tokens, self._replayed(carry, index))
        return reached.hidden, reached.call

    @torch.no_grad()
    def _take_notes(self, tokens: Tokens, dtype: torch.dtype) -> list[LayerInputs]:
        calls: list[LayerInputs] = []

        def note(index: int, call: LayerInputs, hidden: Tensor) -> Tensor:
            calls.append(call)
            if len(calls) == len(self.layers):
                raise ReachedLayer(hidden, call)
            return hidden

        with draws_apart(0, self.device):  # a layer that runs again does not take its notes again
            self._run_until_reached(tokens, ForwardRun(note, dtype))
        return calls

    def _switch_mode(self, training: bool) -> None:
        if self.model.training != training:
            self.model.train(training)

    @contextmanager
    def _standing(self, modules: dict[str, nn.Module]) -> Iterator[None]:
        for name, module in modules.items():
            put(self.model, name, module)
        try:
            yield
        finally:
            for name in modules:
                put(self.model, name, self._stand_ins[name])


@contextmanager
def _recorded(modules: dict[str, nn.Module]) -> Iterator[dict[str, Tensor]]:
    """Name -> what a module of the prologue gives at each of its calls."""
    given: dict[str, Tensor] = {}

    def record(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        number = 0
        while call_name(name, number) in given:
            number += 1
        given[call_name(name, number)] = output.clone()  # as it was given: the forward may write to it

    handles = [module.register_forward_hook(partial(record, name)) for name, module in modules.items()]
    try:
        yield given
    finally:
        for handle in handles:
            handle.remove()


class _Constant(nn.Module):
    """Gives the same tensor whatever it is given."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = self.weight = value  # a forward may ask its head's weight for its dtype

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.value
