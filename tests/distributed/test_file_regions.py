"""Where tensors are written: every rank learns it for its own stage, and holds nothing of the others."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from harness.checkpoint.tensors.tensor_writer import Entry, FileRegion
from harness.checkpoint.tensors.whole_tensors import StageTensors, dealt_regions
from harness.errors import UserError
from harness.topology.groups import build_groups
from harness.topology.layout import Layout
from tests.support.ranks import run_ranks
from tests.support.workers import refusal_of

pytestmark = pytest.mark.ranks

MANY = 500  # tensors of a stage
LAYOUTS = [(4, 1), (2, 2), (1, 4), (2, 1), (1, 1)]


def entries(stage: int) -> list[Entry]:
    names = (f"layers.{stage}.experts.{index}.weight" for index in range(MANY))
    return [Entry(name=name, shape=(64, 32), dtype=torch.bfloat16, trained=True) for name in names]


def plan(stages: list[StageTensors]) -> dict[str, FileRegion]:
    return {
        entry.name: FileRegion(path=Path(f"file-{stage}"), start=index, entry=entry)
        for stage, tensors in enumerate(stages)
        for index, entry in enumerate(tensors.entries)
    }


def deal() -> list[tuple[bool, str]]:
    """Of each layout: whether the places of the own stage came and no others, and what a refusal said."""
    found = []
    for pipeline, tensor in LAYOUTS:
        groups = build_groups(Layout.from_world(4, pp_size=pipeline, tp_size=tensor))
        stage = groups.coordinate.stage
        own = entries(stage)
        regions = dealt_regions(own, groups, plan)
        right = [regions[entry.name] for entry in own] == [
            FileRegion(path=Path(f"file-{stage}"), start=index, entry=entry) for index, entry in enumerate(own)
        ]
        refused = refusal_of(partial(dealt_regions, own, groups, Mock(side_effect=UserError("no room"))))
        found.append((right and len(regions) == MANY, refused))
    return found


def test_each_rank_learns_the_places_of_its_own_stage_alone() -> None:
    for found in run_ranks(4, deal):
        assert found == [(True, "no room")] * len(LAYOUTS)
