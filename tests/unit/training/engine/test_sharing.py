"""What an engine shares between data-parallel ranks: gradients in few bits, and second copies under ZeRO-3."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from harness import TrainingArguments
from harness.console import plain_console
from harness.installed import read_run_config
from harness.parallel.gradients.compressed import (
    ALIGNED,
    BLOCK,
    BUCKET,
    EXACT,
    PACKED,
    Choice,
    arrange,
    choose,
    trial_size,
)
from harness.parallel.tensor.shard import Shard, mark
from harness.topology.groups import Groups
from harness.topology.layout import Layout
from harness.training.engine.build import layer_finisher, secondary_size, zero3_partition
from harness.training.engine.context import EngineContext
from harness.training.engine.gradients import _kind, compressed_reduction, settle_compression

CPU = torch.device("cpu")


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


def context(world: int, rank: int = 0, **config: Any) -> EngineContext:
    args = TrainingArguments(deepspeed_config={"train_batch_size": "auto", **config})
    resolved = read_run_config(args, world_size=world).resolved
    return EngineContext(args=args, resolved=resolved, groups=groups(world, rank), device=CPU, max_steps=1)


@pytest.mark.parametrize(
    ("bits", "world", "settled", "says"),
    [
        pytest.param(8, 2, 8, "gradient compression: 8 bits, 0.2", id="as-asked"),
        pytest.param(4, 4, 4, "gradient compression: 4 bits, 0.1", id="fewer"),
        pytest.param(8, 1, 0, "", id="a-rank-alone-sends-nothing"),
        pytest.param("auto", 1, 0, "", id="nothing-to-measure"),
    ],
)
def test_bits_are_settled_before_the_engine_is_made(
    bits: Any, world: int, settled: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = context(world, gradient_compression={"bits": bits})
    found = settle_compression(run.resolved, run.groups, CPU, plain_console(0))
    assert found == replace(run.resolved, gradient_bits=settled)
    said = capsys.readouterr().out
    assert said.startswith(says) and bool(said) is bool(says)


@pytest.mark.parametrize("bits", [0, None, 8])
def test_without_bits_or_other_ranks_nothing_is_compressed(bits: int | None) -> None:
    module = cast("Any", SimpleNamespace())  # it is not even looked at
    assert compressed_reduction(module, groups(1), bits, CPU) is None


@pytest.mark.parametrize(
    ("seconds", "bits"),
    [
        pytest.param({0: 1.0, 8: 0.79, 4: 0.79}, 8, id="a-fifth-is-worth-it"),
        pytest.param({0: 1.0, 8: 0.8, 4: 0.8}, 0, id="less-is-not"),
        pytest.param({0: 1.0, 8: 0.9, 4: 0.5}, 4, id="fewer-bits-alone"),
        pytest.param({0: 1.0, 8: 0.5, 4: 0.41}, 8, id="fewer-bits-for-nothing"),
        pytest.param({0: 1.0, 8: 0.5, 4: 0.1}, 4, id="ever-fewer"),
        pytest.param({0: 0.0, 8: 0.0, 4: 0.0}, 0, id="nobody-to-send-to"),
    ],
)
def test_fewer_bits_must_be_clearly_faster(seconds: dict[int, float], bits: int) -> None:
    assert choose(seconds) == bits
    text = str(Choice(bits, seconds))
    assert text.startswith(f"gradient compression: {f'{bits} bits' if bits else 'off'} (1 MiB of gradients: float32 ")


@pytest.mark.parametrize("ranks", [1, 2, 7, 2048, 2049, 16384])
def test_a_trial_has_a_block_for_each_rank(ranks: int) -> None:
    assert trial_size(ranks) >= BLOCK * ranks and trial_size(ranks) % (BLOCK * ranks) == 0


def test_no_bucket_is_larger_than_a_bucket() -> None:
    sizes = [5, 3 * BUCKET + 7, BUCKET, 200]
    for aligned in (False, True):
        buckets = list(arrange(sizes, range(4), 2, aligned=aligned))
        assert all(bucket.size <= BUCKET for bucket in buckets)
        pieces = [piece for bucket in buckets for piece in bucket.pieces]
        assert all(piece.start % BLOCK == 0 and (piece.offset % BLOCK == 0 or not aligned) for piece in pieces)
        for index, size in enumerate(sizes):
            parts = [(piece.start, piece.start + piece.length) for piece in pieces if piece.index == index]
            assert [0, *(end for _, end in parts)] == [*(start for start, _ in parts), size]


def test_a_gradient_lies_where_ranks_with_the_same_weight_get_the_same_mean() -> None:
    plain, whole, copied = (nn.Parameter(torch.ones(2)) for _ in range(3))
    mark(whole, Shard(full_shape=(4,), dim=0, pieces=((0, 2),), widths=(2, 2)))
    mark(copied, Shard(full_shape=(3,), dim=0, pieces=((0, 2),), widths=(2, 2)))
    kinds = {name: _kind(p, is_tied=False) for name, p in {"plain": plain, "whole": whole, "copied": copied}.items()}
    assert kinds == {"plain": PACKED, "whole": ALIGNED, "copied": EXACT}
    assert _kind(plain, is_tied=True) == ALIGNED and _kind(copied, is_tied=True) == EXACT


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
    run = context(world, zero_optimization={"stage": 3, **asked})
    assert secondary_size(run) == size
    # who keeps a second copy keeps more than a part of each parameter
    assert (zero3_partition(run) is None) is (size > 1)


def test_each_rank_keeps_its_own_part_under_zero_3_and_all_below() -> None:
    parts = [zero3_partition(context(4, rank, zero_optimization={"stage": 3})) for rank in range(4)]
    assert [(part.index, part.count) for part in parts if part is not None] == [(0, 4), (1, 4), (2, 4), (3, 4)]
    for stage in (0, 1, 2):
        run = context(4, zero_optimization={"stage": stage})
        assert zero3_partition(run) is None
        layer = nn.Linear(2, 2)
        layer_finisher(run, None)(layer)
        assert list(map(tuple, (p.shape for p in layer.parameters()))) == [(2, 2), (2,)]  # left as it is
