"""What the planner predicts of a run, to stand beside what was measured; nothing where it knows no such model."""

from __future__ import annotations

from itertools import pairwise

from harness.config import AutoValues, resolve
from harness.config.text.document import from_values
from harness.errors import UserError
from harness.planner.estimate import Prediction, predict
from harness.planner.hardware import Hardware
from harness.planner.memory import StageMemory
from harness.planner.model_config import decoder_of
from harness.report.run_files import RunFiles

MOST_OFF = 0.03  # share of a run's parameters by which the planner may miscount its model


def predict_run(run: RunFiles, hardware: Hardware | None) -> Prediction | None:
    """Return what the planner predicts of a run, its times only on a hardware; None for a model that it cannot read."""
    model, block = run.about.get("model"), (run.about.get("arguments") or {}).get("block_size")
    if not (isinstance(model, dict) and "model_type" in model and isinstance(block, int) and run.config):
        return None
    try:
        resolved = resolve(from_values(run.config), AutoValues(world_size=int(run.layout.get("world_size", 1))))
        shape, counted = decoder_of(model, run.name), run.about.get("parameters")
        if isinstance(counted, int) and abs(shape.parameters / max(counted, 1) - 1) > MOST_OFF:
            return None  # the planner reads another model from the config than the one that ran
        boundaries = _boundaries(run, len(shape.layers) + 2, resolved.chunks.count)
        on_cpu = bool(run.profiles) and run.profiles[-1].device == "cpu"
        return predict(resolved, shape, block, hardware=hardware, on_cpu=on_cpu, boundaries=boundaries)
    except UserError:
        return None


def _boundaries(run: RunFiles, layers: int, chunks: int) -> tuple[int, ...] | None:
    """Return where the run was cut as it is shown; None if it does not say.

    By measured times, by a user's pattern of class names and after layers have moved that is not what is planned.
    """
    found = run.profiles[-1].stage_boundaries if run.profiles else run.about.get("stage_boundaries")
    if not isinstance(found, list) or len(found) != chunks + 1:
        return None
    if found[0] != 0 or found[-1] != layers or any(a >= b for a, b in pairwise(found)):
        return None
    return tuple(found)


def measured_parts(stage: StageMemory) -> dict[str, float]:
    """Return the bytes of the parts that a profile measures: of what a step makes, it knows the sum alone."""
    made = stage.activations + stage.logits + stage.buffers
    return {
        "parameters": stage.parameters,
        "gradients": stage.gradients,
        "optimizer": stage.optimizer,
        "activations": made,
    }
