"""What the planner predicts of a run, to stand beside what was measured; nothing where it knows no such model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from harness.config import AutoValues, resolve
from harness.config.text.document import from_values
from harness.errors import UserError
from harness.planner.estimate import estimate, memory_of, of_config, require_precision
from harness.planner.hardware import Hardware
from harness.planner.memory import StageMemory
from harness.planner.model_config import decoder_of
from harness.planner.workload import Strategy
from harness.report.run_files import RunFiles

MOST_OFF = 0.03  # share of a run's parameters by which the planner may miscount its model


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """What is known before a run.

    Attributes:
        memory_bytes: by part for each stage; empty where it is not known.
        step_seconds: None unless the hardware was named.
        hardware: its name.
    """

    memory_bytes: Sequence[Mapping[str, float]] = ()
    step_seconds: float | None = None
    hardware: str = ""


def predict(run: RunFiles, hardware: Hardware | None) -> Predicted:
    """Return what the planner predicts of a run, its times only on a hardware."""
    model, block = run.about.get("model"), (run.about.get("arguments") or {}).get("block_size")
    if not (isinstance(model, dict) and "model_type" in model and isinstance(block, int) and run.config):
        return Predicted()
    try:
        resolved = resolve(from_values(run.config), AutoValues(world_size=int(run.layout.get("world_size", 1))))
        shape, counted = decoder_of(model, run.name), run.about.get("parameters")
        if isinstance(counted, int) and abs(shape.parameters / max(counted, 1) - 1) > MOST_OFF:
            return Predicted()  # the planner reads another model from the config than the one that ran
        workload, strategy = of_config(resolved, shape, block, on_cpu=hardware is not None and hardware.is_host)
        strategy = replace(strategy, boundaries=_boundaries(run, len(workload.shape.layers) + 2, strategy))
        if hardware is None:
            return Predicted(memory_bytes=[_parts(stage) for stage in memory_of(workload, strategy)])
        require_precision(hardware, resolved.precision)
        found = estimate(hardware, workload, strategy)
    except UserError:
        return Predicted()
    return Predicted(
        memory_bytes=[_parts(stage) for stage in found.stages],
        step_seconds=found.seconds.total,
        hardware=hardware.name,
    )


def _boundaries(run: RunFiles, layers: int, strategy: Strategy) -> tuple[int, ...] | None:
    """Return where the run was cut as it is shown; None if it does not say.

    By measured times, by a user's pattern of class names and after layers have moved that is not what is planned.
    """
    found = run.profiles[-1].stage_boundaries if run.profiles else run.about.get("stage_boundaries")
    if not isinstance(found, list) or len(found) != strategy.pp_size * strategy.chunks_per_stage + 1:
        return None
    if found[0] != 0 or found[-1] != layers or any(a >= b for a, b in pairwise(found)):
        return None
    return tuple(found)


def _parts(stage: StageMemory) -> dict[str, float]:
    """Return the parts that are measured: of what a step makes, the measurement knows the sum alone."""
    made = stage.activations + stage.logits + stage.buffers
    return {
        "parameters": stage.parameters,
        "gradients": stage.gradients,
        "optimizer": stage.optimizer,
        "activations": made,
    }
