"""What of an engine a checkpoint stores: the tensors that this rank holds, and what the optimizer keeps for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from deepspeed.runtime.engine import DeepSpeedEngine

from harness.checkpoint.directories import TrainingProgress
from harness.checkpoint.tensors.coverage import require_each_value_once
from harness.checkpoint.tensors.local_shard import LocalShard, local_shards
from harness.checkpoint.tensors.tensor_writer import require_storable
from harness.checkpoint.tensors.whole_tensors import entry_of
from harness.deepspeed.engine import loss_scaling
from harness.deepspeed.flat_tensors import EngineOptimizer, Run, SteppedOn
from harness.deepspeed.nvme_states import states_in_memory
from harness.deepspeed.optimizer_states import Template, counted, template, torch_optimizer
from harness.parallel.gradients.compressed import CompressedReduction
from harness.topology.agreement import all_or_none, values_of_all
from harness.topology.groups import Groups

MODEL, ADAPTERS = "model", "adapter_model"


@dataclass(frozen=True, kw_only=True)
class EngineState:
    """What of an engine is saved and loaded.

    Attributes:
        rename: the name in a checkpoint of a tensor of the engine's module.
        adapters: whether adapters are trained; the weights that they stand on are read from where they came.
        compression: averages the gradients in few bits; None where they are not compressed.
        one_host: whether all ranks are on one host, so that what one writes the others can read before it is on the
            disk.
    """

    engine: DeepSpeedEngine
    groups: Groups
    rename: Callable[[str], str]
    adapters: bool
    compression: CompressedReduction | None = None
    one_host: bool = False

    @property
    def stem(self) -> str:
        """The name of the file of weights, without its suffix."""
        return ADAPTERS if self.adapters else MODEL

    def held(self) -> list[LocalShard]:
        """Return what this rank holds of the model's tensors."""
        return local_shards(
            self.engine.module, self.engine.optimizer, self.groups, rename=self.rename, trained_only=self.adapters
        )


def stored(
    state: EngineState, progress: TrainingProgress
) -> tuple[list[tuple[str, list[LocalShard]]], TrainingProgress]:
    """Return what this rank holds of the tensors of each file, and the progress with what the engine counts; all ranks
    call it. What lies on NVMe is copied into memory."""
    with states_in_memory(state.engine.optimizer):
        return _stored(state, progress)


def _stored(
    state: EngineState, progress: TrainingProgress
) -> tuple[list[tuple[str, list[LocalShard]]], TrainingProgress]:
    optimizer, held = state.engine.optimizer, state.held()
    kept = templates(optimizer, held)
    counters: dict[str, float] = {}
    for each, _ in stepped(held):
        counters.update(counted(optimizer, each, kept[each.param_group, each.tensor.dim()]))
    own = [name for name in kinds(kept.values()) if of_state(optimizer, held, name)]
    of_all = values_of_all((own, counters))
    names = sorted({name for found, _ in of_all for name in found})
    files = [(state.stem, held), *((name, of_state(optimizer, held, name)) for name in names)]
    return files, replace(
        progress,
        skipped_steps=state.engine.skipped_steps,
        optimizer_states=names,
        counters={name: value for _, found in of_all for name, value in found.items()},
        loss_scaling=loss_scaling(optimizer),
    )


def require_savable(state: EngineState) -> list[str]:
    """Return the names of what the optimizer keeps for each weight; all ranks call it.

    Raises UserError if a checkpoint would lack values of the model or of the optimizer, or no file can hold them.
    """
    with states_in_memory(state.engine.optimizer):
        held = state.held()
        found = templates(state.engine.optimizer, held)
        require_each_value_once(held, state.groups)
        all_or_none(lambda: require_storable(map(entry_of, held)))
    return kinds(found.values())


def templates(optimizer: EngineOptimizer, held: Sequence[LocalShard]) -> dict[tuple[int, int], Template]:
    """Return what the optimizer keeps, by parameter group and by the dimensions of what is stepped on."""
    found: dict[tuple[int, int], Template] = {}
    for each, _ in stepped(held):
        key = each.param_group, each.tensor.dim()
        if key not in found:
            found[key] = template(optimizer, each)
    return found


def kinds(templates: Iterable[Template]) -> list[str]:
    """Return the names of what is kept for each weight, each a file of a checkpoint."""
    return sorted({name for found in templates for name in found.elements})


def of_state(optimizer: EngineOptimizer, held: Sequence[LocalShard], name: str) -> list[LocalShard]:
    """Return what this rank holds of the values `name` of the optimizer."""
    state = torch_optimizer(optimizer).state
    found = ((each, state.get(each.stepped[0].tensor, {}).get(name)) for each in held if each.stepped is not None)
    return [each.of_state(values) for each, values in found if values is not None]


def stepped(held: Sequence[LocalShard]) -> list[tuple[SteppedOn, Run]]:
    """Return the tensors that the optimizer steps on, with the run of each that a tensor of the model is."""
    return [each.stepped for each in held if each.stepped is not None]
