"""The model's own forward, with its decoder layers lifted out.

A `Frame` holds a HuggingFace causal decoder on the meta device and finds, by running the model's own forward
with stand-ins, what no table of families could say for all of them:

- the prologue: the modules called before the first decoder layer (embeddings, their scaling or norm);
- the notes: what each layer is given besides the hidden state (masks, positions, rotary tables). They depend on
  shape, dtype and device only, so every stage derives its own and nothing but the hidden state crosses;
- the epilogue: the modules called after the last layer (norm, head, scaling).

In the frame every decoder layer is a stub and every prologue module a stand-in that gives zeros of the right
shape; the real modules live in the pipeline layers (`decoder.py`) and are put in their place only there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from harness.config.errors import UserError
from harness.models.standins import Call, LayerStub, Reached, StandIn
from harness.parallel.adapters import without_adapters, wrappers_in

KEPT_SHAPES = 4
# what a forward raises that asks of a stand-in what it cannot give
CANNOT_RUN = (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True)
class Shape:
    """What a layer's notes depend on: batch, sequence length and dtype of the hidden state."""

    batch: int
    sequence: int
    dtype: torch.dtype


PROBE = Shape(2, 8, torch.float32)


class Frame:
    """A decoder's own forward with stubs for layers.

    Args:
        model: the causal language model on the meta device; it is taken over and changed.
        device: where the notes are made.

    Attributes:
        layers: the model's decoder layers, in order, on the meta device.
        layer_names: their names in the model, e.g. `model.layers.0`.
        prologue, epilogue: name -> module of everything with parameters that stands before and after them.

    Raises:
        UserError: the model has no single stack of decoder layers, its layers' arguments depend on the token ids,
            or a module above the layers holds parameters of its own: such a model cannot be cut into stages.
    """

    def __init__(self, model: PreTrainedModel, device: torch.device) -> None:
        self.model = model
        self.device = device
        self.config = model.config
        self._handler: Callable[[int, Call, Tensor], Tensor] | None = None
        self._notes: dict[Shape, list[Call]] = {}
        stack = find_stack(model)
        self.layers: list[nn.Module] = list(model.get_submodule(stack).children())
        self.layer_names = [f"{stack}.{index}" for index in range(len(self.layers))]
        owners = parameter_owners(model, stack)
        self.revive_buffers(stack)
        replace(model, stack, nn.ModuleList(LayerStub(layer, i, self) for i, layer in enumerate(self.layers)))
        self._stand_ins = {name: StandIn(without_adapters(module)) for name, module in owners.items()}
        for name, stand_in in self._stand_ins.items():
            replace(model, name, stand_in)
        self.prologue = self._find_prologue(owners)
        self.epilogue = {name: module for name, module in owners.items() if name not in self.prologue}

    def revive_buffers(self, stack: str) -> None:
        """Give the modules outside the layers that own buffers but no parameters (rotary tables) real buffers."""
        for name, module in self.model.named_modules():
            inside = name == stack or name.startswith(stack + ".")
            if inside or has_own_parameters(module) or not any(True for _ in module.buffers(recurse=False)):
                continue
            module.to_empty(device=self.device, recurse=False)
            with torch.no_grad():
                self.model._init_weights(module)

    # -- what the pipeline layers ask for ------------------------------------------------------------------

    def enter(self, ids: Tensor, modules: dict[str, nn.Module], training: bool) -> Tensor:
        """The hidden state that the model's forward gives its first layer, by the real prologue `modules`.

        Args:
            ids: token ids, [batch, sequence].
        Returns:
            hidden state, [batch, sequence, width].
        """

        def stop(index: int, call: Call, hidden: Tensor) -> Tensor:
            raise Reached(hidden)

        with self._standing(modules):
            return self._run_until_reached(ids, stop, training)

    def notes(self, index: int, hidden: Tensor) -> Call:
        """What layer `index` is given besides a hidden state of this shape, dtype and device; made once, then kept."""
        shape = Shape(hidden.shape[0], hidden.shape[1], hidden.dtype)
        if shape not in self._notes:
            while len(self._notes) >= KEPT_SHAPES:
                self._notes.pop(next(iter(self._notes)))
            self._notes[shape] = self._take_notes(shape)
        return self._notes[shape][index]

    def leave(self, hidden: Tensor, modules: dict[str, nn.Module], training: bool) -> Tensor:
        """The logits that the model's forward makes of the last hidden state, by the real epilogue `modules`."""

        def inject(index: int, call: Call, given: Tensor) -> Tensor:
            return hidden if index == 0 else given

        ids = torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device)
        self._set_dtype(hidden.dtype)
        with self._standing(modules):
            self._switch_mode(training)
            return self._forward(ids, inject).logits

    @torch.no_grad()
    def finish(self, head: str, output: Tensor) -> Tensor:
        """The logits that the model's forward makes of the `output` of its module `head`."""
        ids = torch.zeros(output.shape[:2], dtype=torch.long, device=output.device)
        self._set_dtype(output.dtype)
        replace(self.model, head, _Constant(output))
        try:
            return self._forward(ids, lambda index, call, hidden: hidden).logits
        finally:
            replace(self.model, head, self._stand_ins[head])

    # -- running the forward -------------------------------------------------------------------------------

    def handle(self, index: int, call: Call, hidden: Tensor) -> Tensor:
        """Called by the stub of layer `index` when the model's forward arrives there."""
        if self._handler is None:
            raise RuntimeError("a layer's stub was called outside a run of the frame")
        return self._handler(index, call, hidden)

    def _forward(self, ids: Tensor, handler: Callable[[int, Call, Tensor], Tensor]) -> Any:
        self._handler = handler
        try:
            return self.model(input_ids=ids, use_cache=False)
        finally:
            self._handler = None

    def _run_until_reached(self, ids: Tensor, handler: Callable[[int, Call, Tensor], Tensor], training: bool) -> Tensor:
        self._switch_mode(training)
        try:
            self._forward(ids, handler)
        except Reached as reached:
            return reached.hidden
        raise RuntimeError("the model's forward ended before its decoder layers were reached")

    @torch.no_grad()
    def _take_notes(self, shape: Shape, token: int = 0, fill: float = 0.0) -> list[Call]:
        calls: list[Call] = []

        def note(index: int, call: Call, hidden: Tensor) -> Tensor:
            calls.append(call)
            if len(calls) == len(self.layers):
                raise Reached(hidden)
            return hidden

        ids = torch.full((shape.batch, shape.sequence), token, dtype=torch.long, device=self.device)
        self._set_dtype(shape.dtype, fill)
        self._run_until_reached(ids, note, self.model.training)
        return calls

    def _find_prologue(self, owners: dict[str, nn.Module]) -> dict[str, nn.Module]:
        for stand_in in self._stand_ins.values():
            stand_in.called = False
        try:
            first = self._take_notes(PROBE)
        except CANNOT_RUN as error:
            raise UserError(
                f"model type {self.config.model_type!r}: its forward does not run with its layers lifted out "
                f"({type(error).__name__}: {' '.join(str(error).split())[:120]}), so it cannot be cut into stages"
            ) from error
        prologue = {name: module for name, module in owners.items() if self._stand_ins[name].called}
        other = self._take_notes(PROBE, token=1, fill=1.0)
        changed = [index for index, pair in enumerate(zip(first, other, strict=True)) if not pair[0].equals(pair[1])]
        if changed:
            raise UserError(
                f"model type {self.config.model_type!r}: what {self.layer_names[changed[0]]} is given besides the "
                "hidden state depends on the token ids, so it cannot be cut into stages"
            )
        return prologue

    def _set_dtype(self, dtype: torch.dtype, fill: float = 0.0) -> None:
        for stand_in in self._stand_ins.values():
            stand_in.dtype, stand_in.fill = dtype, fill

    def _switch_mode(self, training: bool) -> None:
        if self.model.training != training:
            self.model.train(training)

    @contextmanager
    def _standing(self, modules: dict[str, nn.Module]) -> Iterator[None]:
        for name, module in modules.items():
            replace(self.model, name, module)
        try:
            yield
        finally:
            for name in modules:
                replace(self.model, name, self._stand_ins[name])


class _Constant(nn.Module):
    """Gives the same tensor whatever it is given."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = value

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.value


def find_stack(model: PreTrainedModel) -> str:
    """Name of the ModuleList that holds the decoder layers: as long as the model is deep, and the largest such."""
    depth = model.config.get_text_config(decoder=True).num_hidden_layers
    lists = [
        (sum(parameter.numel() for parameter in module.parameters()), name)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == depth
    ]
    if not lists:
        raise UserError(
            f"model type {model.config.model_type!r} has no list of {depth} decoder layers: it cannot be cut"
        )
    return max(lists)[1]


def parameter_owners(model: nn.Module, stack: str) -> dict[str, nn.Module]:
    """Name -> module of all modules outside the stack that hold parameters themselves."""
    owners: dict[str, nn.Module] = {}
    wrapped = wrappers_in(model)
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{other}.") for other in (stack, *wrapped))
        if inside or not (name in wrapped or has_own_parameters(module)):
            continue
        if name == "" or stack.startswith(name + "."):
            parameters = [key for key, _ in module.named_parameters(recurse=False)]
            raise UserError(
                f"{type(module).__name__} holds {parameters} beside its layers, so it cannot be cut into stages"
            )
        owners[name] = module
    return owners


def has_own_parameters(module: nn.Module) -> bool:
    """Whether the module holds a parameter itself, not by a child."""
    return any(True for _ in module.parameters(recurse=False))


def replace(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put `module` in the place of the model's submodule `name`."""
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)
