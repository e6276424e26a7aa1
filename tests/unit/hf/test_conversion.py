"""Checkpoints of many families go in and come out as they were: the same values, names and files, to the last byte."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import ConversionOps, WeightConverter

from harness.checkpoint.exporting.weights import export_weights
from harness.errors import UserError
from harness.hf.skeleton import build_skeleton, read_source
from harness.hf.weights.conversion import Checkpoint, Unconverted, default_form, open_checkpoint, untie
from harness.topology.groups import Groups, build_groups
from harness.topology.layout import Layout
from tests.support.layers import build, prepare
from tests.support.models import config

EXPERTS = dict(num_experts=4, num_local_experts=4, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=48)
LATENT = dict(kv_lora_rank=16, q_lora_rank=24, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16, n_group=1)
# experts stored one by one, or under other names; gate and up apart or in one; other names throughout; none of these
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": EXPERTS,
    "qwen2_moe": EXPERTS,
    "qwen3_moe": EXPERTS,
    "deepseek_v3": {**EXPERTS, **LATENT, "topk_group": 1, "first_k_dense_replace": 1},
    "gpt_oss": EXPERTS,
    "phimoe": EXPERTS,
    "olmoe": EXPERTS,
    "granitemoe": EXPERTS,
    "gpt_neox": {},
    "gpt2": {},
    "bloom": {},
    "gemma2": {},
}


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Groups]:
    store = tmp_path_factory.mktemp("store") / "file"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield build_groups(Layout())
    dist.destroy_process_group()


def save(folder: Path, family: str, most: str = "150KB", **changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(family, **changes)).float()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor += 0.01 * torch.randn_like(tensor)
    model.save_pretrained(folder, max_shard_size=most)
    return model


def opened(folder: Path) -> Checkpoint:
    return open_checkpoint(folder, build_skeleton(read_source(str(folder)).config))


def read(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("model*")}


def tensors_in(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def rewrite(folder: Path, change: Any) -> None:
    path = folder / "model.safetensors"
    content = load_file(path)
    change(content)
    save_file(content, path, metadata={"format": "pt"})


@pytest.mark.parametrize("family", FAMILIES)
def test_a_round_trip_gives_the_same_files(tmp_path: Path, groups: Groups, family: str) -> None:
    save(tmp_path, family, **FAMILIES[family])
    wanted = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint = opened(tmp_path)
    for name, tensor in wanted.state_dict().items():
        assert torch.equal(read(checkpoint.tensors[name]), tensor), name
    out = tmp_path / "out"
    out.mkdir()
    export_weights(wanted, groups, out, rename=str, form=checkpoint.form)
    assert len(digests(out)) > 2
    assert digests(out) == digests(tmp_path)


@pytest.mark.parametrize("family", ["mixtral", "gpt_neox", "gemma2"])
def test_a_new_model_is_written_as_save_pretrained_writes_it(tmp_path: Path, groups: Groups, family: str) -> None:
    model = save(tmp_path, family, most="1GB", **FAMILIES[family])
    out = tmp_path / "out"
    out.mkdir()
    export_weights(model, groups, out, rename=str, form=default_form(build_skeleton(model.config)))
    assert digests(out) == digests(tmp_path)


def test_another_dtype_is_written_in_files_of_the_old_size(tmp_path: Path, groups: Groups) -> None:
    AutoModelForCausalLM.from_config(config("llama"), dtype=torch.bfloat16).save_pretrained(
        tmp_path, max_shard_size="100KB"
    )
    checkpoint = opened(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    out = tmp_path / "out"
    out.mkdir()
    export_weights(model, groups, out, rename=str, form=checkpoint.form)
    before, after = ([path.stat().st_size for path in folder.glob("*.safetensors")] for folder in (tmp_path, out))
    assert len(after) > len(before)
    assert max(after) <= max(before) + 1000  # the headers' lengths differ
    assert all(torch.equal(tensor.float(), tensors_in(out)[name]) for name, tensor in tensors_in(tmp_path).items())


# -- tied weights ------------------------------------------------------------------------------------------

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.mark.parametrize("stored", ["embedding", "head", "both"])
def test_a_tied_weight_is_found_under_either_name(tmp_path: Path, groups: Groups, stored: str) -> None:
    model = save(tmp_path, "llama", most="1GB", tie_word_embeddings=True)

    def change(content: dict[str, Tensor]) -> None:
        if stored != "embedding":
            content[HEAD] = content[EMBEDDING].clone()
        if stored == "head":
            del content[EMBEDDING]

    rewrite(tmp_path, change)
    checkpoint = opened(tmp_path)
    assert checkpoint.untied == ()
    for name in (EMBEDDING, HEAD):
        assert torch.equal(read(checkpoint.tensors[name]), model.get_parameter(EMBEDDING))
    out = tmp_path / "out"
    out.mkdir()
    export_weights(model, groups, out, rename=str, form=checkpoint.form)
    assert digests(out) == digests(tmp_path)


def test_tied_names_with_values_of_their_own_are_untied(tmp_path: Path) -> None:
    model = save(tmp_path, "llama", most="1GB", tie_word_embeddings=True)
    rewrite(tmp_path, lambda content: content.update({HEAD: content[EMBEDDING] + 1}))
    skeleton = build_skeleton(model.config)
    assert skeleton.get_parameter(HEAD) is skeleton.get_parameter(EMBEDDING)
    checkpoint = open_checkpoint(tmp_path, skeleton)
    untie(skeleton, checkpoint.untied)
    assert skeleton.get_parameter(HEAD) is not skeleton.get_parameter(EMBEDDING)
    assert torch.equal(read(checkpoint.tensors[HEAD]), model.get_parameter(EMBEDDING) + 1)
    assert {EMBEDDING, HEAD} <= set(checkpoint.form.tensors)


# -- names -------------------------------------------------------------------------------------------------


def test_a_base_models_checkpoint_keeps_its_names(tmp_path: Path, groups: Groups) -> None:
    model = save(tmp_path, "mixtral", most="1GB", tie_word_embeddings=True, **EXPERTS)

    def strip(content: dict[str, Tensor]) -> None:
        for name in list(content):
            content[name.removeprefix("model.")] = content.pop(name)

    rewrite(tmp_path, strip)
    checkpoint = opened(tmp_path)
    assert all(torch.equal(read(checkpoint.tensors[name]), p) for name, p in model.named_parameters())
    out = tmp_path / "out"
    out.mkdir()
    export_weights(model, groups, out, rename=str, form=checkpoint.form)
    assert digests(out) == digests(tmp_path)


@pytest.mark.parametrize("places", [("language_model.model.", "language_model."), ("model.language_model.", "")])
def test_a_text_decoder_is_found_inside_a_composite_model(tmp_path: Path, places: tuple[str, str]) -> None:
    model = save(tmp_path, "mixtral", most="1GB", **EXPERTS)
    names = set(tensors_in(tmp_path))

    def wrap(content: dict[str, Tensor]) -> None:
        for name in list(content):
            inside = name.startswith("model.")
            renamed = places[0] + name.removeprefix("model.") if inside else places[1] + name
            content[renamed] = content.pop(name)
        content["vision_tower.layers.0.self_attn.q_proj.weight"] = torch.ones(4, 4)

    rewrite(tmp_path, wrap)
    with pytest.warns(UserWarning, match="vision_tower"):
        checkpoint = opened(tmp_path)
    assert all(torch.equal(read(checkpoint.tensors[name]), p) for name, p in model.named_parameters())
    assert set(checkpoint.form.tensors) == names  # the text decoder is written as a model of its own


class Sorted(ConversionOps):
    """A conversion that no arrangement of slices can express, nor one function of whole tensors."""

    def convert(self, input_dict: dict[str, Any], **_: Any) -> dict[str, Any]:
        (tensors,) = input_dict.values()
        return {"input_layernorm.weight": torch.sort(tensors[0])[0]}


def test_what_cannot_be_read_lazily_is_read_by_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save(tmp_path, "llama", most="1GB")

    def rules(*_: Any, **__: Any) -> list[WeightConverter]:
        return [WeightConverter("input_layernorm.weight", "input_layernorm.weight", operations=[Sorted()])]

    for module in ("harness.hf.weights.conversion", "transformers.modeling_utils"):
        monkeypatch.setattr(f"{module}.get_model_conversion_mapping", rules)
    with pytest.raises(Unconverted, match="input_layernorm"):
        opened(tmp_path)
    with pytest.warns(UserWarning, match="in slices"):
        causal = prepare(read_source(str(tmp_path)))
    norm = "model.layers.1.input_layernorm.weight"
    read_norm = build(causal).modules[2].get_parameter(norm)
    assert torch.equal(read_norm, model.get_parameter(norm).sort().values)


# -- what is wrong is told by name -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lost", "wanted"),
    [
        (["model.layers.1.self_attn.q_proj.weight"], r"lack model\.layers\.1\.self_attn\.q_proj\.weight"),
        (["model.layers.0.block_sparse_moe.experts.2.w1.weight"], r"lack model.*experts\.2\.w1\.weight"),
        ([f"model.layers.0.block_sparse_moe.experts.3.w{i}.weight" for i in (1, 2, 3)], r"experts\.3\.w1\.weight"),
    ],
)
def test_missing_tensors_are_named_as_the_checkpoint_would(tmp_path: Path, lost: list[str], wanted: str) -> None:
    save(tmp_path, "mixtral", most="1GB", **EXPERTS)
    rewrite(tmp_path, lambda content: [content.pop(name) for name in lost])
    with pytest.raises(UserError, match=wanted) as told:
        opened(tmp_path)
    assert not isinstance(told.value, Unconverted)


def test_a_misshapen_expert_is_told(tmp_path: Path) -> None:
    save(tmp_path, "mixtral", most="1GB", **EXPERTS)

    def halve(content: dict[str, Tensor]) -> None:
        for name in [name for name in content if ".w2." in name]:
            content[name] = content[name][:, :10].clone()

    rewrite(tmp_path, halve)
    with pytest.raises(UserError, match=r"down_proj has shape \(4, 64, 10\), but the config expects \(4, 64, 96\)"):
        opened(tmp_path)


def test_weights_that_are_whole_numbers_are_refused(tmp_path: Path) -> None:
    save(tmp_path, "llama", most="1GB")
    name = "model.layers.0.mlp.up_proj.weight"
    rewrite(tmp_path, lambda content: content.update({name: content[name].to(torch.int8)}))
    with pytest.raises(UserError, match=r"up_proj\.weight is stored as torch\.int8: dequantize"):
        opened(tmp_path)


def test_a_quantized_checkpoint_is_refused(tmp_path: Path) -> None:
    model = save(tmp_path, "llama", most="1GB")
    model.config.quantization_config = {"quant_method": "fp8"}
    model.config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="the weights are quantized"):
        read_source(str(tmp_path))
