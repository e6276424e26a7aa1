"""Run a list of layers with DeepSpeed: cut into pipeline stages, or whole on every rank for ZeRO-2 and ZeRO-3.

Both forms name a parameter `<index of its layer>.<name in the layer>` and tie weights alike, so that each can read
checkpoints of the other. A stage builds only its own layers. A layer is anything that DeepSpeed's PipelineModule
takes: LayerSpec, TiedLayerSpec, a module or a function. Its output, a tensor or a tuple of tensors, is the input of the
next layer. Every floating tensor of a tuple gets its gradient, from the same stage or from the next.

Between stages, DeepSpeed returns a gradient only for the first tensor of a tuple and, with tensor parallelism, refuses
any other tensor that needs one. So `pack_payload` sends all floating tensors of a tuple as one flat tensor, followed by
a list of their shapes, followed by the integer tensors. Two forms are sent unchanged: a bare tensor, and a tuple of a
tensor with at least two dimensions and int64 tensors.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from harness.deepspeed.pipeline import BuiltLayers, GivenStages, Layer, LayerCall, StageBuilder, TiedWeights
from harness.parallel.dropout import RngKey, RngKeys
from harness.parallel.values import Value
from harness.schedules import ModelChunks
from harness.topology.layout import Layout

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.bool)
END = -1
PackedShapes = tuple[tuple[int, tuple[int, ...]], ...]
"""For each tensor of a tuple, the index of its dtype in `DTYPES`, and its shape."""


def pack_payload(value: Value) -> Value:
    """Return a layer's output in the form that is sent between stages; see the module's docstring."""
    if isinstance(value, Tensor):
        return value
    # DeepSpeed itself sends this form, and finds the gradient of its only floating tensor.
    if value[0].dim() > 1 and all(tensor.dtype == torch.int64 for tensor in value[1:]):
        return value
    floats = [tensor for tensor in value if tensor.is_floating_point()]
    # One flat tensor has one dtype: the smallest that represents the values of all.
    kind = floats[0].dtype
    for tensor in floats[1:]:
        kind = torch.promote_types(kind, tensor.dtype)
    flat = torch.cat([tensor.reshape(-1).to(kind) for tensor in floats])
    numbers = [n for tensor in value for n in (DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape)]
    # `Unpacker` reads the list once for each combination of tensor shapes. The number of END entries makes its length
    # depend on the number of rows, so that tuples that differ in rows differ in that combination.
    numbers += [END] * sum(value[0].shape[:1])
    shapes = torch.tensor(numbers, dtype=torch.int64, device=flat.device)
    return flat, shapes, *(tensor.long() for tensor in value if not tensor.is_floating_point())


class Unpacker:
    """Undoes `pack_payload`."""

    def __init__(self) -> None:
        self._layouts: dict[tuple[tuple[int, ...], ...], PackedShapes] = {}

    def __call__(self, value: Value) -> Value:
        """Return the layer's output as it was before `pack_payload`."""
        if isinstance(value, Tensor) or value[0].dim() > 1:
            return value
        flat, shapes, *integers = value
        key = tuple(tuple(tensor.shape) for tensor in value)
        # Reading the list waits for the device, so it is read once for each combination of arriving shapes.
        if key not in self._layouts:
            self._layouts[key] = _read_shapes(shapes.tolist())
        layout = self._layouts[key]
        sizes = [torch.Size(shape).numel() for kind, shape in layout if DTYPES[kind].is_floating_point]
        floats, rest = iter(flat.split(sizes)), iter(integers)
        return tuple(
            next(floats).view(shape).to(DTYPES[kind]) if DTYPES[kind].is_floating_point else next(rest).to(DTYPES[kind])
            for kind, shape in layout
        )


def _read_shapes(numbers: list[int]) -> PackedShapes:
    layout = []
    while numbers and numbers[0] != END:
        kind, dim, *rest = numbers
        layout.append((kind, tuple(rest[:dim])))
        numbers = rest[dim:]
    return tuple(layout)


class FiniteWatch:
    """Watches whether the outputs of one stage, and their gradients, are finite, without waiting for the device."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin a new step."""
        self._outputs: Tensor | None = None
        self._gradients: Tensor | None = None

    @property
    def outputs(self) -> bool:
        """Whether all outputs since the last reset were finite. Waits for the device."""
        return self._outputs is None or bool(self._outputs)

    @property
    def gradients(self) -> bool:
        """Whether all gradients of these outputs were finite. Waits for the device."""
        return self._gradients is None or bool(self._gradients)

    def see(self, output: Value) -> None:
        """Watch a tensor or a tuple of tensors, and the gradients that will arrive for them."""
        # After an evaluation no weights are updated.
        if not torch.is_grad_enabled():
            return
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                self._outputs = _all_finite(self._outputs, tensor)
                if tensor.requires_grad:
                    tensor.register_hook(self._see_gradient)

    def _see_gradient(self, gradient: Tensor) -> None:
        self._gradients = _all_finite(self._gradients, gradient)


def _all_finite(known: Tensor | None, tensor: Tensor) -> Tensor:
    finite = tensor.detach().isfinite().all()
    return finite if known is None else known & finite


def is_recomputed(layers: Sequence[LayerCall]) -> bool:
    """Return whether activation checkpointing applies to a run of layers.

    It applies if any layer has `recompute = True`, or has parameters and no such attribute.
    """
    modules = [layer for layer in layers if isinstance(layer, nn.Module)]
    return any(getattr(module, "recompute", any(True for _ in module.parameters())) for module in modules)


def shared_parameters(layers: Iterable[LayerCall]) -> set[nn.Parameter]:
    counts = Counter(parameter for layer in layers for parameter in _parameters(layer))
    return {parameter for parameter, count in counts.items() if count > 1}


def split_into_blocks(
    layers: Sequence[LayerCall], interval: int, shared: set[nn.Parameter]
) -> Iterator[tuple[list[tuple[int, LayerCall]], bool]]:
    """Yield runs of layers with their indices, and whether each run is recomputed.

    A run is up to `interval` consecutive layers that may be recomputed, or one layer that may not.
    """
    block: list[tuple[int, LayerCall]] = []
    for index, layer in enumerate(layers):
        # Not layers that share parameters: each recomputed block has its own nested backward, and ZeRO-2 and ZeRO-3
        # accept a parameter's gradient only once per backward.
        if interval > 0 and is_recomputed([layer]) and shared.isdisjoint(_parameters(layer)):
            block.append((index, layer))
            if len(block) < interval:
                continue
            yield block, True
        else:
            if block:
                yield block, True
            yield [(index, layer)], False
        block = []
    if block:
        yield block, True


def _parameters(layer: LayerCall) -> Iterable[nn.Parameter]:
    return layer.parameters() if isinstance(layer, nn.Module) else ()


def run_block(block: Sequence[tuple[int, LayerCall]], key: RngKey | None, *given: Tensor) -> Value:
    """Run consecutive layers on the tensors `given`; random numbers depend on `key` and the layers' indices alone."""
    inputs: Value = given if len(given) > 1 else given[0]
    for index, layer in block:
        with nullcontext() if key is None else key.layer(index):
            inputs = layer(inputs)
    return inputs


def deepspeed_topology(layout: Layout) -> PipeModelDataParallelTopology:
    """Return the layout as DeepSpeed's topology, which numbers ranks in the same order."""
    return PipeModelDataParallelTopology(num_pp=layout.pp_size, num_mp=layout.tp_size, num_dp=layout.dp_size)


class SharedLayerSpec(TiedLayerSpec):
    """A tied layer that is always a separate module and shares only the parameters in `tied_weight_attr`."""


def build_layers(layers: Sequence[Layer], start: int, stop: int, seed: int) -> BuiltLayers:
    return build_chosen(layers, range(start, stop), seed)


def build_chosen(layers: Sequence[Layer], indices: Sequence[int], seed: int) -> BuiltLayers:
    """Build the layers at these rising indices; a layer's initial weights depend on `seed` and its index alone.

    Two TiedLayerSpecs of one key and one type become one module, called twice. Two of different types, or two
    SharedLayerSpecs, become two modules that share the parameters named by `tied_weight_attr` of each spec.
    """
    built = BuiltLayers()
    owners: dict[str, nn.Module] = {}
    calls: dict[int, LayerCall] = {}
    for index in _build_order(layers, indices):
        layer = layers[index]
        # A seed per layer: initial weights must not depend on the layers of this stage or their build order.
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
    """Return the order in which layers are built: the first and the last layer, then the others."""
    first = indices[0]
    last = layers[indices[-1]]
    inner = [layers[index] for index in indices[1:-1]]
    between = {spec.key for spec in inner if isinstance(spec, TiedLayerSpec)}
    # A last layer tied to one in the middle is built in order: the first layer of a key names the tied parameter.
    waits = isinstance(last, TiedLayerSpec) and last.key in between
    # These two hold the vocabulary, so they are the largest. Under ZeRO-3 a layer is whole until it is partitioned, so
    # peak memory is lowest if the largest are built while little else exists.
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
    """Return name of a tied parameter in a later layer -> its name in the first layer that holds it."""
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
    """DeepSpeed's PipelineModule with given stage boundaries, and with names and ties as described above.

    Args:
        layers: the whole model's layers; only the layers of this rank's stage are built.
        layout: pipeline x data x tensor sizes.
        boundaries: model chunk i holds layers boundaries[i] to boundaries[i + 1] - 1.
        chunks: which stage has which model chunk; by default each stage has one.
        loss_fn: loss of one micro-batch, `loss_fn(outputs, labels)`.
        checkpoint_interval: layers between stored activations; 0 stores all.
        seed: seed of the layers' initial weights.
        keys: RNG keys of dropout in the layers; None without dropout.

    Attributes:
        finite: watches the outputs that this stage sends (none on the last stage); None for a single chunk.
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
        keys: RngKeys | None = None,
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
        self.finite = FiniteWatch() if chunks.count > 1 else None
        self._keys = keys
        self._blocks: dict[int, list[tuple[list[tuple[int, LayerCall]], bool]]] = {}  # of each chunk
        self._unpack: defaultdict[int, Unpacker] = defaultdict(Unpacker)

    def forward(self, forward_input: Value) -> Value:
        """Run `chunk`; return its output in the form that is sent to the next chunk."""
        chunk = self.chunk
        if chunk not in self._blocks:
            self._blocks[chunk] = list(self.blocks())
        value = forward_input if chunk == 0 else self._unpack[chunk](forward_input)
        key = self._keys.next(chunk) if self._keys is not None and self.training else None
        # As in DeepSpeed's forward, but with keyed dropout.
        for block, recomputed in self._blocks[chunk]:
            if recomputed or key is not None:
                # The function contains the key, so that recomputation draws the same numbers.
                run = partial(run_block, block, key)
                tensors = value if isinstance(value, tuple) else (value,)
                value = self.activation_checkpoint_func(run, *tensors) if recomputed else run(*tensors)
            # Without recomputation and draws, the layers are just called.
            else:
                for _, layer in block:
                    value = layer(value)
        # The last chunk's output goes to the loss, which has its own check (`GuardedLoss`). `parts` has one more
        # boundary than there are chunks.
        if self.finite is None or chunk == len(self.parts) - 2:
            return value
        self.finite.see(value)
        return pack_payload(value)

    def get_additional_losses(self) -> dict[str, Tensor | None] | None:
        """Return the further scalars that the loss reports for the last micro-batch (`loss_fn.reported`).

        DeepSpeed calls this on all stages, and sends the means to every stage.
        """
        return getattr(self.loss_fn, "reported", None) or None


class LayerSequence(nn.Module):
    """All layers on every rank, one after the other, for engines without a pipeline (ZeRO-2, ZeRO-3).

    Args:
        layers: the whole model's layers.
        checkpoint_interval: layers between stored activations; 0 stores all.
        seed: seed of the layers' initial weights.
        keys: RNG keys of dropout in the layers; None without dropout.

    Attributes:
        calls: the modules and functions that the forward calls, in order.
        blocks: runs of calls, each with its index, and whether the run is recomputed.
    """

    def __init__(
        self, layers: Sequence[Layer], *, checkpoint_interval: int, seed: int, keys: RngKeys | None = None
    ) -> None:
        super().__init__()
        self._keys = keys
        built = build_layers(layers, 0, len(layers), seed)
        for index, module in built.modules.items():
            self.add_module(str(index), module)
        self.calls = built.calls
        self.blocks = list(split_into_blocks(built.calls, checkpoint_interval, shared_parameters(built.calls)))

    def forward(self, inputs: Value) -> Value:
        """Return the last layer's output."""
        key = self._keys.next() if self._keys is not None and self.training else None
        for block, recomputed in self.blocks:
            run = partial(run_block, block, key)
            tensors = inputs if isinstance(inputs, tuple) else (inputs,)
            if recomputed and self.training and any(map(_is_floating, tensors)):
                # If no input requires a gradient (a frozen embedding), a reentrant checkpoint gives parameters none.
                if not any(tensor.requires_grad for tensor in tensors):
                    tensors = tuple(each.detach().requires_grad_() if _is_floating(each) else each for each in tensors)
                # Reentrant: in the nested backward ZeRO-3 gathers a block's parameters again. Without it they are
                # gone when their gradients arrive (seen with DeepSpeed 0.19.8).
                inputs = checkpointing.checkpoint(run, *tensors)
            else:
                inputs = run(*tensors)
        return inputs


def _is_floating(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
