"""A decoder cut into pipeline layers is the decoder: the same logits to the last bit, no family named."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from harness.errors import UserError
from harness.hf.forward.outer_forward import OuterForward
from harness.hf.forward.payload import StagePayload
from harness.hf.skeleton import ModelSource, build_skeleton
from harness.parallel.pipeline.staged_module import BuiltLayers
from harness.verify.tiny_copy import tiny_config
from tests.support.layers import build, prepare, run
from tests.support.models import config, model_of

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "olmo2", "gemma2", "gpt2", "bloom", "opt", "mpt", "olmoe", "mamba")


@pytest.mark.parametrize("family", FAMILIES)
def test_two_stages_give_the_models_own_logits_to_the_last_bit(family: str) -> None:
    model = model_of(family)
    ids = torch.randint(2, 300, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = model(input_ids=ids, use_cache=False).logits
        # two preparations stand for two processes: the second never sees ids or the first one's modules
        first, second = prepare(ModelSource.of_model(model)), prepare(ModelSource.of_model(model))
        hidden = run(build(first, 0, 2), ids)
        assert hidden.shape[:2] == ids.shape
        assert torch.equal(run(build(second, 2), hidden), wanted)


def test_pipeline_names_are_the_layers_index_and_the_name_in_the_model() -> None:
    model = model_of("qwen3")
    built = build(prepare(ModelSource.of_model(model)))
    names = {f"{i}.{name}" for i, module in built.modules.items() for name, _ in module.named_parameters()}
    assert {name.partition(".")[2] for name in names} == {name for name, _ in model.named_parameters()}
    assert "2.model.layers.1.self_attn.q_norm.weight" in names


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom"])
def test_tied_weights_are_one_parameter(family: str) -> None:
    model = model_of(family, tie_word_embeddings=True)
    built = build(prepare(ModelSource.of_model(model)))
    first, last = built.modules[0], built.modules[len(built.calls) - 1]
    shared = {id(p) for p in first.parameters()} & {id(p) for p in last.parameters()}
    assert len(shared) == 1
    assert [len(list(tied.parameters())) for tied in built.tied.values()] == [1]


def test_initial_weights_depend_on_the_seed_and_not_on_the_order_of_building() -> None:
    source = ModelSource(name="llama", config=config("llama"), weights=None)
    whole = build(prepare(source)).modules
    torch.manual_seed(99)
    alone = build(prepare(source), 2, 4).modules
    other = build(prepare(source, seed=1), 2, 4).modules
    for index in (2, 3):
        for name, parameter in alone[index].named_parameters():
            assert torch.equal(parameter, whole[index].get_parameter(name)), name
    assert not all(
        torch.equal(parameter, other[2].get_parameter(name)) for name, parameter in alone[2].named_parameters()
    )


def test_initial_weights_are_drawn_as_the_family_draws_them() -> None:
    built = build(
        prepare(ModelSource(name="gpt2", config=config("gpt2", num_hidden_layers=8, hidden_size=256), weights=None))
    )
    block = built.modules[1]
    attention = next(module for name, module in block.named_modules() if name.endswith("attn"))
    # the second matrix of each residual branch is scaled down by the square root of twice the depth
    assert attention.c_proj.weight.std().item() == pytest.approx(0.02 / (2 * 8) ** 0.5, rel=0.05)
    assert attention.c_attn.weight.std().item() == pytest.approx(0.02, rel=0.05)


def test_rotary_tables_are_made_anew_on_every_stage() -> None:
    model = model_of("llama")
    outer = OuterForward(build_skeleton(config("llama")), torch.device("cpu"))
    _, inputs = outer.arguments(1, StagePayload(hidden=torch.zeros(1, 8, 64)))
    cos, _ = inputs.kwargs["position_embeddings"]
    wanted, _ = model.model.rotary_emb(torch.zeros(1, 8, 64), torch.arange(8)[None])
    assert torch.equal(cos, wanted)


def test_layer_inputs_are_kept_by_shape_and_dtype() -> None:
    outer = OuterForward(build_skeleton(config("gemma2")), torch.device("cpu"))
    single, half = StagePayload(hidden=torch.zeros(2, 16, 64)), StagePayload(hidden=torch.zeros(2, 16, 64).bfloat16())
    inputs = outer.arguments(0, single)[1]
    assert inputs is outer.arguments(0, StagePayload(hidden=torch.ones(2, 16, 64)))[1]
    assert inputs is not outer.arguments(0, half)[1]
    assert outer.arguments(1, half)[1].kwargs["position_embeddings"][0].dtype == torch.bfloat16


class Stackless(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.only = nn.Linear(2, 2)


def test_a_model_without_a_list_of_layers_is_refused() -> None:
    with pytest.raises(UserError, match="has no list of decoder layers"):
        OuterForward(Stackless(config("llama")), torch.device("cpu"))  # type: ignore[arg-type]


def test_a_forward_that_needs_its_own_modules_is_refused_by_the_name_of_the_function() -> None:
    reformer = tiny_config("reformer")
    reason = r"AxialPositionEmbeddings\.forward does not run with placeholders .*not iterable.* split into stages"
    with pytest.raises(UserError, match=reason):
        OuterForward(build_skeleton(reformer), torch.device("cpu"))


def test_states_are_found_and_travel_as_far_as_they_are_read() -> None:
    outer = OuterForward(build_skeleton(config("llama")), torch.device("cpu"))
    assert outer.schema.bare
    skeleton = build_skeleton(config("llama"))
    forward = type(skeleton.model.rotary_emb).forward

    class FromEmbeddings(type(skeleton.model.rotary_emb)):  # type: ignore[misc]
        def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
            cos, sin = forward(self, x, position_ids)
            return cos + x.mean(), sin

    skeleton.model.rotary_emb.__class__ = FromEmbeddings
    outer = OuterForward(skeleton, torch.device("cpu"))
    assert [outer.schema.names(boundary) for boundary in range(5)] == [["model.embed_tokens:0"]] * 3 + [[], []]
    assert outer.schema.tokens and outer.schema.replayed


def test_a_layer_is_built_without_a_copy_of_the_other_layers() -> None:
    causal = prepare(_source(num_hidden_layers=2))
    outer = causal.layers[1].module_args[0].outer

    def copied(_: object) -> None:
        raise AssertionError("layer 1 was copied")

    outer.layers[1].__deepcopy__ = copied
    build(causal, 1, 2)
    with pytest.raises(AssertionError):
        build(causal, 2, 3)


def test_a_large_vocabulary_makes_the_epilogue_the_most_expensive_layer() -> None:
    small = [c.flops_per_token() for c in prepare(_source(vocab_size=320)).costs(128, checkpointed=False)]
    large = [c.flops_per_token() for c in prepare(_source(vocab_size=50_000)).costs(128, checkpointed=False)]
    assert small[-1] < small[1] < large[-1]
    assert large[0] < large[1]  # a look-up in the same large table costs next to nothing


def _source(**changes: Any) -> ModelSource:
    return ModelSource(name="llama", config=config("llama", **changes), weights=None)


def test_a_forward_leaves_nothing_to_the_collector_of_cycles() -> None:
    def logits_of(built: BuiltLayers) -> weakref.ref[torch.Tensor]:
        logits = run(built, torch.tensor([[3, 4, 5]]))
        logits.sum().backward()
        return weakref.ref(logits)  # the caller of every layer has it in its frame

    built = build(prepare(ModelSource.of_model(model_of("llama"))))
    gc.disable()
    try:
        assert logits_of(built)() is None
    finally:
        gc.enable()
