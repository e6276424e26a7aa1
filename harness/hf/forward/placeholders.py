"""Run a model's own forward with placeholders for its decoder layers.

Placeholders replace every decoder layer and every other module with parameters, so the forward runs on any machine,
without weights. The `ForwardRun` decides what each placeholder returns.

In the order of the file: finding the list of decoder layers, the placeholders, one run of the forward, and the
`PlaceholderForward`, which uses them all.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import PreTrainedModel

from harness.errors import UserError
from harness.hf.forward.payload import ForwardOutput, Tokens
from harness.hf.layers.call import Call, LayerInputs, LayerOutput
from harness.hf.layers.dry_run import ASKS_FOR_VALUES, CANNOT_RUN
from harness.hf.layers.facts import LayerFacts
from harness.hf.layers.wrappers import without_adapters, wrappers_in
from harness.parallel.context.masks import documents_apart, masks_by_rows
from harness.parallel.values import Argument, Keyword, Positional


def takes_positions(model: PreTrainedModel) -> bool:
    return "position_ids" in inspect.signature(model.forward).parameters


def find_stack(model: PreTrainedModel) -> str:
    """Return the name of the ModuleList that holds the decoder layers of a model on the meta device.

    The analysis of the forward checks that its layers are called one after the other (`analysis.py`). Raises UserError
    without a list.
    """
    depth = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
    sizes: dict[str, int] = {}
    for name, module in model.named_modules():
        # A list inside another list's layer, such as its experts, is a part of that layer.
        if isinstance(module, nn.ModuleList) and not any(name.startswith(f"{outer}.") for outer in sizes):
            size = sum(parameter.numel() for parameter in module.parameters())
            sizes |= {name: size} if size else {}
    if not sizes:
        raise UserError(
            f"model type {model.config.model_type!r} has no list of decoder layers, so it cannot be split into stages"
        )
    # Any list if none has as many layers as the config, since some configs count a layer twice.
    deep = [name for name in sizes if len(list(model.get_submodule(name).children())) == depth] or list(sizes)
    # For token ids alone a forward calls no encoder of images. If it fails on meta, the largest list is taken.
    called = _first_called(model, deep) if len(deep) > 1 else None
    return called or max(deep, key=lambda name: sizes[name])


class _Called(Exception):
    """Raised to end a forward that has reached a layer of the list `name`."""

    # Not a RuntimeError, which would count as a forward that cannot run (`CANNOT_RUN`).
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


@torch.no_grad()
def _first_called(model: PreTrainedModel, lists: Iterable[str]) -> str | None:
    """Return the name of the list whose layer is called first; None if the forward fails on meta before that."""

    def stop(name: str, *_: object) -> None:
        raise _Called(name)

    layers = [(name, layer) for name in lists for layer in model.get_submodule(name).children()]
    handles = [layer.register_forward_pre_hook(partial(stop, name)) for name, layer in layers]
    ids = torch.zeros(1, 8, dtype=torch.long, device="meta")
    try:
        # Once more with a mask: some models read values to make one, which tensors on meta do not have.
        for mask in (None, ids.new_ones(1, 1, 8, 8, dtype=torch.bool)):
            with suppress(*CANNOT_RUN):
                model(input_ids=ids, attention_mask=mask, use_cache=False)
    except _Called as called:
        return called.name
    finally:
        for handle in handles:
            handle.remove()
    return None


def parameter_owners(model: nn.Module, stack: str) -> dict[str, nn.Module]:
    """Return name -> module of all modules outside the stack that hold parameters themselves.

    A module inside one of them is not listed: it moves with it. Raises UserError if a module around the stack holds
    parameters itself.
    """
    owners: dict[str, nn.Module] = {}
    wrapped = wrappers_in(model)
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{other}.") for other in (stack, *wrapped, *owners))
        if inside or not (name in wrapped or has_own_parameters(module)):
            continue
        if name == "" or stack.startswith(name + "."):
            parameters = [key for key, _ in module.named_parameters(recurse=False)]
            raise UserError(
                f"{type(module).__name__} has {parameters} beside its layers, so it cannot be split into stages"
            )
        owners[name] = module
    return owners


def has_own_parameters(module: nn.Module) -> bool:
    """Return whether the module itself, not a child, holds a parameter."""
    return any(True for _ in module.parameters(recurse=False))


def put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)


class AttributeProxy(nn.Module):
    """A module without state of its own that forwards attribute look-ups to another module."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        # Not registered: its parameters are not ours.
        self.__dict__["original"] = original

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["original"], name)


class PlaceholderLayer(AttributeProxy):
    """Takes the place of a decoder layer.

    Args:
        original: the layer.
        output_of: (inputs, hidden state) -> what the layer returns.
    """

    def __init__(self, original: nn.Module, output_of: Callable[[LayerInputs, Tensor], LayerOutput]) -> None:
        super().__init__(original)
        self._output_of = output_of

    def forward(self, *args: Argument, **kwargs: Argument) -> LayerOutput:
        """Return what `output_of` gives for the hidden state [batch, sequence, width] and the other arguments."""
        hidden, inputs = LayerInputs.split(args, kwargs)
        return self._output_of(inputs, hidden)


class PlaceholderModule(AttributeProxy):
    """Takes the place of a module that holds parameters; returns a tensor of the shape that the module would return.

    Args:
        original: the module, on the meta device.
        device: of the tensors that it returns.
        output_of: (an empty tensor of that shape, the arguments) -> the tensor.
    """

    def __init__(self, original: nn.Module, device: torch.device, output_of: Callable[[Tensor, Call], Tensor]) -> None:
        super().__init__(original)
        self._device = device
        self._output_of = output_of
        self._output_shapes: dict[tuple[object, ...], Tensor] = {}

    def forward(self, *args: Argument, **kwargs: Argument) -> Tensor:
        """Return what `output_of` gives for these arguments, of the shape of the original module's output."""
        # The original runs on meta only for arguments of a new form, not in every step.
        form = tuple(tuple(x.shape) if isinstance(x, Tensor) else repr(x) for x in tree_leaves((args, kwargs)))
        if form not in self._output_shapes:
            self._output_shapes[form] = output_like(self.original, args, kwargs)
        like = torch.empty_like(self._output_shapes[form], device=self._device)
        return self._output_of(like, (args, kwargs))


@torch.no_grad()
def output_like(module: nn.Module, args: Positional, kwargs: Keyword) -> Tensor:
    """Return a tensor on meta of the shape that a module, on the meta device, returns."""
    try:
        args, kwargs = tree_map_only(Tensor, lambda value: value.to("meta"), (args, kwargs))
        output = module(*args, **kwargs)
        if isinstance(output, Tensor):
            return output
    except ASKS_FOR_VALUES:
        pass
    # A module that reads values cannot run on meta: its kind tells the shape, and any other keeps its input's.
    value: Tensor = args[0].to("meta")
    if isinstance(module, nn.Embedding):
        return torch.empty((*value.shape, module.embedding_dim), device="meta")
    if isinstance(module, nn.Linear):
        return torch.empty((*value.shape[:-1], module.out_features), device="meta")
    return value


Handler = Callable[[int, LayerInputs, Tensor], Tensor]
"""Called in place of a layer: (index, inputs, hidden state) -> hidden state."""


class ReachedLayer(Exception):
    """Raised to end a run of the model's forward at a layer; carries the arguments of that layer."""

    def __init__(self, hidden: Tensor, inputs: LayerInputs) -> None:
        super().__init__("reached")
        self.hidden = hidden
        self.inputs = inputs


class ForwardRun:
    """One run of the model's forward.

    Args:
        handler: called when the forward reaches a layer.
        known: name -> tensor that a module or a layer has returned before, perhaps on another stage. In place of other
            tensors, modules return zeros and layers None.
        dtype: dtype of those zeros, if floating.
    """

    def __init__(self, handler: Handler, dtype: torch.dtype, known: Mapping[str, Tensor] | None = None) -> None:
        self.handler = handler
        self.dtype = dtype
        self.known = known or {}
        self._calls: Counter[str] = Counter()

    def next_name(self, module: str) -> str:
        """Return the name of a module's output at its next call, and count that call."""
        self._calls[module] += 1
        return call_name(module, self._calls[module] - 1)

    def module_output(self, module: str, like: Tensor, _arguments: Call) -> Tensor:
        """Return the output of a module's placeholder; `like` has its shape and dtype."""
        name = self.next_name(module)
        if name in self.known:
            return self.known[name]
        return torch.zeros_like(like, dtype=self.dtype if like.is_floating_point() else like.dtype)


def keep_hidden(_index: int, _inputs: LayerInputs, hidden: Tensor) -> Tensor:
    """Handle a layer as if it were not there: return the hidden state [batch, sequence, width]."""
    return hidden


def call_name(module: str, call: int) -> str:
    """Return the name of the output of a module outside the layers at one of its calls in a forward."""
    return f"{module}:{call}"


class PlaceholderForward:
    """A decoder's own forward with placeholders for its modules.

    Args:
        model: the causal language model on the meta device; it is taken over and changed.
        device: where masks, positions and rotary tables are made.
        buffers: name -> values of buffers outside the layers that differ from those that the model computes itself.

    Attributes:
        described: the model's name in messages.
        takes_positions: whether the forward has an argument `position_ids`.
        stack: the name of the list of the model's decoder layers, e.g. `model.layers`.
        layers: the model's decoder layers that text reaches, in order, on the meta device.
        layer_names: their names in the model, e.g. `model.layers.0`.
        owners: name -> module of everything outside the layers that holds parameters.
        facts: outputs, random numbers and ZeRO-3 leaves of the layers, found by running them without weights.

    Raises:
        UserError: the model has no list of decoder layers, or a module above the list holds parameters.
    """

    def __init__(self, model: PreTrainedModel, device: torch.device, buffers: Mapping[str, Tensor]) -> None:
        self.model = model
        self.device = device
        self.config = model.config
        self.described = f"model type {model.config.model_type!r}"
        # Here once, as a look at the signature in every micro-batch would take time on the host.
        self.takes_positions = takes_positions(model)
        self.stack = find_stack(model)
        self.owners = parameter_owners(model, self.stack)
        # The placeholders are called within `forward` alone, which sets it.
        self._run: ForwardRun | None = None
        self._placeholders: dict[str, PlaceholderModule] = {}
        self.mask_queries = 0  # queries for which masks are made at a time; 0: all
        _revive_buffers(model, self.stack, device, buffers)
        layers: list[nn.Module] = list(model.get_submodule(self.stack).children())
        put(model, self.stack, nn.ModuleList(layers))
        self._place_layers({f"{self.stack}.{index}": layer for index, layer in enumerate(layers)})
        self._place_modules(self.owners)
        # A forward skips layers for text alone only where attention to images has a class of its own (mllama).
        if len({type(layer) for layer in layers}) > 1 and (skipped := self._skipped_layers()):
            self._place_modules(skipped)
            kept = zip(self.layer_names, self.layers, strict=True)
            self._place_layers({name: layer for name, layer in kept if name not in skipped})

    def _place_layers(self, layers: Mapping[str, nn.Module]) -> None:
        """Take these modules, given by name, as the decoder layers, and replace them by placeholders."""
        self.layers = list(layers.values())
        self.layer_names = list(layers)
        self.facts = LayerFacts(self.layers, self.layer_names)
        for index, (name, layer) in enumerate(layers.items()):
            put(self.model, name, PlaceholderLayer(layer, partial(self._at_layer, index)))

    def _place_modules(self, modules: Mapping[str, nn.Module]) -> None:
        """Take these modules, given by name, as modules around the layers, and replace them by placeholders."""
        for name, module in modules.items():
            placeholder = PlaceholderModule(without_adapters(module), self.device, partial(self._at_module, name))
            self.owners[name] = module
            self._placeholders[name] = placeholder
            put(self.model, name, placeholder)

    def _skipped_layers(self) -> dict[str, nn.Module]:
        """Return name -> layer of the layers that the forward skips for text alone: attention to images.

        They keep their weights and get no gradient. Empty if the forward does not run: its analysis says why.
        """
        reached: set[str] = set()

        def reach(index: int, _inputs: LayerInputs, hidden: Tensor) -> Tensor:
            reached.add(self.layer_names[index])
            return hidden

        ids = torch.zeros(1, 8, dtype=torch.long, device=self.device)
        with suppress(UserError, *CANNOT_RUN), torch.no_grad():
            self.run(Tokens(ids), ForwardRun(reach, torch.float32))
            every = zip(self.layer_names, self.layers, strict=True)
            return {name: layer for name, layer in every if reached and name not in reached}
        return {}

    def run(self, tokens: Tokens, run: ForwardRun) -> Tensor:
        """Run the model's forward with the placeholders of `run`; return the logits [batch, sequence, vocabulary]."""
        logits: Tensor = self.forward(tokens, run).logits
        return logits

    def forward(self, tokens: Tokens, run: ForwardRun, **options: object) -> ForwardOutput:
        """Run the forward, with `options` as further arguments; return its output.

        If the model takes no position ids, only its masks depend on them.
        """
        given = tokens.positions is not None and self.takes_positions
        positions = {"position_ids": tokens.positions} if given else {}
        self._run = run
        try:
            with documents_apart(tokens.positions if tokens.is_packed else None), masks_by_rows(self.mask_queries):
                return self.model(input_ids=tokens.ids, use_cache=False, **positions, **options)
        finally:
            self._run = None

    def run_to_layer(self, tokens: Tokens, run: ForwardRun) -> ReachedLayer:
        """Run the forward until the handler of `run` raises `ReachedLayer`, and return that.

        Raises RuntimeError if the forward ends before that.
        """
        try:
            self.run(tokens, run)
        except ReachedLayer as reached:
            # The traceback holds the frames of all callers. With it, a step's logits would stay in memory until
            # Python's cycle collector runs.
            return reached.with_traceback(None)
        raise RuntimeError("the model's forward ended before its decoder layers were reached")

    @contextmanager
    def real(self, modules: Mapping[str, nn.Module]) -> Iterator[None]:
        """Replace placeholders by these modules, given by name, while the context lasts."""
        for name, module in modules.items():
            put(self.model, name, module)
        try:
            yield
        finally:
            for name in modules:
                put(self.model, name, self._placeholders[name])

    def _at_layer(self, index: int, inputs: LayerInputs, hidden: Tensor) -> LayerOutput:
        run = self._run
        assert run is not None
        # Before the rest: a probe sets `run.known` in it.
        result = run.handler(index, inputs, hidden)
        spec = self.facts.observe(index, inputs, hidden)
        spec.affect(inputs, run.known)
        return spec.output(result, run.known)

    def _at_module(self, name: str, like: Tensor, arguments: Call) -> Tensor:
        assert self._run is not None
        return self._run.module_output(name, like, arguments)


def _revive_buffers(model: PreTrainedModel, stack: str, device: torch.device, values: Mapping[str, Tensor]) -> None:
    """Give the modules outside the layers that own buffers but no parameters (rotary tables) real buffers."""
    for name, module in model.named_modules():
        inside = name == stack or name.startswith(stack + ".")
        if inside or has_own_parameters(module) or not any(True for _ in module.buffers(recurse=False)):
            continue
        # Their values were lost on meta, and those that are not persistent are in no checkpoint. Not recursive: a child
        # may hold parameters, which stay on meta.
        module.to_empty(device=device, recurse=False)
        with torch.no_grad():
            _model_around(model, name)._init_weights(module)  # noqa: SLF001  # it fills buffers too
            for key, buffer in module.named_buffers(name, recurse=False):
                # A half-precision copy has lost digits.
                if key in values and values[key].dtype == buffer.dtype:
                    buffer.copy_(values[key])


def _model_around(model: PreTrainedModel, name: str) -> PreTrainedModel:
    """Return the innermost model that a module belongs to: its `_init_weights` may ask for its own attributes."""
    parts = name.split(".") if name else []
    around = (model.get_submodule(".".join(parts[:n])) for n in range(len(parts), -1, -1))
    return next(module for module in around if isinstance(module, PreTrainedModel))
