"""Optional parts around the core, which the core never imports.

Each field of `Parts` is one extension point. `harness/composition.py` fills in the installed parts. A run that asks
for an absent part is refused; any other run trains without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self, TypeAlias, TypeVar

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from harness.arguments import TrainingArguments
from harness.batches.stream import StepReader
from harness.checkpoint.directories import TrainingProgress
from harness.config import ConfigCheck, Resolved
from harness.config.values.json_object import JsonObject
from harness.console import Console
from harness.errors import UserError
from harness.hf.adapters import Adapters
from harness.hf.causal import CausalModel
from harness.hf.context.plan import TokenSplitSupport
from harness.hf.forward.routers import FindRouters
from harness.hf.skeleton import ModelSource
from harness.parallel.token_exchange import ExchangeTokens
from harness.resilience.process.watching import Watch
from harness.topology.agreement import HostValues
from harness.topology.env import LaunchEnv
from harness.topology.groups import Groups
from harness.topology.hosts import Hosts
from harness.topology.layout import Layout
from harness.training.callbacks import StepRecord, TrainerCallback, TrainerControl, TrainerState
from harness.training.engine.optimizer import GivenOptimizer
from harness.training.engine.spec import EngineSpec, GradientCompression
from harness.training.parts.data import DataPart

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import BitsAndBytesConfig

Part = TypeVar("Part")


class RunPrediction(Protocol):
    """The predicted memory and speed of a run; its `str` is the line for the user."""

    def require_memory(self) -> str | None:
        """Raise UserError if the run cannot fit into memory; return a warning if its size is a guess."""

    def for_boundaries(self, boundaries: Sequence[int]) -> Self:
        """Return the prediction for the stage boundaries that the run has chosen."""

    def as_json(self) -> JsonObject:
        """Return the JSON for run.json."""


class PredictRun(Protocol):
    """Predicts memory and speed of a run on samples of `length` tokens; None if that is impossible.

    `ranks` are this host's ranks, `adapters` says whether adapters are trained instead of the model, and `sequences` is
    the number of sequences per sample.
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
    """Copies complete checkpoints and the exported model to a second place."""

    def read_back(self, wanted: str | Path | bool) -> None:
        """Read the checkpoint that a run resumes back to `output_dir`, if that has lost it; all ranks may call it.

        Args:
            wanted: the checkpoint's path; "auto" or True for the newest one.

        Raises:
            UserError: on rank 0, if the second place cannot be read or lacks the named checkpoint.
        """

    def copy_model(self, directory: Path) -> None:
        """Copy the model exported to `directory` and wait. All ranks call it; errors become warnings."""


class ModelExport(Protocol):
    """The trained model of a run as a HuggingFace directory, or its adapters as peft's."""

    def write_configs(self, folder: Path) -> None:
        """Write the files that HuggingFace needs besides the weights of a checkpoint; one rank calls it."""

    def write(self, directory: Path) -> None:
        """Write the model into `directory`; all ranks call it. Raises NotSaved, on all ranks, if that fails."""

    def gather(self) -> PreTrainedModel | None:
        """Return the whole model on the CPU of rank 0, None on others; all ranks call it.

        Raises UserError for a list of layers, and for a model with adapters.
        """


VerifySharding: TypeAlias = Callable[[CausalModel, EngineSpec, Groups, Console], None]
"""Compares the sharded model with the whole one (`--verify_plan`). Raises UserError on all ranks if they differ."""

RequirePackable: TypeAlias = Callable[[PretrainedConfig, int, torch.device, torch.dtype], None]
"""Raises UserError if the model of a config does not keep the documents of packed rows apart.

Arguments: the config, the number of rows in a micro-batch, the run's device and dtype.
"""

PlanTokens: TypeAlias = Callable[[PretrainedConfig], TokenSplitSupport]
"""Determines which modules of a config's model can compute a subset of the tokens."""


class ChecksOutput(Protocol):
    """Checks before the first step that checkpoints can be written to the output directory; all ranks call both."""

    def require_shared(self, output_dir: Path, rank: int, world_size: int) -> None:
        """Raise UserError on all ranks if one cannot see a file that rank 0 writes there."""

    def require_writable(self, output_dir: Path, here: HostValues[int], rank: int, console: Console) -> None:
        """Raise UserError on all ranks if no checkpoint can be written; warn if hosts do not share the run's lock."""


class FuseOperations(Protocol):
    """Has layers compute norms, rotary embeddings and gated activations in fewer operations."""

    def __call__(
        self, source: ModelSource, device: torch.device, *, own: bool, liger: bool | str
    ) -> tuple[Callable[[nn.Module], None], str]:
        """Return what changes a layer that has its weights and lies on `device`, and a line for the user or "".

        `own`: by the harness's kernels. `liger`: by those of liger-kernel instead, or, if "auto", where `own` leaves a
        module alone. Raises UserError if `liger` is True and that cannot be.
        """


class FindAdapters(Protocol):
    """Finds the source of a model (None for a list of layers) and the adapters to train.

    Adapters come from a model in memory or from peft's config; transformers' config quantises the weights under them.
    Raises UserError if they cannot be trained.
    """

    def __call__(
        self, model: object, peft_config: LoraConfig | None, quantization_config: BitsAndBytesConfig | None
    ) -> tuple[ModelSource | None, Adapters | None]: ...


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
    """Measures a run's pipeline stages and moves layers between them; all ranks call it."""

    def after_step(self, record: StepRecord) -> bool:
        """Return whether layers have moved after a step, in which case the run has a new engine."""


class RollsBack(Protocol):
    """Rolls a run back to its newest checkpoint after a step that is not finite; all ranks call it."""

    def begin(self, save: Callable[[], object]) -> None:
        """Save the initial state if no checkpoint exists."""

    def guarding(self, rewind: Callable[[int], None], settle: Callable[[], None]) -> AbstractContextManager[None]:
        """Roll back if the block raises NonFiniteStep.

        Args:
            rewind: drops what is recorded of the steps after one.
            settle: completes a pending save.
        """


class BestModel(Protocol):
    """Keeps the best evaluation of a run in its state, and loads the best model at the end."""

    def require_metric_of_one(self, args: TrainingArguments, evaluation: object) -> None:
        """Raise UserError for several data sets if `metric_for_best_model` does not name the metric of one."""

    def note_evaluation(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, metrics: Mapping[str, object]
    ) -> None:
        """Record an evaluation if it is the best so far; request its checkpoint if the arguments want it."""

    def forget_unsaved(self, args: TrainingArguments, state: TrainerState) -> None:
        """Fall back to the best evaluation that has a checkpoint, if the best one could not be saved."""

    def best_as_saved(self, args: TrainingArguments, state: TrainerState) -> JsonObject:
        """Return the best evaluation so far as JSON for a checkpoint."""

    def restore_best(
        self, args: TrainingArguments, state: TrainerState, saved: JsonObject, output_dir: Path
    ) -> str | None:
        """Restore the best evaluation from its JSON; return a warning if its model is lost. All ranks call it."""

    def load_best(
        self, args: TrainingArguments, state: TrainerState, load: Callable[[Path], TrainingProgress], console: Console
    ) -> None:
        """With `--load_best_model_at_end`, `load` the best evaluation's checkpoint; all ranks call it."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts of a run; None for an absent part.

    Attributes:
        check_config: reads the config and refuses a wrong one with all findings; without it, such a run fails inside
            DeepSpeed.
        forecast: predicts memory and speed, reported before the model is built.
        progress: makes the callback that shows each step; called with the console, and with tokens or samples.
        profiling: makes the callback that profiles N steps (`--profile N`).
        pushing: makes the callback of `--push_checkpoints_to`, which also restores a lost checkpoint to resume.
        exporting: makes the object that exports a run's model.
        provenance: returns the origin of a run for `run.json`, given the run and the host of each rank.
        data: makes samples from text and conversations.
        watch: ends a run if a rank fails, hangs or is stopped.
        verify_sharding, require_packable, plan_tokens: each tries one property of the model on a tiny copy.
        output_checks: checks that checkpoints can be written; without it, a run finds out at its first save.
        adapters: finds the adapters to train instead of the model's weights.
        fusing: fuses operations of layers; without it they run as transformers has written them.
        routers: finds the routers of a mixture of experts that has a router loss (`--output_router_logits`).
        token_exchange: sends tokens to experts on other data-parallel ranks.
        read_ahead: reads steps in that many worker processes (`--dataloader_num_workers`).
        host_collectives: carries the collectives of CPU ranks through memory of their host; without it, gloo does.
        compression: reduces gradients between data-parallel ranks in 8 or 4 bits.
        fp8: returns a function that has a loaded layer compute in fp8 (`--fp8`). UserError where the device cannot.
        measure_layers: times the layers of a model on a micro-batch (`pipeline.partition: measured`).
        placement_advice: returns a warning if tensor-parallel groups cross hosts.
        rebalancer: makes the object that rebalances a run's stages (`--rebalance_steps`).
        best_model: finds the best model by an evaluation's metric.
        early_stopping: makes the callback that stops a run, given the patience and, if not 0, the threshold.
        rollback: makes the object that rolls a run back (`--nonfinite rollback`).
        user_optimizer: checks the Trainer's `optimizers`, given the run's inputs, model, adapters, config and layout.
        monitors: opens monitors, given their sections of the DeepSpeed JSON, the run's id and the first step.
        argument_notes: returns notes on HuggingFace arguments that have no effect.
        accept_callback: returns the callback to call for a user's. UserError if it is for HuggingFace's Trainer alone.
    """

    check_config: ConfigCheck | None = None
    forecast: PredictRun | None = None
    progress: Callable[[Console, str], TrainerCallback] | None = None
    profiling: Callable[[int], TrainerCallback] | None = None
    pushing: Callable[[TrainingArguments, LaunchEnv, Console], PushingCallback] | None = None
    exporting: Callable[..., ModelExport] | None = None
    provenance: Callable[..., JsonObject] | None = None
    data: DataPart | None = None
    watch: Watch = field(default_factory=Watch)
    verify_sharding: VerifySharding | None = None
    require_packable: RequirePackable | None = None
    plan_tokens: PlanTokens | None = None
    output_checks: ChecksOutput | None = None
    adapters: FindAdapters | None = None
    fusing: FuseOperations | None = None
    routers: FindRouters | None = None
    token_exchange: ExchangeTokens | None = None
    read_ahead: Callable[..., StepReader] | None = None
    host_collectives: Callable[[Groups], None] | None = None
    compression: GradientCompression | None = None
    fp8: Callable[[EngineSpec, torch.device, PretrainedConfig], Callable[[nn.Module], None]] | None = None
    measure_layers: Callable[..., list[float]] | None = None
    placement_advice: Callable[[Layout, Hosts], str | None] | None = None
    rebalancer: Callable[..., RebalancesStages] | None = None
    best_model: BestModel | None = None
    early_stopping: Callable[..., TrainerCallback] | None = None
    rollback: Callable[..., RollsBack] | None = None
    user_optimizer: Callable[..., GivenOptimizer] | None = None
    monitors: Callable[[Mapping[str, JsonObject], str, int], RunMonitors] | None = None
    argument_notes: Callable[[Mapping[str, object]], Sequence[str]] = lambda _: ()
    accept_callback: Callable[[TrainerCallback], TrainerCallback] = lambda callback: callback


def needed(part: Part | None, flag: str, folder: str) -> Part:
    """Return the part that a flag needs. Raises UserError if its folder is not installed."""
    if part is None:
        raise UserError(f"{flag} needs {folder}, which is not installed: start without {flag}")
    return part
