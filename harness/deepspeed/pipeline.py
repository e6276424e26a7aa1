"""DeepSpeed's PipelineModule with stage boundaries and layers that the harness provides."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.topology import ProcessTopology
from torch import nn

from harness.schedules import ModelChunks

LayerCall: TypeAlias = Callable[..., Any]
"""A layer in the forward: a module or a function."""
Layer: TypeAlias = LayerSpec | nn.Module | LayerCall
"""A layer as PipelineModule takes it."""
Tie: TypeAlias = dict[str, Any]
"""DeepSpeed's record of a tied layer."""


class TiedWeights(nn.Module):
    """Only the parameters that a tied layer shares with other layers of the same key."""

    def __init__(self, owner: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        for index, name in enumerate(names):
            self.register_parameter(str(index), owner.get_parameter(name))

    @property
    def names(self) -> list[str]:
        """Names of the shared parameters in this module ("0", "1", ...), in the order of the spec."""
        return list(self._parameters)


@dataclass(frozen=True)
class BuiltLayers:
    """The layers of one stage.

    Attributes:
        calls: the modules and functions that the forward calls, in order.
        modules: index of the pipeline layer -> module, registered under it; a module of two specs appears once.
        tied: key -> the parameters shared under that key on this stage.
    """

    calls: list[LayerCall] = field(default_factory=list)
    modules: dict[int, nn.Module] = field(default_factory=dict)
    tied: dict[str, TiedWeights] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class StageBuilder:
    """The decisions that `GivenStages` takes instead of DeepSpeed.

    Attributes:
        boundaries: model chunk i holds layers boundaries[i] to boundaries[i + 1] - 1.
        chunks: assigns model chunks to stages.
        build: `build(layers, indices, seed)` builds and returns the layers with these indices.
        is_recomputed: whether activation checkpointing applies to a run of consecutive layers.
    """

    boundaries: Sequence[int]
    chunks: ModelChunks
    build: Callable[[Sequence[Layer], Sequence[int], int], BuiltLayers]
    is_recomputed: Callable[[Sequence[LayerCall]], bool]


class GivenStages(PipelineModule):
    """A PipelineModule with the boundaries and layers of a `StageBuilder`; other arguments are DeepSpeed's.

    Attributes:
        chunk: the model chunk of the next forward pass.
    """

    chunk: int
    tied_comms: dict[str, Tie]

    def __init__(
        self, layers: Sequence[Layer], builder: StageBuilder, topology: ProcessTopology, **options: object
    ) -> None:
        # Not as an attribute: DeepSpeed's constructor needs it before nn.Module is initialised.
        self.__dict__["_builder"] = builder
        super().__init__(layers, topology=topology, **options)
        # Only after the constructor, which broadcasts the initial values of all tied weights. Frozen ones need them,
        # too, but have no gradient to sum.
        for key, tie in list(self.tied_comms.items()):
            module = tie["module"]
            tie["weight_attr"] = [name for name in tie["weight_attr"] if module.get_parameter(name).requires_grad]
            if not tie["weight_attr"]:
                del self.tied_comms[key]

    def indexed_layers(self) -> list[tuple[int, LayerCall]]:
        """Return this stage's layers, each with its index in the whole pipeline."""
        return list(zip(self._indices, self.forward_funcs, strict=True))

    def chunk_layers(self) -> list[list[tuple[int, LayerCall]]]:
        """Return the layers of each model chunk of this stage, each with its index in the whole pipeline."""
        bounds = [self.parts[chunk : chunk + 2] for chunk in self._chunks.of_stage(self.stage_id)]
        layers = self.indexed_layers()
        return [[each for each in layers if first <= each[0] < last] for first, last in bounds]

    def blocks(self) -> Iterator[tuple[list[tuple[int, LayerCall]], bool]]:
        """Yield runs of layers of `chunk` with their indices, and whether each run is recomputed."""
        first, stop = self.parts[self.chunk : self.chunk + 2]
        start = self._indices.index(first)
        layers = self.indexed_layers()[start : start + stop - first]
        interval = self.activation_checkpoint_interval
        size = interval or len(layers)  # 0 recomputes nothing: one run
        for start in range(0, len(layers), size):
            block = layers[start : start + size]
            yield block, interval > 0 and self._is_checkpointable([call for _, call in block])

    def stage_owner(self, layer_idx: int) -> int:
        # DeepSpeed searches the boundaries by stage, but with several chunks per stage they are by chunk.
        return self._chunks.stage_of(bisect_right(self.parts, layer_idx) - 1)

    # Otherwise torch would record the broadcast, and warn in each backward through a tied weight.
    @torch.no_grad()
    def _synchronize_tied_weights(self) -> None:
        super()._synchronize_tied_weights()

    @property
    def _chunks(self) -> ModelChunks:
        chunks: ModelChunks = self.__dict__["_builder"].chunks
        return chunks

    def _partition_layers(self, method: str = "uniform") -> None:  # noqa: ARG002  # DeepSpeed passes it as a keyword
        self.parts = list(self.__dict__["_builder"].boundaries)
        own = self._chunks.of_stage(self.stage_id)
        self.chunk = own[0]
        self._indices = [index for chunk in own for index in range(self.parts[chunk], self.parts[chunk + 1])]
        self._set_bounds(start=self._indices[0], stop=self._indices[-1] + 1)

    def _build(self) -> None:
        built = self.__dict__["_builder"].build(self._layer_specs, self._indices, self.base_seed)
        self.forward_funcs = built.calls
        for index, module in built.modules.items():
            self.add_module(str(index), module)
        # Not registered, so that parameters keep their layer's name. DeepSpeed leaves everything in here out of the
        # gradient norm on all stages but the first, so it must hold only the shared parameters.
        del self.tied_modules
        self.__dict__["tied_modules"] = built.tied
        self.tied_weight_attrs = {key: weights.names for key, weights in built.tied.items()}

    def _is_checkpointable(self, funcs: Sequence[LayerCall]) -> bool:
        return bool(self.__dict__["_builder"].is_recomputed(funcs))
