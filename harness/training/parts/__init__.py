"""What a run can do without: parts that lie around the core and that the core never imports.

Each field of `Parts` is one extension point. `harness/composition.py` fills in the parts that are installed; a run that
asks for one that is absent is refused, and any other run trains without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self, TypeAlias, TypeVar

import torch
from transformers import PretrainedConfig

from harness.arguments import TrainingArguments
from harness.config import ConfigCheck, Resolved
from harness.config.values.json_object import JsonObject
from harness.console import Console
from harness.errors import UserError
from harness.hf.adapters import Adapters
from harness.hf.causal import CausalModel
from harness.hf.context.plan import ContextPlan
from harness.hf.skeleton import ModelSource
from harness.parallel.collectives import OpenMemory
from harness.resilience.process.watching import Watch
from harness.topology.env import LaunchEnv
from harness.topology.layout import Layout
from harness.training.callbacks import StepRecord, TrainerCallback
from harness.training.engine.context import EngineContext, GradientCompression
from harness.training.parts.data import DataPart

if TYPE_CHECKING:
    from peft import LoraConfig

Part = TypeVar("Part")


class FindCertificate(Protocol):
    """Finds the certificate of `ds-harness verify` for a config, a model and versions of libraries; None without one.

    `config` is the DeepSpeed JSON as it is written; `model` the entries of the model's config that change what it
    computes.
    """

    def __call__(
        self, config: Mapping[str, object], resolved: Resolved, model: Mapping[str, object], versions: JsonObject
    ) -> JsonObject | None: ...


class RunPrediction(Protocol):
    """The predicted memory and speed of a run; its `str` is the line for the user."""

    def require_memory(self) -> str | None:
        """Raise UserError if the run cannot fit into memory; return a warning if its size is a guess."""

    def for_boundaries(self, boundaries: Sequence[int]) -> Self:
        """Return the prediction for the stage boundaries that the run has chosen."""

    def as_json(self) -> JsonObject:
        """Return the JSON for run.json."""


class PredictRun(Protocol):
    """Predicts memory and speed of a run on samples of `length` tokens; None if that is not possible.

    `ranks` are those of this host; `adapters`: whether adapters are trained instead of the model; `sequences`: those of
    a sample.
    """

    def __call__(
        self,
        source: ModelSource,
        resolved: Resolved,
        layout: Layout,
        args: TrainingArguments,
        *,
        length: int,
        device: torch.device,
        ranks: Sequence[int],
        adapters: bool,
        sequences: int,
    ) -> RunPrediction | None: ...


class PushingCallback(TrainerCallback):
    """Copies finished checkpoints to a second place, and the exported model."""

    def copy_model(self, directory: Path) -> None:
        """Copy a model that was exported to `directory`, and wait for it. All ranks call it; errors are warnings."""


class WholeModelFiles(Protocol):
    """The files of a vision-language model whose text decoder is trained."""

    def write(self, text: Path, directory: Path) -> None:
        """Write the whole model to `directory`, with the text decoder that was exported to `text`; one rank calls it.

        Raises UserError or OSError if a file cannot be written.
        """


VerifySharding: TypeAlias = Callable[[CausalModel, EngineContext, Console], None]
"""Compares the sharded model with the whole one, as `--verify_plan` asks. UserError on all ranks if they differ."""

RequirePackable: TypeAlias = Callable[[PretrainedConfig, int, torch.device, torch.dtype], None]
"""Raises UserError if the model of a config does not keep the documents of packed rows apart.

Arguments: the config, the rows of a micro-batch, the run's device and number format.
"""

PlanTokens: TypeAlias = Callable[[PretrainedConfig], ContextPlan]
"""Finds out which modules of the model of a config can compute a part of the tokens."""


class FindAdapters(Protocol):
    """Finds the source of a model (None for a list of layers), and the adapters to train instead of its own weights.

    They are those of a model in memory, or new ones by peft's config. Raises UserError if they cannot be trained.
    """

    def __call__(self, model: object, peft_config: LoraConfig | None) -> tuple[ModelSource | None, Adapters | None]: ...


class RunMonitors(Protocol):
    """The monitors of a run: TensorBoard, W&B, Comet, CSV files."""

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Write numbers by name, such as `train/loss`. Warn if that fails."""

    def write_text(self, name: str, text: str, step: int) -> None:
        """Write a text."""

    def rewind(self, step: int) -> None:
        """Drop the values of steps after `step`."""

    def close(self) -> None:
        """Flush and close."""


class RebalancesStages(Protocol):
    """Measures the pipeline stages of a run, and moves layers between them; all ranks call it."""

    def after_step(self, record: StepRecord) -> bool:
        """Return whether layers have moved after a step: the run then has another engine."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts of a run. None: the part is absent.

    Attributes:
        check_config: refuses a wrong config with all findings; without it such a run fails where DeepSpeed does.
        forecast: predicts memory and speed, which the run reports before it builds the model.
        profiling: makes the callback that profiles that many steps (`--profile N`).
        pushing: makes the callback of `--push_checkpoints_to`, and reads the checkpoint to resume back if it is lost.
        whole_model: finds the vision-language model that a text decoder comes from, to export it whole.
        certificate: finds the certificate that `run.json` gets.
        data: makes samples of text and conversations.
        watch: ends a run of which a rank fails, hangs or is stopped.
        verify_sharding, require_packable, plan_tokens: try the model on a tiny copy, each for one purpose.
        adapters: finds the adapters that are trained instead of a model's own weights.
        host_memory: opens memory through which CPU ranks of one host sum and gather.
        compression: sends gradients between data-parallel ranks in 8 or 4 bits.
        rebalancer: called with the run; makes what balances its stages (`--rebalance_steps`).
        monitors: called with their sections of the DeepSpeed JSON, the run's id and the first step; opens them.
        argument_notes: says which arguments of HuggingFace's change nothing, although they ask for more.
    """

    check_config: ConfigCheck | None = None
    forecast: PredictRun | None = None
    profiling: Callable[[int], TrainerCallback] | None = None
    pushing: Callable[[TrainingArguments, LaunchEnv, Console], PushingCallback] | None = None
    whole_model: Callable[[ModelSource], WholeModelFiles | None] = lambda _: None
    certificate: FindCertificate | None = None
    data: DataPart | None = None
    watch: Watch = field(default_factory=Watch)
    verify_sharding: VerifySharding | None = None
    require_packable: RequirePackable | None = None
    plan_tokens: PlanTokens | None = None
    adapters: FindAdapters | None = None
    host_memory: OpenMemory | None = None
    compression: GradientCompression | None = None
    rebalancer: Callable[..., RebalancesStages] | None = None
    monitors: Callable[[Mapping[str, JsonObject], str, int], RunMonitors] | None = None
    argument_notes: Callable[[Mapping[str, object]], Sequence[str]] = lambda _: ()


def needed(part: Part | None, flag: str, folder: str) -> Part:
    """Return the part that a flag needs. UserError if `folder`, which holds it, is not installed."""
    if part is None:
        raise UserError(f"{flag} needs {folder}, which is not installed: start without {flag}")
    return part
