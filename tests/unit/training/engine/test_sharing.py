"""What an engine shares between data-parallel ranks: second copies of parameters under ZeRO-3."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from harness import TrainingArguments
from harness.installed import read_run_config
from harness.topology.groups import Groups
from harness.topology.layout import Layout
from harness.training.engine.build import layer_finisher, secondary_size, zero3_partition
from harness.training.engine.spec import EngineSpec


def groups(world: int, rank: int = 0) -> Groups:
    """Those of a rank among data-parallel ones, without live process groups."""
    layout = Layout.from_world(world, pp_size=1, tp_size=1)
    return Groups(
        layout=layout,
        rank=rank,
        coordinate=layout.coordinate(rank),
        world_group=None,
        pp_group=None,
        dp_group=None,
        cp_group=None,
        tp_group=None,
        loss_stage=0,
    )


def spec(world: int, **config: Any) -> EngineSpec:
    args = TrainingArguments(deepspeed_config={"train_batch_size": "auto", **config})
    resolved = read_run_config(args, world_size=world).resolved
    return EngineSpec(args=args, resolved=resolved, max_steps=1)


@pytest.mark.parametrize(
    ("asked", "world", "size"),
    [
        pytest.param({}, 4, 1, id="none"),
        pytest.param({"zero_hpz_partition_size": 2}, 4, 2, id="as-asked"),
        pytest.param({"zero_hpz_partition_size": 4}, 4, 4, id="all"),
        pytest.param({"zero_hpz_partition_size": 4}, 1, 1, id="a-rank-alone"),
    ],
)
def test_a_second_copy_is_shared_by_as_many_ranks_as_there_are(asked: dict[str, int], world: int, size: int) -> None:
    run = spec(world, zero_optimization={"stage": 3, **asked})
    assert secondary_size(run, groups(world)) == size
    # who keeps a second copy keeps more than a part of each parameter
    assert (zero3_partition(run, groups(world)) is None) is (size > 1)


def test_each_rank_keeps_its_own_part_under_zero_3_and_all_below() -> None:
    parts = [zero3_partition(spec(4, zero_optimization={"stage": 3}), groups(4, rank)) for rank in range(4)]
    assert [(part.index, part.count) for part in parts if part is not None] == [(0, 4), (1, 4), (2, 4), (3, 4)]
    for stage in (0, 1, 2):
        run = spec(4, zero_optimization={"stage": stage})
        assert zero3_partition(run, groups(4)) is None
        layer = nn.Linear(2, 2)
        layer_finisher(run, groups(4), None)(layer)
        assert list(map(tuple, (p.shape for p in layer.parameters()))) == [(2, 2), (2,)]  # left as it is
