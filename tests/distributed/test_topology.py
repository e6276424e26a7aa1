"""Groups and the agreement of ranks, on eight real ranks, launched once; and ranks that hosts were dealt in turn."""

import dataclasses
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from harness import Trainer, TrainingArguments
from harness.data.inputs import datasets as inputs
from harness.data.on_disk.cache import once_per_host
from harness.data.tokenizer import ByteTokenizer
from harness.extras.output_checks import require_shared
from harness.topology.agreement import all_gather_on_host, broadcast_object, check_agreement
from harness.topology.groups import build_groups
from harness.topology.layout import AXES, Layout
from tests.support.ranks import here, run_ranks
from tests.support.workers import refusal_of

pytestmark = pytest.mark.ranks

LAYOUT = Layout(pp_size=2, tp_size=2, dp_size=2, cp_size=2)
WORLD = LAYOUT.world_size


def tour(folder: Path) -> dict[str, Any]:
    """Everything that one launch can show."""
    groups = build_groups(LAYOUT)
    members = {axis: dist.get_process_group_ranks(group) for axis in AXES if (group := groups.along(axis))}
    members |= {"world": dist.get_process_group_ranks(groups.world_group)}
    unseen = folder / "there" if groups.rank > 5 else folder
    sums = {}
    for axis in members.keys() - {"world"}:
        number = torch.tensor(2.0**groups.rank, device=here())  # a sum of powers of two names its addends
        dist.all_reduce(number, group=groups.along(axis))
        sums[axis] = float(number)
    return {
        "members": members,
        "sums": sums,
        "ends": (groups.is_first_stage, groups.is_last_stage),
        "agreement": agreement_of(groups.rank),
        "same folder": refusal_of(lambda: require_shared(folder, groups.rank, WORLD)),
        "another folder": refusal_of(lambda: require_shared(unseen, groups.rank, WORLD)),
        "beside": all_gather_on_host(f"host {groups.rank % 3}", groups.rank * 10),
        "of the first": broadcast_object(f"rank {groups.rank}"),
        "another world": refusal_of(lambda: build_groups(Layout(dp_size=4))),
    }


def agreement_of(rank: int) -> dict[str, str]:
    config, other = {"train_batch_size": 8}, {"train_batch_size": 8, "gradient_clipping": 0.3}
    layout = LAYOUT if rank != 3 else dataclasses.replace(LAYOUT, tp_size=4, dp_size=1, cp_size=1)
    return {
        "same": refusal_of(lambda: check_agreement(config, LAYOUT)),
        "config": refusal_of(lambda: check_agreement(other if rank == 5 else config, LAYOUT)),
        "layout": refusal_of(lambda: check_agreement(config, layout)),
        "code": refusal_of(lambda: check_agreement(config, LAYOUT, code=f"version {rank >= 4}")),
        "two": refusal_of(lambda: check_agreement(other if rank == 0 else config, layout)),
    }


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(WORLD, tour, tmp_path_factory.mktemp("shared"))


def test_each_rank_is_in_the_groups_that_the_layout_says(seen: list[dict[str, Any]]) -> None:
    for rank, got in enumerate(seen):
        assert got["sums"].keys() == {"pipeline", "data", "context", "tensor"}
        for axis in AXES:
            expected = LAYOUT.ranks_along(axis, rank)
            assert got["members"][axis] == expected
            assert got["sums"][axis] == sum(2.0**other for other in expected)
        assert got["members"]["world"] == list(range(WORLD))
        assert got["ends"] == (rank < 4, rank >= 4)


def test_ranks_that_agree_go_on_and_ranks_that_differ_are_named(seen: list[dict[str, Any]]) -> None:
    mend = ": give every host the same files and arguments"
    others = "than the other 7 ranks (rank {}, ...)"
    for got in seen:
        assert got["agreement"] == {
            "same": "",
            "config": f"rank 5 has another config {others.format(0)}{mend}",
            "layout": f"rank 3 has another layout {others.format(0)}{mend}",
            "code": f"ranks 4-7 have another code than the other 4 ranks (rank 0, ...){mend}",
            "two": f"rank 0 has another config {others.format(1)}; rank 3 has another layout {others.format(0)}{mend}",
        }


def test_a_folder_that_some_ranks_do_not_see_is_refused(seen: list[dict[str, Any]]) -> None:
    for got in seen:
        assert got["same folder"] == ""
        assert "ranks 6-7 (host " in got["another folder"] and "cannot see what rank 0 (host " in got["another folder"]


def test_a_rank_learns_what_the_ranks_of_its_host_say_and_no_more(seen: list[dict[str, Any]]) -> None:
    for rank, got in enumerate(seen):
        here = [other for other in range(WORLD) if other % 3 == rank % 3]
        assert list(got["beside"].values.items()) == [(other, other * 10) for other in here]
        assert (got["beside"].number, got["beside"].hosts) == (rank % 3, 3)
        assert got["of the first"] == "rank 0"


def test_a_layout_for_another_world_is_refused(seen: list[dict[str, Any]]) -> None:
    for got in seen:
        assert "layout pp1 x dp4 x tp1 is for 4 ranks, but 8 are running" in got["another world"]


def dealt_in_turn(folder: Path) -> tuple[list[float], list[str], str]:
    """Train on text where `srun -m cyclic` has dealt out the ranks of two hosts of two, each with files of its own."""
    rank, built = int(os.environ["RANK"]), []
    os.environ.update(LOCAL_RANK=str(rank // 2), LOCAL_WORLD_SIZE="2")
    cache = folder / f"cache of n{rank % 2}"

    def noted(build: Callable[[], Any], **where: Any) -> Any:
        def noting() -> Any:
            built.append("found" if cache.exists() else "made")
            return build()

        return once_per_host(noting, **where)

    with (
        patch.object(socket, "gethostname", lambda: f"n{rank % 2}"),
        patch("datasets.config.HF_DATASETS_CACHE", cache),
        patch.object(inputs, "once_per_host", noted),
        patch("builtins.print") as said,
    ):
        trainer = Trainer(
            "tiny-llama",
            TrainingArguments(
                deepspeed_config={"train_batch_size": 4, "tensor_parallel": {"autotp_size": 2}},
                output_dir=str(folder / "run"),
                block_size=32,
                max_steps=2,
                logging_steps=1,
            ),
            train_dataset=[{"text": "Sphinx of black quartz, judge my vow. " * 40}],
            processing_class=ByteTokenizer(),
        )
        trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return losses, built, "\n".join(str(call.args[0]) for call in said.call_args_list if call.args)


def test_ranks_that_hosts_were_dealt_in_turn_share_what_their_own_host_prepares(tmp_path: Path) -> None:
    found = run_ranks(4, dealt_in_turn, tmp_path, process_group=False)
    losses, built, said = zip(*found, strict=True)
    assert sorted(path.name for path in tmp_path.glob("cache of *")) == ["cache of n0", "cache of n1"]
    assert [made for (made,) in built].count("made") == 2 and built[0] == ["made"] and built[2] == ["found"]
    assert len(losses[0]) == 2
    assert "2 of 2 tensor-parallel groups of pp1 x dp2 x tp2 cross hosts (ranks 0, 1: n0 and n1)" in said[0]
    assert "give each host ranks that follow each other" in said[0]
