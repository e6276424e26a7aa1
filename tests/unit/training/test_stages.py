"""Layers are assigned to stages by the config's method and by cost, and each stage is reported in one line."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from harness import TrainingArguments, UserError, schedules
from harness.config import Resolved
from harness.device.process_group import start
from harness.installed import read_run_config
from harness.schedules import INTERLEAVED, ModelChunks, model_chunks
from harness.topology.env import LaunchEnv
from harness.topology.groups import build_groups
from harness.topology.layout import Layout
from harness.training.prepare.stages import StageLine, choose_boundaries, stage_costs, stage_lines
from harness.training.prepare.trainable import TrainableModel, trainable_layers

FOLDED = [name for name, each in schedules.SCHEDULES.items() if each.folded]

SCHEDULES = ("1f1b", *FOLDED, INTERLEAVED)


@pytest.fixture(scope="module")
def groups() -> Iterator[Any]:
    """One rank: what is chosen and timed here is the same for all."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    start(LaunchEnv())
    yield build_groups(Layout.from_world(1, pp_size=1, tp_size=1))


def resolved(stages: int, **pipeline: Any) -> Resolved:
    config = {"train_batch_size": "auto", "pipeline": {"stages": stages, **pipeline}}
    args = TrainingArguments(deepspeed_config=config)
    return read_run_config(args, world_size=stages).resolved


def layers(*sizes: int, frozen: tuple[int, ...] = ()) -> TrainableModel:
    """Linear layers of these widths; those in `frozen` are not trained."""
    made = [nn.Linear(size, size) for size in sizes]
    for index in frozen:
        made[index].requires_grad_(False)
    return trainable_layers(made, nn.functional.mse_loss, None)


@given(
    st.lists(st.floats(0, 1e6), min_size=8, max_size=16),
    st.integers(1, 4),
    st.sampled_from(SCHEDULES),
    st.randoms(use_true_random=False),
)
def test_what_stages_cost_is_what_all_layers_cost(costs: list[float], stages: int, schedule: str, random: Any) -> None:
    chunks = model_chunks(stages, schedule)
    inner = sorted(random.sample(range(1, len(costs)), chunks.count - 1))
    boundaries = [0, *inner, len(costs)]
    found = stage_costs(costs, boundaries, chunks)
    assert len(found) == stages and sum(found) == pytest.approx(sum(costs))
    for stage, cost in enumerate(found):
        own = [layer for chunk in chunks.of_stage(stage) for layer in range(boundaries[chunk], boundaries[chunk + 1])]
        assert cost == pytest.approx(sum(costs[layer] for layer in own))


@given(st.integers(1, 6), st.integers(1, 4), st.booleans())
def test_every_chunk_stands_on_one_stage_and_every_stage_has_as_many(stages: int, each: int, folded: bool) -> None:
    chunks = ModelChunks(stages, each, folded)
    of_stages = [chunks.of_stage(stage) for stage in range(stages)]
    assert sorted(chunk for own in of_stages for chunk in own) == list(range(chunks.count))
    assert {len(own) for own in of_stages} == {each}
    assert all(chunks.stage_of(chunk) == stage for stage, own in enumerate(of_stages) for chunk in own)
    # neighbouring chunks stand on neighbouring stages, or the round begins anew
    jumps = {abs(chunks.stage_of(a) - chunks.stage_of(b)) for a, b in pairwise(range(chunks.count))}
    assert jumps <= ({0, 1} if folded else {1, stages - 1})
    assert chunks.loss_stage == (0 if folded and each % 2 == 0 else stages - 1)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        pytest.param(
            StageLine(stage=0, ranks=[0], first=0, last=0, chunks=[(0, 0)], kinds={"Embedding": 1}, parameters=1234567),
            "stage 0 on rank 0: layers 0-0 (Embedding), 1,234,567 parameters a rank",
            id="one-rank",
        ),
        pytest.param(
            StageLine(
                stage=1,
                ranks=[4, 5, 6, 7],
                first=2,
                last=11,
                chunks=[(2, 4), (9, 11)],
                kinds={"Layer": 5, "Head": 1},
                parameters=0,
            ),
            "stage 1 on ranks 4-7: layers 2-4 and 9-11 (5 x Layer, Head), 0 parameters a rank",
            id="several-chunks-and-ranks",
        ),
    ],
)
def test_a_stage_is_a_line(line: StageLine, text: str) -> None:
    assert str(line) == text


@given(st.sampled_from([(1, 1, 1), (2, 1, 2), (2, 3, 2), (4, 2, 1), (3, 2, 2)]))
def test_the_ranks_of_a_stage_are_a_run_as_its_line_says(sizes: tuple[int, int, int]) -> None:
    stages, data, tensor = sizes
    layout = Layout.from_world(stages * data * tensor, pp_size=stages, tp_size=tensor)
    for stage in range(stages):
        ranks = layout.stage_ranks(stage)
        assert list(ranks) == list(range(ranks[0], ranks[-1] + 1)) and len(ranks) == data * tensor


@pytest.mark.parametrize(
    ("partition", "boundaries"),
    [
        pytest.param("uniform", [0, 2, 4], id="as-many-layers"),
        pytest.param("parameters", [0, 1, 4], id="as-many-parameters"),
        pytest.param("type:linear", [0, 2, 4], id="as-many-of-a-kind"),
    ],
)
def test_boundaries_are_those_of_the_method(partition: str, boundaries: list[int], groups: Any) -> None:
    assert choose_boundaries(layers(9, 2, 2, 2), resolved(2, partition=partition), None) == boundaries


def test_one_stage_has_all_layers_whatever_the_method(groups: Any) -> None:
    assert choose_boundaries(layers(1, 2, 3), resolved(1, partition="type:NoSuchLayer"), None) == [0, 3]


def test_without_samples_measured_boundaries_are_those_of_the_computed_costs(groups: Any) -> None:
    model = layers(64, 2, 2, 2)
    computed = choose_boundaries(model, resolved(2, partition="balanced"), None)
    assert choose_boundaries(model, resolved(2, partition="measured"), None) == computed


@pytest.mark.parametrize(
    ("model", "stages", "pipeline", "words"),
    [
        pytest.param(
            layers(2, 2), 3, {"partition": "uniform"}, "3 stages for a model of 2 layers: use 1 to 2", id="too-few"
        ),
        pytest.param(
            layers(2, 2, 2),
            2,
            {"partition": "uniform", "schedule": "interleaved"},
            "pipeline.schedule interleaved: 2 stages of 2 model chunks, but the model has only 3 layers: use fewer",
            id="too-few-for-chunks",
        ),
        pytest.param(
            layers(2, 2, 2, 2, frozen=(2, 3)),
            2,
            {"partition": "uniform"},
            "stage 1 has nothing to train: use another pipeline.partition or fewer stages",
            id="a-frozen-stage",
        ),
        pytest.param(
            layers(2, 2, 2, 2, frozen=(1,)),
            2,
            {"partition": "uniform", "schedule": "interleaved"},
            "model chunk 1 has nothing to train",
            id="a-frozen-chunk",
        ),
    ],
)
def test_stages_that_cannot_be_are_refused(
    model: TrainableModel, stages: int, pipeline: dict[str, Any], words: str, groups: Any
) -> None:
    with pytest.raises(UserError, match=words):
        choose_boundaries(model, resolved(stages, **pipeline), None)


def test_the_line_of_a_stage_counts_what_its_rank_holds(groups: Any) -> None:
    model = layers(3, 2, frozen=(1,))
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(2, 2))
    (line,) = stage_lines(model, [0, 2], module, resolved(1).chunks, groups)
    assert (line.ranks, line.chunks, line.kinds, line.parameters) == ([0], [(0, 1)], {"Linear": 2}, 12 + 6)
    assert replace(line, parameters=0) == StageLine(
        stage=0, ranks=[0], first=0, last=1, chunks=[(0, 1)], kinds={"Linear": 2}, parameters=0
    )
