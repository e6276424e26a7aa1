"""A model with adapters is peft's: the same layers, values, names and logits; what cannot be trained is refused."""

from __future__ import annotations

import math
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model, get_peft_model_state_dict
from torch import Tensor
from transformers import AutoModelForCausalLM

from harness.errors import UserError
from harness.extras.lora import Adaptation, adapted_model, lora_config
from harness.hf.adapters import PREFIX, saved_name
from harness.hf.causal import CausalModel
from harness.hf.layers.wrappers import is_wrapper
from harness.hf.skeleton import ModelSource, read_source
from harness.parallel.comm import TensorParallel
from harness.parallel.zero import Zero3Partition
from tests.support.layers import build, prepare, run
from tests.support.models import config, model_of

ALL = {"r": 4, "target_modules": "all-linear"}
IDS = torch.arange(24).reshape(2, 12)


def adapt(
    source: ModelSource,
    adaptation: Adaptation,
    place: TensorParallel | None = None,
    seed: int = 0,
    part: Zero3Partition | None = None,
) -> CausalModel:
    return prepare(source, place, seed=seed, adaptation=adaptation, part=part)


def fresh(
    family: str, peft: dict[str, Any], seed: int = 0, place: TensorParallel | None = None, **sizes: Any
) -> CausalModel:
    source = ModelSource.of_model(model_of(family, **sizes))
    return adapt(source, Adaptation(config=lora_config(LoraConfig(**peft))), place, seed)


def parameters(causal: CausalModel, start: int = 0, stop: int | None = None) -> dict[str, torch.nn.Parameter]:
    return {
        name: parameter
        for module in build(causal, start, stop).modules.values()
        for name, parameter in module.named_parameters()
    }


@cache
def whole_llama() -> dict[str, torch.nn.Parameter]:
    """The parameters of a whole model with adapters everywhere, which nobody changes."""
    return parameters(fresh("llama", ALL))


def test_adapters_begin_by_pefts_rule_the_same_wherever_a_layer_is_built() -> None:
    whole = whole_llama()
    for name, parameter in whole.items():
        assert parameter.requires_grad == (".lora_" in name)
        if ".lora_A." in name:  # kaiming_uniform with a = sqrt(5)
            bound = 1 / math.sqrt(parameter.shape[1])
            assert 0.8 * bound < parameter.abs().max() <= bound
        elif ".lora_B." in name:
            assert not parameter.any()
    alone = parameters(fresh("llama", ALL), 2, 3)
    assert alone
    assert all(torch.equal(parameter, whole[name]) for name, parameter in alone.items())
    other = parameters(fresh("llama", ALL, seed=1))
    name = "model.layers.0.self_attn.q_proj.lora_A.default.weight"
    assert not torch.equal(other[name], whole[name])
    assert torch.equal(
        other["model.layers.1.mlp.up_proj.base_layer.weight"], whole["model.layers.1.mlp.up_proj.base_layer.weight"]
    )


@pytest.mark.parametrize(
    ("family", "peft"),
    [
        ("gpt2", ALL),
        ("mixtral", ALL),
        ("opt", {**ALL, "bias": "all", "use_rslora": True, "init_lora_weights": "gaussian"}),
    ],
)
def test_a_model_with_adapters_in_memory_is_taken_as_it_is(family: str, peft: dict[str, Any]) -> None:
    model = get_peft_model(model_of(family), LoraConfig(**peft)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.normal_(std=0.1)
    found = adapted_model(model)
    assert found is not None
    built = build(adapt(*found))
    assert torch.equal(run(built, IDS), model(IDS).logits)
    ours = {saved_name(n): p for m in built.modules.values() for n, p in m.named_parameters() if p.requires_grad}
    theirs = get_peft_model_state_dict(model)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("part", [None, Zero3Partition(index=1, count=2)], ids=["whole", "zero3"])
def test_magnitudes_begin_as_pefts_from_the_weights_in_the_files(
    family: str, part: Zero3Partition | None, tmp_path: Path
) -> None:
    model_of(family).save_pretrained(tmp_path)
    dora = LoraConfig(**ALL, use_dora=True)
    ours = parameters(adapt(read_source(str(tmp_path)), Adaptation(config=lora_config(dora)), part=part))
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path), dora)
    theirs = {name.removeprefix(PREFIX): p for name, p in model.named_parameters() if "magnitude" in name}
    assert len(theirs) > 4
    assert [name for name, magnitude in theirs.items() if not torch.equal(ours[name], magnitude)] == []


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("family", ["gpt2", "qwen2"])
def test_dora_has_pefts_logits_and_gradients(family: str, dropout: float) -> None:
    dora = LoraConfig(**ALL, use_dora=True, lora_dropout=dropout, use_rslora=True)
    model: Any = get_peft_model(model_of(family), dora)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data += torch.randn_like(parameter) / 5
    found = adapted_model(model.eval())
    assert found is not None
    built = build(adapt(*found))
    if dropout:
        adapters = [module for module in (model, *built.modules.values()) for module in module.modules()]
        for module in adapters:
            if type(module) is torch.nn.Dropout and module.p == dropout:
                module.train()
            if is_wrapper(module):
                module.training = True
    torch.manual_seed(0)
    logits = run(built, IDS)
    torch.manual_seed(0)
    expected = model(IDS).logits
    assert torch.allclose(logits, expected, atol=1e-6)
    logits.logsumexp(-1).mean().backward()
    expected.logsumexp(-1).mean().backward()
    ours = {name: p for module in built.modules.values() for name, p in module.named_parameters()}
    theirs = {n.removeprefix(PREFIX): p for n, p in model.named_parameters() if p.requires_grad}
    assert [n for n, p in theirs.items() if not torch.allclose(ours[n].grad, p.grad, rtol=1e-4, atol=1e-8)] == []


def test_what_was_changed_in_a_model_beside_its_adapters_is_kept() -> None:
    """Replaced modules, attributes and unfrozen parameters of the base, before and after peft's layers were added."""
    base = model_of("llama")
    base.model.layers[0].mlp.act_fn = torch.nn.Tanh()
    model: Any = get_peft_model(base, LoraConfig(**ALL))
    base.model.norm.variance_epsilon = 0.5
    base.model.layers[1].self_attn.q_proj.base_layer.bias = torch.nn.Parameter(torch.ones(64), requires_grad=False)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.requires_grad = True
        elif ".lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    found = adapted_model(model.eval())
    assert found is not None
    built = build(adapt(*found))
    logits = run(built, IDS)
    assert torch.equal(logits, model(IDS).logits)
    ours = {saved_name(n): p for m in built.modules.values() for n, p in m.named_parameters() if p.requires_grad}
    theirs = {name.replace(".default.", "."): p for name, p in model.named_parameters() if p.requires_grad}
    assert ours.keys() == theirs.keys()
    logits.logsumexp(-1).mean().backward()
    model(IDS).logits.logsumexp(-1).mean().backward()
    assert all(torch.allclose(ours[name].grad, theirs[name].grad, atol=1e-7) for name in theirs)


def test_an_adapter_is_trained_beside_inactive_ones_of_other_layers() -> None:
    other = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["norm"])
    model: Any = get_peft_model(model_of("llama"), other, adapter_name="other")
    model.add_adapter("second", LoraConfig(r=4, target_modules=["v_proj"]))
    model.set_adapter("second")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    found = adapted_model(model.eval())
    assert found is not None
    built = build(adapt(*found))
    assert torch.equal(run(built, IDS), model(IDS).logits)
    trained = {n for m in built.modules.values() for n, p in m.named_parameters() if p.requires_grad}
    assert trained and all(".v_proj.lora_" in name for name in trained)


def test_changed_adapters_are_refused_by_name() -> None:
    def changed(change: Any) -> str:
        model: Any = get_peft_model(model_of("llama"), LoraConfig(**ALL))
        change(model, model.base_model.model.model.layers[0].mlp.up_proj)
        with pytest.raises(UserError, match=r"model\.layers\.0\.mlp\.up_proj|PeftModel") as caught:
            adapted_model(model)
        return str(caught.value)

    assert "its scaling is 5.0, but the adapter's config makes 2.0" in changed(
        lambda _, layer: layer.set_scale("default", 2.5)
    )
    assert "its adapters are merged into its weights" in changed(lambda _, layer: layer.merge())
    assert "its adapters are disabled" in changed(lambda _, layer: layer.enable_adapters(enabled=False))
    assert "lora_dropout" in changed(lambda _, layer: layer.lora_dropout.update({"default": torch.nn.Dropout(0.5)}))
    assert "lora_A.default.weight is frozen" in changed(lambda _, layer: layer.lora_A.requires_grad_(False))
    plain = torch.nn.Linear(64, 96, bias=False)
    assert "unlike the model" in changed(
        lambda model, _: model.base_model.model.set_submodule("model.layers.0.mlp.up_proj", plain)
    )
    assert "forward hook" in changed(lambda model, _: model.register_forward_hook(lambda *_: None))


def test_experts_of_any_width_have_adapters() -> None:
    """peft's wrapper of experts asks for values, and on a CPU grouped products want rows of whole 16 bytes."""
    names = parameters(fresh("mixtral", ALL, intermediate_size=37), 2, 3)
    assert any("experts" in name and ".lora_" in name for name in names)


def test_modules_to_save_are_trained_whole_and_stored_as_peft_does() -> None:
    peft = {"r": 4, "target_modules": ["q_proj", "lm_head"], "modules_to_save": ["input_layernorm", "embed_tokens"]}
    model = get_peft_model(model_of("llama", tie_word_embeddings=False), LoraConfig(**peft)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.01)
    found = adapted_model(model)
    assert found is not None
    causal = adapt(*found)
    built = build(causal)
    assert torch.equal(run(built, IDS), model(IDS).logits)
    ours = {saved_name(n): p for m in built.modules.values() for n, p in m.named_parameters() if p.requires_grad}
    theirs = set(get_peft_model_state_dict(model))  # peft adds a frozen copy of a head that it adapts
    assert ours.keys() == theirs - {"base_model.model.lm_head.base_layer.weight"}
    assert causal.size(trained=True) == model.get_nb_trainable_parameters()[0]


def test_frozen_tied_embeddings_stay_one_and_are_counted_once() -> None:
    causal = fresh("llama", ALL, tie_word_embeddings=True)
    built = build(causal)
    whole = [p for module in built.modules.values() for p in module.parameters()]
    shared = {id(p) for p in built.modules[0].parameters()} & {
        id(p) for p in built.modules[len(built.modules) - 1].parameters()
    }
    assert len(shared) == 1
    assert causal.size() == sum(p.numel() for p in {id(p): p for p in whole}.values())


def test_tied_embeddings_are_trained_as_one_or_the_wish_is_refused(tmp_path: Path) -> None:
    model_of("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    peft = {**ALL, "modules_to_save": ["lm_head"]}
    with pytest.raises(UserError, match=r"untie lm_head\.weight from model\.embed_tokens\.weight"):
        adapt(read_source(str(tmp_path)), Adaptation(config=lora_config(LoraConfig(**peft))))
    config = lora_config(LoraConfig(**peft, ensure_weight_tying=True))
    built = build(adapt(read_source(str(tmp_path)), Adaptation(config=config)))
    embedding = built.modules[0].get_parameter("model.embed_tokens.weight")
    assert embedding.requires_grad
    assert embedding is built.modules[len(built.modules) - 1].get_parameter("lm_head.weight")


@pytest.mark.parametrize("rank", [0, 3])
def test_an_adapter_is_cut_as_its_layer(rank: int) -> None:
    place = TensorParallel(rank=rank, size=4)
    whole, local = whole_llama(), parameters(fresh("llama", ALL, place=place))
    prefix = "model.layers.0."

    def part(name: str, dim: int, index: int = rank, of: int = 4) -> Tensor:
        return whole[name].chunk(of, dim)[index]

    for name, dim in (("self_attn.q_proj", 0), ("mlp.up_proj", 0), ("self_attn.o_proj", 1), ("mlp.down_proj", 1)):
        base, a, b = (f"{prefix}{name}.{part}.weight" for part in ("base_layer", "lora_A.default", "lora_B.default"))
        assert torch.equal(local[base], part(base, dim))
        assert torch.equal(local[a], part(a, 1) if dim else whole[a])
        assert local[b].shape == (whole[b].shape if dim else part(b, 0).shape)
    kv = f"{prefix}self_attn.k_proj.lora_B.default.weight"  # two heads on four ranks: neighbours hold the same one
    assert local[kv].shape == part(kv, 0, rank // 2, 2).shape
    assert local[kv].shard.owner == (rank % 2 == 0)


def test_a_packed_layers_adapter_is_cut_by_the_same_parts() -> None:
    local = parameters(fresh("gpt2", ALL, place=TensorParallel(rank=1, size=2)))
    name = "transformer.h.0.attn.c_attn."
    pieces = ((32, 64), (96, 128), (160, 192))  # the second half of query, key and value
    assert local[name + "lora_B.default.weight"].shard.pieces == pieces
    assert local[name + "base_layer.weight"].shard.pieces == pieces
    assert local[name + "lora_B.default.weight"].shape == (96, 4)


@pytest.mark.parametrize(
    ("peft", "wanted"),
    [
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa' is not supported"),
        ({"init_lora_weights": False}, "init_lora_weights False is not supported"),
        ({"use_qalora": True}, "use_qalora is not supported"),
        ({"target_modules": ["embed_tokens", "q_proj"]}, "a Embedding, but LoRA supports only linear layers"),
        ({"target_modules": ["no_such"]}, "does not fit these LoRA targets: Target modules"),
        ({"target_modules": "(q_proj"}, r"does not fit these LoRA targets: missing \)"),
        ({"modules_to_save": ["no_such"]}, "modules_to_save: this llama model has no module named no_such"),
    ],
)
def test_what_cannot_be_trained_is_refused(peft: dict[str, Any], wanted: str) -> None:
    with pytest.raises(UserError, match=wanted) as told:
        fresh("llama", {**ALL, **peft})
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("targets", [["lm_head"], ["q_proj", "embed_tokens"]])
def test_a_tied_weight_gets_no_adapter_because_merging_would_change_both_layers(targets: list[str]) -> None:
    with pytest.raises(UserError, match=f"{targets[-1]} shares its weight with .*which merged adapters would change"):
        fresh("llama", {"r": 4, "target_modules": targets}, tie_word_embeddings=True)
    fresh("llama", {"r": 4, "target_modules": ["lm_head"]}, tie_word_embeddings=False)


def test_target_modules_that_are_not_there_are_told() -> None:
    with pytest.warns(UserWarning, match="this llama model has no module named c_attn, v_prj$"):
        fresh("llama", {"r": 4, "target_modules": ["q_proj", "v_prj", "c_attn", "layers.0.self_attn.k_proj"]})


def test_other_methods_than_lora_are_refused() -> None:
    with pytest.raises(UserError, match="IA3Config, but only peft's LoraConfig"):
        lora_config(IA3Config())
    model = get_peft_model(model_of("llama"), IA3Config(task_type="CAUSAL_LM"))
    with pytest.raises(UserError, match="IA3Config"):
        adapted_model(model)


def test_a_router_that_is_no_linear_layer_is_refused() -> None:
    with pytest.raises(UserError, match="router is a PhimoeTopKRouter, whose output is not that of a linear layer"):
        fresh("phimoe", ALL, num_local_experts=4)


def test_dora_of_experts_is_refused_as_peft_has_none() -> None:
    with pytest.raises(UserError, match=r"peft has no DoRA for experts \(--lora_target_modules: name linear layers"):
        fresh("mixtral", {**ALL, "use_dora": True})


def test_a_family_that_peft_has_no_targets_for_is_told_what_to_say() -> None:
    with pytest.raises(UserError, match="--lora_target_modules: all-linear"):
        fresh("olmo2", {"r": 4})


def test_a_model_without_adapters_is_not_taken_for_one_with() -> None:
    assert adapted_model(model_of("llama")) is None
    assert adapted_model(config("llama")) is None


def test_the_fingerprint_tells_configs_apart_and_nothing_else() -> None:
    def of(**settings: Any) -> str:
        return Adaptation(config=LoraConfig(**settings)).fingerprint()

    one = of(r=4, target_modules=["b", "a"])
    assert one == of(r=4, target_modules=["a", "b"], inference_mode=True)
    assert one != of(r=8, target_modules=["a", "b"])
    assert one != of(r=4, target_modules=["a", "b"], lora_alpha=1)


def test_adapters_that_peft_would_read_under_other_names_are_told_before_training() -> None:
    with pytest.warns(
        UserWarning, match=r"peft cannot load adapters of model\.layers\.1\.mlp\.shared_experts\.\w+ of a laguna"
    ):
        fresh("laguna", ALL)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        fresh("laguna", {"r": 2, "target_modules": ["q_proj", "v_proj"]})
