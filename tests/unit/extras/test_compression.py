"""In how many bits a run sends gradients, how they are arranged, and that fewer bits must pay."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from harness.console import plain_console
from harness.extras.compression import of_run
from harness.extras.compression.quantization import BLOCK
from harness.extras.compression.reduction import ALIGNED, BUCKET, EXACT, PACKED, arrange
from harness.extras.compression.trial import Choice, choose, trial_size
from harness.parallel.tensor.shard import Shard, mark
from tests.unit.training.engine.test_sharing import groups, spec


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
    resolved = spec(world, gradient_compression={"bits": bits}).resolved
    found = of_run.settled(resolved, groups(world), plain_console(0))
    assert found == replace(resolved, gradient_bits=settled)
    said = capsys.readouterr().out
    assert said.startswith(says) and bool(said) is bool(says)


def test_without_other_ranks_nothing_is_compressed() -> None:
    module = cast("Any", SimpleNamespace())  # it is not even looked at
    assert of_run.reduction(module, groups(1), 8) is None


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
    kinds = {
        name: of_run._kind(p, is_tied=False) for name, p in {"plain": plain, "whole": whole, "copied": copied}.items()
    }
    assert kinds == {"plain": PACKED, "whole": ALIGNED, "copied": EXACT}
    assert of_run._kind(plain, is_tied=True) == ALIGNED and of_run._kind(copied, is_tied=True) == EXACT
