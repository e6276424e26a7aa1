"""One process without torch.distributed: no groups are needed, and sets of one do nothing but answer."""

import pytest
import torch

from harness.errors import UserError
from harness.topology.groups import build_groups
from harness.topology.layout import AXES, Layout
from harness.topology.process_sets import ProcessSets


def test_one_process_has_no_groups_and_is_both_ends_of_the_pipeline() -> None:
    groups = build_groups(Layout())
    assert [groups.world_group, groups.pp_group, groups.dp_group, groups.tp_group] == [None] * 4
    assert (groups.rank, groups.is_first_stage, groups.is_last_stage) == (0, True, True)


def test_a_layout_for_more_processes_is_refused() -> None:
    with pytest.raises(UserError, match="layout pp2 x dp1 x tp1 is for 2 ranks, but 1 is running"):
        build_groups(Layout(pp_size=2))


def test_collectives_of_a_set_of_one_return_what_they_are_given() -> None:
    sets = ProcessSets(build_groups(Layout()))
    assert [each.name for each in sets] == ["world", *AXES, "stage:0"]
    value = torch.tensor([3.0])
    for each in sets:
        each.barrier()
        assert each.included() and (each.rank(), each.size()) == (0, 1)
        assert each.all_reduce(value) is value and each.broadcast(value) is value
        assert each.all_gather(value).tolist() == [[3.0]]
        assert each.reduce_scatter(value).item() == 3.0


def test_sets_are_added_and_removed_in_one_process_too() -> None:
    sets = ProcessSets(build_groups(Layout()))
    mine = sets.add("mine", [0])
    with pytest.raises(UserError, match="already a process set 'mine'"):
        sets.add("mine", [0])
    sets.remove("mine")
    with pytest.raises(UserError, match=r"'mine' .* was removed"):
        mine.barrier()
    with pytest.raises(UserError, match="no process set 'mine': there are world"):
        sets["mine"]
