"""A list of layers as DeepSpeed runs it: cut into pipeline stages, or whole on every rank for ZeRO-2 and ZeRO-3.

Both forms build only the layers of their own stage, name a parameter `<index of its layer>.<name in the layer>`
and tie weights alike, so that a checkpoint of one can be read by the other. Layers are what DeepSpeed's
PipelineModule takes: LayerSpec, TiedLayerSpec, modules, functions; the output of one, a tensor or a tuple of tensors,
is the input of the next. Every floating tensor of a tuple gets its gradient, on the same stage or from the next.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor, nn

from harness.config.values.model_chunks import ModelChunks
from harness.deepspeed.pipeline import BuiltLayers, GivenStages, Layer, LayerCall, StageBuilder, TiedWeights
from harness.parallel.draws import DrawKeys
from harness.parallel.pipeline.finite import FiniteWatch
from harness.parallel.pipeline.recomputation import is_recomputed, run_block, shared_parameters, split_into_blocks
from harness.parallel.pipeline.stage_transport import Unpacker, pack_payload
from harness.parallel.values import Value
from harness.topology.layout import Layout


def deepspeed_topology(layout: Layout) -> PipeModelDataParallelTopology:
    """Return the layout as DeepSpeed names it; ranks are numbered alike."""
    return PipeModelDataParallelTopology(num_pp=layout.pp_size, num_mp=layout.tp_size, num_dp=layout.dp_size)


class SharedLayerSpec(TiedLayerSpec):
    """A tied layer that is always a module of its own: nothing but the parameters in `tied_weight_attr` is shared."""


def build_layers(layers: Sequence[Layer], start: int, stop: int, seed: int) -> BuiltLayers:
    """Build layers `start` to `stop` - 1."""
    return build_chosen(layers, range(start, stop), seed)


def build_chosen(layers: Sequence[Layer], indices: Sequence[int], seed: int) -> BuiltLayers:
    """Build the layers with these indices, which rise; the random numbers of each depend on `seed` and its index alone.

    Two TiedLayerSpecs of one key and one type are one module, called twice. Of two types, and SharedLayerSpecs, they
    are two modules whose tied parameters are one: the spec's `tied_weight_attr` names them in each.
    """
    built = BuiltLayers()
    owners: dict[str, nn.Module] = {}
    calls: dict[int, LayerCall] = {}
    for index in _build_order(layers, indices):
        layer = layers[index]
        torch.manual_seed(seed + index)
        if isinstance(layer, TiedLayerSpec):
            module = _build_tied(layer, index, owners, built)
            calls[index] = partial(layer.forward_fn, module) if layer.forward_fn else module
        elif isinstance(layer, (LayerSpec, nn.Module)):
            module = layer.build() if isinstance(layer, LayerSpec) else layer
            built.modules[index] = calls[index] = module
        else:
            calls[index] = layer
    built.calls.extend(calls[index] for index in indices)
    return replace(built, modules=dict(sorted(built.modules.items())))


def _build_order(layers: Sequence[Layer], indices: Sequence[int]) -> list[int]:
    """Return the first and the last layer, then the others.

    The ends hold the vocabulary, and under ZeRO-3, where a layer is whole until it is spread, the largest are best made
    while the least else is there. A last layer tied to one in the middle waits its turn: the first of a key names it.
    """
    first, last = indices[0], layers[indices[-1]]
    inner = [layers[index] for index in indices[1:-1]]
    between = {spec.key for spec in inner if isinstance(spec, TiedLayerSpec)}
    waits = isinstance(last, TiedLayerSpec) and last.key in between
    return sorted(indices, key=lambda index: index != first and (waits or index != indices[-1]))


def _build_tied(spec: TiedLayerSpec, index: int, owners: dict[str, nn.Module], built: BuiltLayers) -> nn.Module:
    owner = owners.get(spec.key)
    if owner is not None and type(owner) is spec.typename and not isinstance(spec, SharedLayerSpec):
        return owner
    module: nn.Module = spec.build()
    built.modules[index] = module
    if owner is None:
        owners[spec.key] = module
        built.tied[spec.key] = TiedWeights(module, spec.tied_weight_attr)
    else:
        for shared, name in zip(built.tied[spec.key].parameters(), spec.tied_weight_attr, strict=True):
            path, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(path), leaf, shared)
    return module


def first_names(layers: Sequence[Layer]) -> dict[str, str]:
    """Return, by the name of a tied parameter in a later layer, its name in the first layer that has it."""
    owners: dict[str, tuple[int, list[str]]] = {}
    found: dict[str, str] = {}
    for index, layer in enumerate(layers):
        if isinstance(layer, TiedLayerSpec):
            names = [layer.tied_weight_attr] if isinstance(layer.tied_weight_attr, str) else layer.tied_weight_attr
            first, own = owners.setdefault(layer.key, (index, list(names)))
            if first != index:
                found |= {f"{index}.{name}": f"{first}.{other}" for name, other in zip(names, own, strict=True)}
    return found


class StagedModule(GivenStages):
    """DeepSpeed's PipelineModule with the stage boundaries given, and names and ties as the module's docstring says.

    Args:
        layers: the whole model's layers; only those of this rank's stage are built.
        layout: pipeline x data x tensor sizes.
        boundaries: model chunk i holds layers boundaries[i] to boundaries[i + 1] - 1.
        chunks: which stage has which model chunk; one chunk each, unless it says otherwise.
        loss_fn: loss of one micro-batch, `loss_fn(outputs, labels)`.
        checkpoint_interval: layers between stored activations; 0 stores all.
        seed: of the layers' initial weights.
        keys: what random numbers in the layers depend on; None where they draw none.

    Attributes:
        finite: whether what this stage hands on is finite; the last one hands nothing on.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        *,
        layout: Layout,
        boundaries: Sequence[int],
        chunks: ModelChunks | None = None,
        loss_fn: Callable[..., Tensor],
        checkpoint_interval: int,
        seed: int,
        keys: DrawKeys | None = None,
    ) -> None:
        chunks = chunks or ModelChunks(layout.pp_size)
        super().__init__(
            layers,
            StageBuilder(boundaries=boundaries, chunks=chunks, build=build_chosen, is_recomputed=is_recomputed),
            deepspeed_topology(layout),
            loss_fn=loss_fn,
            activation_checkpoint_interval=checkpoint_interval,
            base_seed=seed,
        )
        self.finite = FiniteWatch()
        self._keys = keys
        self._unpack: defaultdict[int, Unpacker] = defaultdict(Unpacker)
        self._reported: dict[str, Tensor | None] = dict.fromkeys(getattr(loss_fn, "reports", ()))

    def forward(self, forward_input: Value) -> Value:
        """Return the output of the last layer of `chunk`, in the form in which it is sent to the next chunk."""
        first, last = self.chunk == 0, self.chunk == len(self.parts) - 2
        output = self._run(forward_input if first else self._unpack[self.chunk](forward_input))
        if last and self._reported:
            self._reported = self.loss_fn.parts(output)
        if last:
            return output
        self.finite.see(output)
        return pack_payload(output)

    def _run(self, value: Value) -> Value:
        """As DeepSpeed's forward, with the draws of each layer keyed, also where it is run again."""
        key = self._keys.next(self.chunk) if self._keys is not None and self.training else None
        for block, recomputed in self.blocks():
            run = partial(run_block, block, key)
            tensors = value if isinstance(value, tuple) else (value,)
            value = self.activation_checkpoint_func(run, *tensors) if recomputed else run(*tensors)
        return value

    def get_additional_losses(self) -> dict[str, Tensor | None] | None:
        """Return what the loss reports of the last micro-batch besides itself (`loss_fn.parts`).

        DeepSpeed asks all stages, and brings every stage the means.
        """
        return self._reported or None


class LayerSequence(nn.Module):
    """All layers on every rank, one after the other, for engines without a pipeline (ZeRO-2, ZeRO-3).

    Args:
        layers: the whole model's layers.
        checkpoint_interval: layers between stored activations; 0 stores all.
        seed: of the layers' initial weights.
        keys: what random numbers in the layers depend on; None where they draw none.

    Attributes:
        calls: what the forward calls, in order.
    """

    def __init__(
        self, layers: Sequence[Layer], *, checkpoint_interval: int, seed: int, keys: DrawKeys | None = None
    ) -> None:
        super().__init__()
        self._keys = keys
        built = build_layers(layers, 0, len(layers), seed)
        for index, module in built.modules.items():
            self.add_module(str(index), module)
        self.calls = built.calls
        self._blocks = list(split_into_blocks(built.calls, checkpoint_interval, shared_parameters(built.calls)))

    def forward(self, inputs: Value) -> Value:
        """Return the last layer's output."""
        key = self._keys.next() if self._keys is not None and self.training else None
        for block, recomputed in self._blocks:
            run = partial(run_block, block, key)
            tensors = inputs if isinstance(inputs, tuple) else (inputs,)
            if recomputed and self.training and any(_is_floating(tensor) for tensor in tensors):
                if not any(tensor.requires_grad for tensor in tensors):  # a frozen embedding's output, or floating data
                    tensors = tuple(
                        map(_with_gradient, tensors)
                    )  # else the block would be recomputed without gradients
                # Reentrant: the nested backward lets ZeRO-3 gather a block's parameters once more. Without it they
                # are gone when their gradients arrive (seen with DeepSpeed 0.19.8).
                inputs = checkpointing.checkpoint(run, *tensors)
            else:
                inputs = run(*tensors)
        return inputs


def _is_floating(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _with_gradient(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_() if tensor.is_floating_point() else tensor
