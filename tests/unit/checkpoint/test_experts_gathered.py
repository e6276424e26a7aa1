"""A tensor of experts on several data-parallel ranks is whole on each of them where it must be computed with.

The ranks are threads.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from harness.checkpoint.exporting.weights import gather_tp
from harness.parallel.comm import ALONE, TensorParallel
from harness.parallel.plans.apply import cut
from harness.parallel.plans.experts import expert_parallel_plan
from harness.parallel.token_exchange import Neighbours
from harness.topology.groups import Groups
from harness.topology.layout import Layout
from tests.support.threads import run_threads
from tests.unit.parallel.test_experts import model_of


def test_experts_are_gathered_from_their_ranks_without_what_fills_them_up() -> None:
    layout = Layout(dp_size=2, ep_size=2)
    models = [model_of("mixtral", num_local_experts=3) for _ in range(2)]
    whole = torch.arange(3 * 32 * 64.0).view(3, 32, 64)

    def rank(number: int) -> torch.Tensor:
        group, model = dist.group.WORLD, models[number]
        neighbours = Neighbours(ranks=TensorParallel(group=group, rank=number, size=2))
        cut(model, "", expert_parallel_plan(model, tp_size=1), ALONE, model.config, neighbours=neighbours)
        param = model.model.layers[0].mlp.experts.down_proj
        local = torch.full(param.shape, torch.nan)
        local.shard = param.shard
        param.shard.read_into(local, whole)
        groups = Groups(
            layout=layout,
            rank=number,
            coordinate=layout.coordinate(number),
            world_group=group,
            pp_group=None,
            dp_group=group,
            tp_group=None,
            cp_group=None,
            ep_group=group,
            loss_stage=0,
        )
        return gather_tp(local, groups)

    assert all(torch.equal(found, whole) for found in run_threads(2, rank))
