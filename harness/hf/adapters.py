"""The interface of adapters, which are trained instead of a model's own weights, and their names."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Protocol

from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from harness.hf.skeleton import ModelSource
from harness.hf.weights.layer_weights import ModelWeights, WeightSource
from harness.parallel.comm import TensorParallel
from harness.parallel.plans.plan import Plan
from harness.parallel.token_exchange import Neighbours

NAME = "default"
PREFIX = "base_model.model."


class Adapters(Protocol):
    """Adapters of a decoder."""

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Existing adapter values by name in the model; others are initialised."""

    @property
    def rank(self) -> int:
        """The rank of the adapters' matrices."""

    @property
    def replaced(self) -> Collection[str]:
        """Names of weights of the base model for which the adapters hold other values."""

    def inject(self, model: PreTrainedModel, *, keep_ties: bool) -> None:
        """Put the adapters' layers into `model`, on meta, and freeze the rest.

        Args:
            keep_ties: whether tied weights must stay tied, because the checkpoint has values for only one.

        Raises:
            UserError: the adapters do not fit the model.
        """

    def weights(self, base: ModelWeights, seed: int) -> WeightSource:
        """Return the weights of layers with adapters: the layers' own from `base`."""

    def cut(
        self,
        layer: nn.Module,
        plan: Plan,
        tensor: TensorParallel,
        config: PretrainedConfig,
        *,
        local_logits: bool,
        neighbours: Neighbours,
    ) -> None:
        """Shard a pipeline layer with its adapters; see `plans.apply.cut`. UserError if an adapter cannot follow."""

    def fingerprint(self, base_seed: int | None) -> str:
        """Return the settings as JSON, equal for runs that can resume each other's checkpoints.

        Args:
            base_seed: seed of a base model that is initialised, else None.
        """

    def base_checksums(self, source: ModelSource) -> dict[str, str]:
        """Return checksums of the base model's weights by name. Raises UserError if they cannot be read."""

    def write_config(self, base: str, directory: Path) -> None:
        """Write adapter_config.json for adapters on the model at `base`; one rank calls it. Raises OSError."""


def saved_name(name: str) -> str:
    """Return peft's name of a trained parameter."""
    return PREFIX + name.replace(f".{NAME}.", ".")


def plain_name(name: str) -> str:
    """Return a parameter's name in the model without adapters."""
    return name.replace(".base_layer", "")
