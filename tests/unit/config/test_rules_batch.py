"""The borders of the rules about batch sizes: which three sizes fit, on how many ranks, and what is proposed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.checking.rules.deepspeed.batch import batch_size_conflict
from harness.config.values.batch import (
    Batch,
    StatedSizes,
    bubble,
    complete,
    idle,
    micro_batches_wanted,
)
from harness.schedules import SCHEDULES
from tests.unit.config.said import refusals_of_run, said

TRAIN, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@pytest.mark.parametrize(
    ("config", "target", "hint"),
    [
        pytest.param({STEPS: 8}, "harness", 'add train_micro_batch_size_per_gpu, as "auto"', id="steps alone"),
        pytest.param({STEPS: 8}, "deepspeed", "add train_micro_batch_size_per_gpu, as a number", id="for deepspeed"),
        pytest.param({STEPS: 8, TRAIN: None}, "hf", 'add train_micro_batch_size_per_gpu, as "auto"', id="null"),
        pytest.param({STEPS: 8, TRAIN: "auto"}, "harness", "", id="auto is a size"),
        pytest.param({MICRO: 0}, "harness", "", id="a wrong size is another rule's"),
    ],
)
def test_a_batch_size_must_be_there(config: dict[str, Any], target: str, hint: str) -> None:
    message = "no batch size: neither train_batch_size nor train_micro_batch_size_per_gpu is given"
    pointer = f"/{STEPS}" if STEPS in config else ""
    assert said(config, "DS301", target=target) == ([f"error {pointer}: {message}; {hint}"] if hint else [])


PP2_TP2 = {"pipeline": {"stages": 2}, "tensor_parallel": {"autotp_size": 2}}


@pytest.mark.parametrize(
    ("config", "options", "words"),
    [
        pytest.param({TRAIN: 8, MICRO: 2, STEPS: 2}, {"world_size": 2}, "", id="they multiply"),
        pytest.param({TRAIN: 8, MICRO: 2, STEPS: 2}, {}, "", id="some number of ranks fits"),
        pytest.param(
            {TRAIN: 8, MICRO: 2, STEPS: 2},
            {"world_size": 4},
            "train_batch_size 8 is not micro-batch 2 x accumulation 2 x 4 data-parallel ranks; "
            "use train_batch_size 16, or leave one of the three sizes out",
            id="three sizes on too many ranks",
        ),
        pytest.param(
            {TRAIN: 10, MICRO: 4, STEPS: 1},
            {},
            "train_batch_size 10 is not a multiple of micro-batch 4 x accumulation 1; "
            "use train_batch_size 8 or 12, or a micro-batch of 1, 2 or 5 (--per_device_train_batch_size)",
            id="no number of ranks fits",
        ),
        pytest.param(
            {TRAIN: 12, MICRO: 5, STEPS: 2},
            {},
            "train_batch_size 12 is not a multiple of micro-batch 5 x accumulation 2; "
            "use train_batch_size 10 or 20, or a micro-batch of 2, 3 or 6 (--per_device_train_batch_size)",
            id="the accumulation stays",
        ),
        pytest.param(
            {TRAIN: 10, MICRO: 4, STEPS: 3},
            {},
            "train_batch_size 10 is not a multiple of micro-batch 4 x accumulation 3; use train_batch_size 12",
            id="no micro-batch would fit",
        ),
        pytest.param(
            {TRAIN: 7},
            {"world_size": 2},
            "train_batch_size 7 is not a multiple of 2 data-parallel ranks; use train_batch_size 6 or 8",
            id="one size on two ranks",
        ),
        pytest.param({TRAIN: 1}, {"world_size": 1}, "", id="the least of all"),
        pytest.param(
            {TRAIN: 1},
            {"world_size": 2},
            "train_batch_size 1 is not a multiple of 2 data-parallel ranks; use train_batch_size 2",
            id="fewer samples than ranks",
        ),
        pytest.param({TRAIN: 8, MICRO: 2, STEPS: 2, **PP2_TP2}, {"world_size": 8}, "", id="data-parallel ranks count"),
        pytest.param(
            {TRAIN: 8, MICRO: 2, STEPS: 2, **PP2_TP2},
            {"world_size": 8, "target": "deepspeed"},
            "train_batch_size 8 is not micro-batch 2 x accumulation 2 x 8 data-parallel ranks; "
            "use train_batch_size 32, or leave one of the three sizes out",
            id="for deepspeed every rank is data-parallel",
        ),
        pytest.param({TRAIN: 7, **PP2_TP2}, {"world_size": 6}, "", id="a layout that does not fit says nothing here"),
        pytest.param({TRAIN: 8, MICRO: 0}, {"world_size": 2}, "", id="a size of 0 is another rule's"),
        pytest.param({TRAIN: 8, MICRO: -2}, {"world_size": 2}, "", id="a negative one too"),
        pytest.param({TRAIN: "auto", MICRO: 3, STEPS: 2}, {"world_size": 5}, "", id="auto follows from the others"),
        pytest.param({TRAIN: 16.0, MICRO: 2.0}, {"world_size": 8}, "", id="whole floats"),
        pytest.param({TRAIN: 10**15, MICRO: 10**12}, {"world_size": 1000}, "", id="large ones"),
    ],
)
def test_three_sizes_multiply_or_are_told_which_would(
    config: dict[str, Any], options: dict[str, Any], words: str
) -> None:
    assert said(config, "DS302", **options) == ([f"error /{TRAIN}: {words}"] if words else [])


def test_the_size_is_called_as_the_user_gave_it() -> None:
    (refused,) = refusals_of_run({}, global_batch_size=9, gradient_accumulation_steps=2)
    assert refused == (
        "DS302 --global_batch_size 9 is not micro-batch 1 x accumulation 2 x 1 data-parallel rank; "
        "use --global_batch_size 2, or leave one of the three sizes out"
    )


SIZES = st.none() | st.integers(1, 12)


@given(SIZES, SIZES, SIZES, st.integers(1, 6))
def test_what_is_completed_keeps_what_was_stated(
    train: int | None, micro: int | None, steps: int | None, ranks: int
) -> None:
    batch = complete(train, micro, steps, ranks)
    if train is None and micro is None:
        assert batch is None
        return
    assert batch is not None
    assert train in (None, batch.train) and micro in (None, batch.micro) and steps in (None, batch.accumulation)
    if train is None:
        assert batch.fits(ranks)  # a product always fits


@settings(max_examples=60)
@given(st.integers(1, 60), SIZES, SIZES, st.integers(1, 6))
def test_a_size_that_is_proposed_fits(train: int, micro: int | None, steps: int | None, ranks: int) -> None:
    batch = complete(train, micro, steps, ranks)
    assert batch is not None
    if batch.fits(ranks):
        return
    _, hint = batch_size_conflict(StatedSizes(train=train, micro=micro, accumulation=steps, sources={}), ranks)
    whole, _, share = hint.partition("(--per_device")[0].partition(", or a micro-batch of ")
    stated = whole.split(",")[0].removeprefix("use train_batch_size ").split(" or ")
    for proposed in map(int, stated):
        better = complete(proposed, micro, steps, ranks)
        assert better is not None and better.fits(ranks), hint
    for word in share.replace(" or ", ", ").split(", ") if share else []:
        better = complete(train, int(word), None, ranks)
        assert better is not None and better.fits(ranks), hint


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (-1, -1, 1), (4, 2, 1)])
def test_sizes_that_are_none_never_fit(sizes: tuple[int, int, int]) -> None:
    train, micro, accumulation = sizes
    assert not Batch(train=train, micro=micro, accumulation=accumulation).fits(1)


@pytest.mark.parametrize("micro", [0, 1])
def test_a_stated_size_of_none_is_completed_without_dividing_by_it(micro: int) -> None:
    batch = complete(8, micro, None, 2) if micro else complete(8, None, 0, 2)
    assert batch is not None and batch.fits(2) == bool(micro)


STAGES, BATCHES, PARTS = st.integers(2, 9), st.integers(1, 60), st.integers(2, 4)


@settings(max_examples=60)
@given(STAGES, BATCHES, st.sampled_from(list(SCHEDULES)), PARTS)
def test_more_micro_batches_never_idle_more(stages: int, batches: int, schedule: str, parts: int) -> None:
    shares = [bubble(stages, count, schedule, parts) for count in (batches, batches + 1)]
    assert 0 < shares[1] < shares[0] < 1


@settings(max_examples=60)
@given(STAGES, st.sampled_from(list(SCHEDULES)), PARTS)
def test_the_wanted_micro_batches_are_the_fewest(stages: int, schedule: str, parts: int) -> None:
    wanted = micro_batches_wanted(stages, schedule, parts)
    assert bubble(stages, wanted, schedule, parts) <= 0.2
    assert wanted == 1 or bubble(stages, wanted - 1, schedule, parts) > 0.2


@pytest.mark.parametrize(
    ("schedule", "share"),
    [  # four stages, eight micro-batches; a forward takes one unit, and so does each half of a backward
        pytest.param("1f1b", 9 / 33, id="three slots of three units"),
        pytest.param("gpipe", 9 / 33, id="as 1F1B"),
        pytest.param("zero-bubble", 3 / 27, id="a third of it"),
        pytest.param("interleaved", 9 / 57, id="half of it, of twice as many parts"),
        pytest.param("zero-bubble-v", 3 / 51, id="folded"),
        pytest.param("dualpipe-v", 3 / 51, id="folded too"),
    ],
)
def test_the_idle_share_by_hand(schedule: str, share: float) -> None:
    assert bubble(4, 8, schedule, 2) == pytest.approx(share)


def test_idle_time_is_a_sentence() -> None:
    assert idle(2, 1) == "2 stages with 1 micro-batch are idle for 50% of a step"
    assert idle(4, 8, "zero-bubble") == "4 stages with 8 micro-batches are idle for 11% of a step"


@given(st.integers(1, 60), st.integers(1, 12), st.integers(1, 12))
def test_what_is_proposed_without_ranks_fits_some_number_of_them(train: int, micro: int, steps: int) -> None:
    if train % (micro * steps) == 0:
        return
    _, hint = batch_size_conflict(
        StatedSizes(train=train, micro=micro, accumulation=steps, sources={}), 1, ranks_are_known=False
    )
    batches, _, shares = hint.partition(" (--per")[0].partition(", or a micro-batch of ")
    for word in batches.removeprefix("use train_batch_size ").split(" or "):
        assert int(word) % (micro * steps) == 0
    for word in shares.replace(" or ", ", ").split(", ") if shares else []:
        assert train % (int(word) * steps) == 0
