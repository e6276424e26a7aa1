"""One process without torch.distributed: no groups are needed."""

import pytest

from harness.errors import UserError
from harness.topology.groups import build_groups
from harness.topology.layout import Layout


def test_one_process_has_no_groups_and_is_both_ends_of_the_pipeline() -> None:
    groups = build_groups(Layout())
    assert [groups.world_group, groups.pp_group, groups.dp_group, groups.tp_group] == [None] * 4
    assert (groups.rank, groups.is_first_stage, groups.is_last_stage) == (0, True, True)


def test_a_layout_for_more_processes_is_refused() -> None:
    with pytest.raises(UserError, match="layout pp2 x dp1 x tp1 is for 2 ranks, but 1 is running"):
        build_groups(Layout(pp_size=2))
