"""A model's own forward with its decoder layers lifted out, and how it is run.

Placeholders take the place of every decoder layer and of every other module with parameters. So the forward runs on
any machine, and what each placeholder returns is decided by the run (`forward_run.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from harness.errors import UserError
from harness.hf.forward.forward_run import ForwardRun, ReachedLayer
from harness.hf.forward.layer_stack import find_stack, has_own_parameters, parameter_owners, put
from harness.hf.forward.payload import ForwardOutput, Tokens
from harness.hf.forward.placeholders import PlaceholderLayer, PlaceholderModule
from harness.hf.layers.facts import LayerFacts
from harness.hf.layers.inputs import Call, LayerInputs, LayerOutput
from harness.parallel.plans.lora import without_adapters


class LiftedForward:
    """A decoder's own forward with placeholders for its modules.

    Args:
        model: the causal language model on the meta device; it is taken over and changed.
        device: where masks, positions and rotary tables are made.
        buffers: values, by name, of the buffers outside the layers, where they are not what the model computes anew.

    Attributes:
        stack: the name of the list of the model's decoder layers, e.g. `model.layers`.
        layers: the model's decoder layers, in order, on the meta device.
        layer_names: their names in the model, e.g. `model.layers.0`.
        owners: name -> module of everything outside the layers that holds parameters.
        facts: what dry runs of the layers showed.

    Raises:
        UserError: the model has no list of decoder layers, or a module above the list holds parameters.
    """

    def __init__(self, model: PreTrainedModel, device: torch.device, buffers: Mapping[str, Tensor]) -> None:
        self.model = model
        self.device = device
        self.config = model.config
        self.stack = find_stack(model)
        self.layers: list[nn.Module] = list(model.get_submodule(self.stack).children())
        self.layer_names = [f"{self.stack}.{index}" for index in range(len(self.layers))]
        self.facts = LayerFacts(self.layers, self.layer_names)
        self.owners = parameter_owners(model, self.stack)
        self._run: ForwardRun | None = None
        _revive_buffers(model, self.stack, device, buffers)
        layers = (PlaceholderLayer(layer, partial(self._at_layer, i)) for i, layer in enumerate(self.layers))
        put(model, self.stack, nn.ModuleList(layers))
        self._placeholders = {
            name: PlaceholderModule(without_adapters(module), device, partial(self._at_module, name))
            for name, module in self.owners.items()
        }
        for name, placeholder in self._placeholders.items():
            put(model, name, placeholder)

    @property
    def described(self) -> str:
        """The model as a message names it."""
        return f"model type {self.config.model_type!r}"

    @property
    def takes_positions(self) -> bool:
        """Whether the model's forward takes position ids."""
        return "position_ids" in inspect.signature(self.model.forward).parameters

    def run(self, tokens: Tokens, run: ForwardRun) -> Tensor:
        """Return the logits of the model's forward, in which placeholders do what `run` says."""
        logits: Tensor = self.forward(tokens, run).logits
        return logits

    def forward(self, tokens: Tokens, run: ForwardRun, **options: object) -> ForwardOutput:
        """Return the output of that forward, given `options` too."""
        positions = {} if tokens.positions is None else {"position_ids": tokens.positions}
        if positions and not self.takes_positions:
            raise UserError(f"{self.described} takes no position_ids: remove them from the samples")
        self._run = run
        try:
            return self.model(input_ids=tokens.ids, use_cache=False, **positions, **options)
        finally:
            self._run = None

    def run_to_layer(self, tokens: Tokens, run: ForwardRun) -> ReachedLayer:
        """Run the forward until the handler of `run` raises `ReachedLayer`, and return that."""
        try:
            self.run(tokens, run)
        except ReachedLayer as reached:
            # its traceback holds the frames of all callers, so the logits of a step would stay until a cycle is found
            return reached.with_traceback(None)
        raise RuntimeError("the model's forward ended before its decoder layers were reached")

    @contextmanager
    def real(self, modules: Mapping[str, nn.Module]) -> Iterator[None]:
        """Put these modules, by name, in the place of their placeholders while the context lasts."""
        for name, module in modules.items():
            put(self.model, name, module)
        try:
            yield
        finally:
            for name in modules:
                put(self.model, name, self._placeholders[name])

    def _at_layer(self, index: int, inputs: LayerInputs, hidden: Tensor) -> LayerOutput:
        """Return what the placeholder of layer `index` returns."""
        run = self._running()
        result = run.handler(index, inputs, hidden)
        spec = self.facts.observe(index, inputs, hidden)
        spec.affect(inputs, run.known)
        return spec.output(result, run.known)

    def _at_module(self, name: str, like: Tensor, arguments: Call) -> Tensor:
        """Return what the placeholder of a module outside the layers returns."""
        return self._running().module_output(name, like, arguments)

    def _running(self) -> ForwardRun:
        if self._run is None:
            raise RuntimeError("a placeholder was called outside a run of the model's forward")
        return self._run


def _revive_buffers(model: PreTrainedModel, stack: str, device: torch.device, values: Mapping[str, Tensor]) -> None:
    """Give the modules outside the layers that own buffers but no parameters (rotary tables) real buffers."""
    for name, module in model.named_modules():
        inside = name == stack or name.startswith(stack + ".")
        if inside or has_own_parameters(module) or not any(True for _ in module.buffers(recurse=False)):
            continue
        module.to_empty(device=device, recurse=False)
        with torch.no_grad():
            _model_around(model, name)._init_weights(module)  # noqa: SLF001  # it fills buffers too
            for key, buffer in module.named_buffers(name, recurse=False):
                if key in values and values[key].dtype == buffer.dtype:  # a half-precision copy has lost digits
                    buffer.copy_(values[key])


def _model_around(model: PreTrainedModel, name: str) -> PreTrainedModel:
    """Return the innermost model that a module belongs to: its `_init_weights` may ask for its own attributes."""
    parts = name.split(".") if name else []
    around = (model.get_submodule(".".join(parts[:n])) for n in range(len(parts), -1, -1))
    return next(module for module in around if isinstance(module, PreTrainedModel))
