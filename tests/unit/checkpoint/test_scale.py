"""What a rank of 1,024 holds of the plan when a model is exported: its own stage, whatever the number of ranks."""

from __future__ import annotations

import pickle
from itertools import chain
from pathlib import Path

import pytest
import torch

from harness.checkpoint.exporting.plan_files import plan_files
from harness.checkpoint.tensors.tensor_writer import Entry, FileRegion, file_regions
from harness.checkpoint.tensors.whole_tensors import PASSED_ALONG, StageTensors, takes_part
from harness.hf.weights.conversion import CheckpointFormat, ParameterRef
from harness.hf.weights.lazy_tensor import LazyTensor
from harness.topology.layout import Layout

LAYERS, EXPERTS = 32, 16
SHAPE = (1536, 4096)


@pytest.fixture(scope="module")
def entries() -> list[list[Entry]]:
    """The tensors of each layer of a mixture of experts."""
    kinds = [f"experts.{expert}.{part}" for expert in range(EXPERTS) for part in ("gate", "up", "down")]
    kinds += ["q", "k", "v", "o", "norm", "router"]
    return [
        [Entry(name=f"layers.{n}.{kind}", shape=SHAPE, dtype=torch.bfloat16, trained=True) for kind in kinds]
        for n in range(LAYERS)
    ]


def dealt(entries: list[list[Entry]], layout: Layout) -> list[list[FileRegion]]:
    """The places of each stage's tensors, by the plan of files."""
    layers = LAYERS // layout.pp_size
    stages = [
        StageTensors(host=f"host{stage}", entries=list(chain(*entries[stage * layers : (stage + 1) * layers])))
        for stage in range(layout.pp_size)
    ]
    tensors = {
        entry.name: LazyTensor.of(ParameterRef(entry.name, entry.shape, entry.dtype))
        for layer in entries
        for entry in layer
    }
    files = plan_files(stages, CheckpointFormat(tensors=tensors))
    regions = {
        region.entry.name: region for name, content in files.items() for region in file_regions(Path(name), content)[1]
    }
    assert len(regions) == sum(map(len, entries))
    return [[regions[entry.name] for entry in stage.entries] for stage in stages]


@pytest.mark.parametrize(("pipeline", "tensor"), [(1, 1), (16, 1), (16, 8), (32, 32)])
def test_each_of_1024_ranks_hears_of_its_own_stage_alone_and_once(pipeline: int, tensor: int) -> None:
    layout = Layout.from_world(1024, pp_size=pipeline, tp_size=tensor)
    # rank -> the stage whose places have come to it, and rank -> to how many others it has passed places on
    holds, sent = {0: 0}, dict.fromkeys(range(layout.world_size), 0)
    for axis in PASSED_ALONG:
        for ranks in layout.groups(axis):
            part = {takes_part(layout.coordinate(rank), axis) for rank in ranks}
            assert len(part) == 1, "some ranks of a group would wait for the others"
            if len(ranks) > 1 and part == {True}:
                assert ranks[0] in holds, "the first rank of a group has nothing to pass on yet"
                sent[ranks[0]] += len(ranks) - 1
                for rank in ranks:
                    stage = layout.coordinate(rank).stage if axis == "pipeline" else holds[ranks[0]]
                    assert holds.setdefault(rank, stage) == stage
    assert holds == {rank: layout.coordinate(rank).stage for rank in range(1024)}
    assert sum(sent.values()) == 1023
    assert max(sent.values()) <= layout.pp_size + layout.tp_size + layout.dp_size


def test_what_a_rank_holds_of_the_plan_is_its_stage_whatever_the_number_of_ranks(entries: list[list[Entry]]) -> None:
    few, many = (dealt(entries, Layout(pp_size=16, tp_size=8, dp_size=data)) for data in (1, 8))
    assert few == many
    sizes = [len(pickle.dumps(stage)) for stage in few]
    whole = len(pickle.dumps(dealt(entries, Layout())))
    assert max(sizes) < 1.2 * whole / 16
