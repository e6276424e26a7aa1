"""Compute a mixture of experts' router loss with the model's own forward, for layers on any pipeline stages.

Families compute a load-balancing loss from router logits in many ways (the usual one: Fedus et al. 2021, Switch
Transformers, arXiv 2101.03961, section 2.2). So the model itself computes it: the outputs that its class declares as
router logits are collected from the layers as they run, and passed on from stage to stage. At the end the model's own
forward receives all of them, as if its own layers had recorded them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from harness.errors import UserError, text_of
from harness.hf.forward.outer_forward import HiddenShape, OuterForward
from harness.hf.forward.payload import ForwardOutput, Tokens
from harness.hf.forward.placeholders import ForwardRun, keep_hidden
from harness.hf.layers.call import LayerInputs, LayerOutput
from harness.hf.layers.dry_run import CANNOT_RUN, dry_run

ROUTER_LOGITS = "router_logits"
WANTED = {"output_router_logits": True}
"""The argument of a model's forward that asks for its router loss."""
PROBE = HiddenShape(2, 8, torch.float32)


@dataclass(frozen=True, kw_only=True)
class RouterOutput:
    """The modules and output index of router logits, read from transformers' `OutputRecorder`."""

    kind: type[nn.Module]
    index: int
    inside: str | None

    def finds(self, name: str, module: nn.Module) -> bool:
        """Return whether the module of that name in a layer is a router."""
        return isinstance(module, self.kind) and (self.inside is None or f".{self.inside.strip('.')}." in f".{name}.")


@dataclass(frozen=True, kw_only=True)
class Capture:
    """Collects router logits from the layers, and passes them to the model's own forward at the end.

    They are equal on all tensor-parallel ranks.

    Attributes:
        layers: indices of the layers with routers.
        recorders: which outputs of which modules are router logits.
        base: name of the model's module that returns router logits beside the last hidden state.
        coefficient: factor of the router loss in the model's own loss.
    """

    layers: Collection[int]
    recorders: tuple[RouterOutput, ...]
    base: str
    coefficient: float = 0.0

    def state_name(self, index: int) -> str:
        """Return the name of the state that carries layer `index`'s router logits."""
        return f"{ROUTER_LOGITS}:{index}"

    def has_router(self, block: nn.Module, name: str) -> bool:
        """Return whether the module `name` of a layer is or contains a router."""
        inside = (f"{name}.{each}".rstrip(".") for each, _ in block.named_modules())
        pairs = zip(inside, block.modules(), strict=True)
        return any(recorder.finds(each, module) for each, module in pairs for recorder in self.recorders)

    def run(self, layer: nn.Module, call: Callable[[], LayerOutput]) -> tuple[LayerOutput, Tensor]:
        """Run `layer` by `call`; return its output and its stacked router logits [routers, ...].

        With activation checkpointing it runs twice per micro-batch with the same result. Raises UserError if no router
        of the layer returns logits.
        """
        taken: list[Tensor] = []
        with self.taking(layer, taken.append):
            output = call()
        if not taken:
            raise UserError(f"{type(layer).__name__} returns no router logits: remove --output_router_logits")
        return output, torch.stack(taken)

    def finish(
        self, model: nn.Module, taken: Sequence[Tensor], forward: Callable[..., ForwardOutput]
    ) -> tuple[Tensor, Tensor]:
        """Return the logits [batch, sequence, vocabulary] and the router loss (a scalar) of `model`.

        Args:
            taken: the router logits of each of `layers`.
            forward: completes the forward of `model`; takes further arguments for it.
        """
        with self.replaying(model, taken):
            output = forward(**WANTED)
        return output.logits, output.aux_loss

    @contextmanager
    def replaying(self, model: nn.Module, taken: Sequence[Tensor]) -> Iterator[None]:
        """In this context, give `model`'s forward these router logits, [routers, ...] for each layer."""

        def after_forward(_module: nn.Module, _args: object, output: ForwardOutput) -> ForwardOutput:
            # Like transformers' recorder: the logits of all routers in layer order.
            output[ROUTER_LOGITS] = tuple(logits for layer in taken for logits in layer)
            return output

        handle = model.get_submodule(self.base).register_forward_hook(after_forward)
        try:
            yield
        finally:
            handle.remove()

    @contextmanager
    def taking(self, layer: nn.Module, take: Callable[[Tensor], None]) -> Iterator[None]:
        """Call `take` with the logits [..., experts] of each router of `layer` that runs."""

        def after_forward(_module: nn.Module, _args: object, output: LayerOutput, *, index: int) -> None:
            value = output[index] if isinstance(output, tuple) else output
            if value is not None:
                take(value)

        handles = [
            module.register_forward_hook(partial(after_forward, index=recorder.index))
            for recorder in self.recorders
            for name, module in layer.named_modules()
            if recorder.finds(name, module)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def router_capture(outer: OuterForward, head: str | None) -> Capture | None:
    """Return a capture of a model's router logits for its own router loss; None for a model without one.

    Args:
        head: the name of the module that computes the logits.

    Raises:
        UserError: the model has routers, but its router loss cannot be computed outside its layers.
    """
    base = _owner(outer.model, outer.layer_names[0])
    recorders = _recorders(outer.model.get_submodule(base))
    layers = [index for index, layer in enumerate(outer.layers) if _has_router(layer, recorders)]
    if not layers:
        return None
    if head is None:
        raise UserError(
            f"{outer.described} does not show which module computes its logits: set output_router_logits to false"
        )
    capture = Capture(layers=layers, recorders=recorders, base=base)
    coefficient = _coefficient(outer, capture, head)
    return None if coefficient is None else replace(capture, coefficient=coefficient)


def _owner(model: nn.Module, layer_name: str) -> str:
    """Return the name of the innermost transformers model around a layer."""
    names: list[str] = [name for name, module in model.named_modules() if isinstance(module, PreTrainedModel)]
    return max((name for name in names if not name or layer_name.startswith(name + ".")), key=len)


def _recorders(base: nn.Module) -> tuple[RouterOutput, ...]:
    declared = (getattr(base, "_can_record_outputs", None) or {}).get(ROUTER_LOGITS, [])
    found = []
    for spec in declared if isinstance(declared, (list, tuple)) else [declared]:
        kind = getattr(spec, "target_class", spec)
        if isinstance(kind, type):
            found.append(
                RouterOutput(kind=kind, index=getattr(spec, "index", 1), inside=getattr(spec, "layer_name", None))
            )
    return tuple(found)


def _has_router(layer: nn.Module, recorders: tuple[RouterOutput, ...]) -> bool:
    return any(recorder.finds(name, module) for name, module in layer.named_modules() for recorder in recorders)


class _Taken(Exception):
    """Raised to end a layer's run; carries the logits of its first router."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__("taken")
        self.logits = logits


@torch.no_grad()
def _coefficient(outer: OuterForward, capture: Capture, head: str) -> float | None:
    """Measure the coefficient of the router loss in the model's own loss; None for a model without a router loss.

    It is (loss with router loss - loss without) / router loss. All router logits are 0, and the logits give a cross
    entropy of 0, so that rounding does not hide the difference.

    Raises:
        UserError: the forward does not run on these inputs.
    """
    labels = torch.zeros(PROBE.batch, PROBE.sequence, dtype=torch.long, device=outer.device)
    width = next(outer.epilogue[head].parameters()).shape[0]
    output = torch.zeros(*labels.shape, width, device=outer.device)
    output[..., 0] = 1e6  # all labels are 0, so the cross entropy is exactly 0
    try:
        with capture.replaying(outer.model, [torch.zeros(1, *_logits_shape(outer, capture), device=outer.device)]):
            run = ForwardRun(keep_hidden, PROBE.dtype)
            if getattr(outer.forward(Tokens(labels), run, **WANTED), "aux_loss", None) is None:
                return None
            asked = outer.finish(head, output, labels=labels, **WANTED)
        without = outer.finish(head, output, labels=labels).loss
        return float(f"{(asked.loss - without) / asked.aux_loss:.6g}")  # 6 digits: 0.02, not 0.0199999996
    except CANNOT_RUN as error:
        raise UserError(
            f"{outer.described}: its router loss cannot be computed outside its forward "
            f"({type(error).__name__}: {text_of(error, 120)}): set output_router_logits to false"
        ) from error


def _logits_shape(outer: OuterForward, capture: Capture) -> torch.Size:
    """Return the shape of one router's logits; its layer runs only up to the router."""
    wanted = min(capture.layers)

    def stop(logits: Tensor) -> None:
        raise _Taken(logits)

    def reach(layer: nn.Module, inputs: LayerInputs, hidden: Tensor) -> None:
        with capture.taking(layer, stop):
            inputs.apply(layer, hidden)

    def handler(index: int, inputs: LayerInputs, hidden: Tensor) -> Tensor:
        if index == wanted:
            dry_run(outer.layers[index], inputs, hidden, reach)
        return hidden

    tokens = Tokens(torch.zeros(PROBE.batch, PROBE.sequence, dtype=torch.long, device=outer.device))
    try:
        outer.run(tokens, ForwardRun(handler, PROBE.dtype))
    except _Taken as taken:
        return taken.logits.shape
    raise RuntimeError("no router was reached")
