"""Plans: the model's own, a file's, and what is said where there is none or it cannot be followed."""

import json
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from harness.errors import UserError
from harness.hf.skeleton import build_skeleton
from harness.parallel.plans.plan import Plan, PlanRule, patterns, plan_for, read_plan_file, wildcard
from tests.support.plan_models import PLANS, SHAPES, plan_config


def on_meta(model_type: str, **sizes: Any) -> Any:
    """A tiny model without data."""
    tiny = {"vocab_size": 131, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**tiny, **sizes}))


def test_a_number_becomes_a_wildcard_and_a_digit_in_a_name_does_not() -> None:
    assert wildcard("model.layers.12.mlp.experts.3.w1") == "model.layers.*.mlp.experts.*.w1"


@pytest.mark.parametrize(
    ("name", "numbers", "found"),
    [
        ("", None, ""),
        ("lm_head", None, "lm_head"),
        ("3", None, "*"),
        ("h.0.mlp.1", 1, "h.*.mlp.1"),
        ("h.0.mlp.1", 2, "h.*.mlp.*"),
        ("h.0.mlp.1", 9, "h.*.mlp.*"),
        ("h.0.w1.2b", None, "h.*.w1.2b"),
    ],
)
def test_as_many_numbers_as_asked_become_wildcards(name: str, numbers: int | None, found: str) -> None:
    assert wildcard(name, numbers) == found


def test_a_name_is_meant_by_more_and_more_wildcards() -> None:
    assert patterns("h.0.mlp.1.w") == ["h.*.mlp.1.w", "h.*.mlp.*.w"]
    assert patterns("lm_head") == ["lm_head"]


def test_the_blocks_of_an_attention_are_those_of_any_layer_in_it() -> None:
    rules = {"h.*.attn.qkv": PlanRule(style="colwise", blocks=4), "h.*.attn2.q": PlanRule(style="colwise", blocks=8)}
    plan = Plan(model_type="it", rules=rules)
    assert [plan.blocks_in(name) for name in ("h.3.attn", "h.3.attn2", "h.3.mlp", "h.3")] == [4, 8, 1, 8]
    assert not plan.splits_head


def test_a_family_s_own_plan_is_taken_with_its_embeddings() -> None:
    plan = plan_for(on_meta("llama"), PLANS)
    assert plan.rules["model.layers.*.self_attn.o_proj"] == PlanRule(style="rowwise")
    assert (plan.head, plan.embedding, plan.splits_head) == ("lm_head", "model.embed_tokens", True)
    assert plan.rules["model.embed_tokens"].style == "embedding_rowwise"


def test_a_family_without_a_plan_is_served_by_a_file() -> None:
    plan = plan_for(on_meta("gpt2"), PLANS)
    assert plan.rules["transformer.h.*.attn.c_attn"] == PlanRule(style="packed_colwise", parts=3)
    assert plan.attributes["transformer.h.*.attn"] == {"num_heads": "divide", "split_size": "divide"}


def test_a_family_without_plan_and_file_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UserError) as told:
        plan_for(on_meta("gpt2"), tmp_path)
    assert str(told.value) == (
        "model type 'gpt2' declares no tensor-parallel plan: set tensor_parallel.autotp_size to 1, "
        f"or write a plan in {tmp_path / 'gpt2.json'}"
    )


def test_an_unknown_style_is_refused_by_name() -> None:
    model = on_meta("llama")
    model._tp_plan = {**model.tp_plan, "model.layers.*.mlp.up_proj": "diagonal"}
    with pytest.raises(
        UserError, match=r"'llama' has the unknown style 'diagonal' for model\.layers\.\*\.mlp\.up_proj"
    ):
        plan_for(model)


def test_tied_embeddings_are_split_alike_even_where_the_plan_names_one() -> None:
    model = on_meta("llama", tie_word_embeddings=True)
    model._tp_plan = {name: style for name, style in model.tp_plan.items() if name != "lm_head"}
    plan = plan_for(model)
    assert plan.rules["lm_head"].style == "colwise_gather_output"
    assert plan.rules["model.embed_tokens"].style == "embedding_rowwise"


def test_a_case_of_a_plan_file_holds_for_the_configs_that_it_names() -> None:
    name = "transformer.h.*.self_attention.query_key_value"
    styles = {
        multi_query: plan_for(on_meta("falcon", multi_query=multi_query), PLANS).rules[name].style
        for multi_query in (True, False)
    }
    assert styles == {True: "shared_colwise", False: "colwise"}


def test_a_case_may_take_styles_away() -> None:
    plans = {heads: plan_for(on_meta("codegen", num_attention_heads=heads), PLANS) for heads in (4, 8)}
    assert {heads: "transformer.h.*.attn.qkv_proj" in plan.rules for heads, plan in plans.items()} == {
        4: False,
        8: True,
    }


def test_a_case_may_refuse_a_config() -> None:
    with pytest.raises(UserError) as told:
        plan_for(on_meta("stablelm", qk_layernorm=True), PLANS)
    assert str(told.value) == (
        "model type 'stablelm' cannot be cut for tensor parallelism with qk_layernorm True: each head has a norm of "
        "its own: set tensor_parallel.autotp_size to 1"
    )
    assert plan_for(on_meta("jetmoe"), PLANS)
    with pytest.raises(UserError, match=r"with attention_dropout 0\.1: a rank's heads are not next to each other"):
        plan_for(on_meta("jetmoe", attention_dropout=0.1), PLANS)


def test_a_number_that_a_plan_names_comes_before_any_number() -> None:
    plan = plan_for(on_meta("ctrl"), PLANS)
    assert [plan.rule_of(f"transformer.h.3.ffn.{place}") for place in range(3)] == [
        PlanRule(style="colwise"),
        None,
        PlanRule(style="rowwise"),
    ]


def is_number(module: Any, attribute: str) -> bool:
    """Whether a module, or a config that it holds, has a number of this name."""
    try:
        return isinstance(attrgetter(attribute)(module), int)
    except AttributeError:
        return False


def places(family: str) -> Iterator[tuple[Any, Plan]]:
    """The models of a family's shapes, with the plans that its file has for them."""
    for shape in SHAPES[family]:
        model = build_skeleton(plan_config(family, shape))
        yield model, read_plan_file(PLANS / f"{family}.json", model.config)


@pytest.mark.parametrize("path", sorted(PLANS.glob("*.json")), ids=lambda path: path.stem)
def test_every_name_in_a_plan_file_is_in_a_model(path: Path) -> None:
    named, there = set[Any](), set[Any]()
    for model, plan in places(path.stem):
        named |= {*plan.rules, *plan.attributes, *plan.inputs}
        named |= {(name, attribute) for name, words in plan.attributes.items() for attribute in words}
        for name, module in [*model.named_modules(), *model.named_parameters(remove_duplicate=False)]:
            there |= set(patterns(name))
            words = plan.attributes.get(wildcard(name), {})
            there |= {(wildcard(name), word) for word in words if is_number(module, word)}
    assert named <= there


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ("[", "JSONDecodeError"),
        ({}, "KeyError: 'styles'"),
        ({"styles": {}, "style": {}}, "unknown keys style"),
        ({"styles": {"a": {"stile": "rowwise"}}}, "TypeError"),
        ({"styles": {}, "attributes": {"a": {"heads": "halve"}}}, "is 'halve': use divide or share"),
        ({"styles": {}, "attributes": {"a": {"heads": 2}}}, "TypeError"),
        ({"styles": {}, "attributes": {"a": "divide"}}, "AttributeError"),
        ({"styles": ["a"]}, "ValueError"),
        ({"styles": {}, "inputs": {"a": {"mask": {"dims": 0}}}}, "TypeError"),
        ({"styles": {}, "cases": [{"styles": {}}]}, "KeyError: 'if'"),
        ({"styles": {}, "cases": [{"if": {"no_such_field": 1}}]}, "AttributeError"),
        ([], "TypeError"),
        ("null", "TypeError"),
    ],
)
def test_a_file_that_is_no_plan_is_told(tmp_path: Path, data: Any, reason: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    with pytest.raises(UserError, match=r"broken\.json is not a tensor-parallel plan: .*" + reason):
        read_plan_file(path, None)
