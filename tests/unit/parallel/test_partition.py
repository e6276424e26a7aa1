"""Stage boundaries against the optimum found by trying every partition, and against DeepSpeed's own."""

from itertools import combinations, pairwise

import pytest
from deepspeed.runtime.utils import partition_balanced, partition_uniform
from hypothesis import given
from hypothesis import strategies as st

from harness.config.values.layout_keys import PARTITION_FORMS
from harness.errors import UserError
from harness.parallel.pipeline.partition import balanced, by_type, narrowest, stage_boundaries, uniform

NAMES = ["Prologue", *["DecoderLayer"] * 6, "Epilogue"]


def every_partition(n_layers, stages):
    for inner in combinations(range(1, n_layers), stages - 1):
        yield [0, *inner, n_layers]


def stage_costs(costs, boundaries):
    return [sum(costs[start:stop]) for start, stop in pairwise(boundaries)]


def by_brute_force(costs, stages):
    """Most expensive stage first, then the sum of squares, then the lighter earlier stages."""

    def key(boundaries):
        per_stage = stage_costs(costs, boundaries)
        return max(per_stage), sum(cost * cost for cost in per_stage), boundaries

    return min(every_partition(len(costs), stages), key=key)


@st.composite
def costs_and_stages(draw, costs):
    drawn = draw(st.lists(costs, min_size=1, max_size=9))
    return drawn, draw(st.integers(1, len(drawn)))


@given(costs_and_stages(st.integers(0, 6)))  # few values: many ties and zeros
def test_balanced_is_the_optimum_by_all_three_criteria(case):
    costs, stages = case
    assert balanced(costs, stages) == by_brute_force(costs, stages)


@given(costs_and_stages(st.one_of(st.integers(0, 3), st.just(10**12))))
def test_balanced_is_the_optimum_when_one_layer_dominates(case):
    costs, stages = case
    assert balanced(costs, stages) == by_brute_force(costs, stages)


@given(costs_and_stages(st.floats(0, 1e30)))
def test_balanced_takes_any_finite_cost_and_reaches_the_lowest_maximum(case):
    costs, stages = case
    lowest = min(max(stage_costs(costs, cut)) for cut in every_partition(len(costs), stages))
    assert max(stage_costs(costs, balanced(costs, stages))) == pytest.approx(lowest)


def test_balanced_does_not_round():
    # 0.1 + 0.2 > 0.3 in floats: a cut by rounded sums could go either way; by exact ones it is symmetric
    assert balanced([0.1, 0.2, 0.3, 0.3, 0.2, 0.1], 2) == [0, 3, 6]
    assert balanced([2.0**60, 1.0, 2.0**60, 2.0], 2) == [0, 2, 4]
    assert balanced([0.0] * 6, 3) == [0, 1, 2, 6]


@pytest.mark.parametrize("cost", [-1.0, float("nan"), float("inf")])
def test_a_cost_that_is_none_is_refused(cost):
    with pytest.raises(ValueError, match="finite and not negative"):
        balanced([1.0, cost, 1.0], 2)


def test_a_partition_of_a_deep_model_is_found_at_once():
    boundaries = balanced([float(1 + i % 7) for i in range(200)], 16)
    assert len(boundaries) == 17 and all(start < stop for start, stop in pairwise(boundaries))


@given(st.integers(1, 60), st.integers(1, 60))
def test_uniform_cuts_as_deepspeed_does(n_layers, stages):
    if n_layers >= stages:
        assert uniform(n_layers, stages) == partition_uniform(n_layers, stages)


@given(costs_and_stages(st.one_of(st.integers(0, 4), st.integers(0, 10**9))))
def test_parameters_cuts_as_deepspeed_does(case):
    weights, stages = case
    expected = [int(boundary) for boundary in partition_balanced(weights, stages)]
    assert narrowest(weights, stages) == expected


@given(st.lists(st.sampled_from(["Decoder", "Norm"]), min_size=2, max_size=12))
def test_type_cuts_as_deepspeed_does(names):
    if "Decoder" in names:
        expected = partition_balanced([int(name == "Decoder") for name in names], 2)
        assert by_type(names, "decoder", 2) == [int(boundary) for boundary in expected]


def test_a_type_keeps_the_case_and_the_colons_of_its_regex():
    names = ["a:b", "layer", "a:b", "layer"]
    assert by_type(names, r"a:b", 2) == by_type(names, r"\Sa?:B$|a:b", 2)
    assert by_type(["A1", "B", "A2", "B"], r"^a\d$", 2) == by_type(["A", "B", "A", "B"], "A", 2)


def test_each_method_reads_its_own_numbers():
    def cut(method):
        return stage_boundaries(
            method, 2, costs=[1, 1, 1, 1, 1, 1, 1, 9], parameters=[9, 1, 1, 1, 1, 1, 1, 1], names=NAMES
        )

    assert cut("uniform") == [0, 4, 8]
    assert cut("balanced") == cut("measured") == [0, 7, 8]
    assert cut("parameters") == cut("Parameters") == [0, 1, 8]
    assert stage_costs([name == "DecoderLayer" for name in NAMES], cut("type:decoder")) == [3, 3]


@pytest.mark.parametrize("method", ["", "profile", "type", "type:", "uniform:2"])
def test_an_unknown_method_is_told_with_the_known_ones(method):
    with pytest.raises(UserError) as caught:
        stage_boundaries(method, 2, costs=[1, 1], parameters=[1, 1], names=["A", "B"])
    assert all(known in str(caught.value) for known in PARTITION_FORMS)


@pytest.mark.parametrize("method", ["balanced", "measured", "uniform", "parameters", "type:Layer"])
@pytest.mark.parametrize("stages", [0, 9])
def test_stages_that_do_not_fit_are_told_with_the_numbers(method, stages):
    with pytest.raises(UserError, match=f"{stages} stages for a model of 8 layers: use 1 to 8"):
        stage_boundaries(method, stages, costs=[1.0] * 8, parameters=[1] * 8, names=NAMES)


def test_a_type_that_cannot_match_is_told():
    with pytest.raises(UserError, match="matches no layer; the layers are Prologue, DecoderLayer, Epilogue"):
        by_type(NAMES, "Mamba", 2)
    with pytest.raises(UserError, match="is not a regular expression"):
        by_type(NAMES, "(", 2)
