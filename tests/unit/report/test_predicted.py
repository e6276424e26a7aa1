"""What the report shows of a run's own prediction, and what the planner predicts of it on other devices."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.planner.hardware import load_hardware
from harness.report.run_files import RunFiles, expected_parts, predict_run
from tests.unit.report.profile.made import profile

TINY = Path(__file__).resolve().parents[3] / "models/presets/tiny-llama/config.json"
OUTER = 258 * 128 * 4  # bytes of the embedding
LAYER = (3 * 128 * 384 + 2 * 128 * 128 + 2 * 128 * 64 + 2 * 128) * 4  # and of a decoder layer with its norms
HEAD = OUTER + 128 * 4


def run(boundaries: list[int] | None, **pipeline: Any) -> RunFiles:
    about = {
        "model": json.loads(TINY.read_text()),
        "arguments": {"block_size": 32},
        "layout": {"world_size": 2},
        "config": {"train_micro_batch_size_per_gpu": 1, "pipeline": {"stages": 2, **pipeline}},
        "stage_boundaries": boundaries,
    }
    return RunFiles(name="run", folder=Path("run"), about=about, steps=[])


def parameters(shown: RunFiles) -> list[float]:
    found = predict_run(shown, load_hardware("cpu", 2))
    return [stage.parameters for stage in found.stages] if found else []


@pytest.mark.parametrize(
    ("boundaries", "pipeline", "layers"),
    [
        pytest.param([0, 5, 6], {}, (4, 0), id="moved"),
        pytest.param([0, 4, 6], {"partition": "type:LlamaDecoderLayer"}, (3, 1), id="by-a-name-of-the-model"),
        pytest.param(None, {}, (2, 2), id="an-older-file"),
        pytest.param([0, 5, 9], {}, (2, 2), id="of-another-model"),
    ],
)
def test_memory_is_of_the_stages_as_the_run_cut_them(boundaries, pipeline, layers) -> None:
    first, last = layers
    assert parameters(run(boundaries, **pipeline)) == [OUTER + first * LAYER, HEAD + last * LAYER]


def test_a_stage_has_all_its_parts() -> None:
    folded = parameters(run([0, 1, 2, 4, 6], schedule="zero-bubble-v"))
    assert folded == [OUTER + HEAD + LAYER, 3 * LAYER]
    assert parameters(run([0, 1, 2, 4, 6], schedule="interleaved")) == [OUTER + 2 * LAYER, HEAD + 2 * LAYER]


def test_memory_is_of_the_cut_that_was_profiled() -> None:
    shown = replace(run([0, 5, 6]), profiles=[replace(profile(), stage_boundaries=[0, 1, 6])])
    assert parameters(shown) == [OUTER, HEAD + 4 * LAYER]


def test_a_model_that_the_planner_reads_otherwise_than_it_ran_has_no_prediction() -> None:
    shown = run([0, 3, 6])
    own = (OUTER + HEAD + 4 * LAYER) // 4
    for counted, stages in ((own, 2), (int(1.02 * own), 2), (2 * own, 0)):
        shown = replace(shown, about={**shown.about, "parameters": counted})
        assert len(parameters(shown)) == stages


def test_memory_is_what_the_run_has_said() -> None:
    one = {"parameters": 1, "gradients": 2, "optimizer": 3, "activations": 4, "logits": 5, "buffers": 6, "total": 21}
    shown = run([0, 3, 6])
    assert expected_parts(shown) == []
    for expected, parts in (
        ({"memory_gib": {"stages": [one]}}, [{"parameters": 1, "gradients": 2, "optimizer": 3, "activations": 15}]),
        ({"memory_gib": {"stages": [{**one, "logits": "many"}]}}, []),
        ({"memory_gib": {"stages": [{}]}}, []),
        ({"memory_gib": [1]}, []),
        (None, []),
    ):
        found = expected_parts(replace(shown, about={**shown.about, "expected": expected}))
        assert [{part: value / 2**30 for part, value in stage.items()} for stage in found] == parts
    assert parameters(replace(shown, about={**shown.about, "expected": None})) == []
