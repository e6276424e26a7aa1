"""Reading weights: what is missing, extra or misshapen is told by name; a round trip changes no bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from harness.checkpoint.exporting.weights import export_config
from harness.errors import UserError
from harness.hf.locate import model_directory, presets
from harness.hf.skeleton import ModelSource, build_skeleton, read_source
from harness.hf.weights.layer_weights import fill
from harness.hf.weights.tensor_files import OpenFile, open_tensors
from harness.parallel.pipeline.staged_module import build_layers
from harness.parallel.tensor.shard import mark, share_of
from harness.parallel.zero import Zero3Partition
from tests.support.layers import prepare
from tests.support.models import config


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config("llama", tie_word_embeddings=True)).save_pretrained(tmp_path)
    return tmp_path


def tensors(source: ModelSource, **options: Any) -> dict[str, torch.Tensor]:
    causal = prepare(source, **options)
    built = build_layers(causal.layers, 0, len(causal.layers), seed=0)
    return {name: p for module in built.modules.values() for name, p in module.named_parameters()}


def rewrite(folder: Path, change: Any) -> None:
    path = folder / "model.safetensors"
    content = load_file(path)
    change(content)
    save_file(content, path, metadata={"format": "pt"})


def test_weights_are_read_to_the_bit(saved: Path) -> None:
    read = tensors(read_source(str(saved)))
    for name, tensor in load_file(saved / "model.safetensors").items():
        assert torch.equal(read[name], tensor), name


def test_weights_are_read_from_shards_with_an_index(saved: Path) -> None:
    whole = load_file(saved / "model.safetensors")
    AutoModelForCausalLM.from_pretrained(saved).save_pretrained(saved, max_shard_size="100KB")
    (saved / "model.safetensors").unlink(missing_ok=True)
    assert (saved / "model.safetensors.index.json").is_file()
    read = tensors(read_source(str(saved)))
    assert all(torch.equal(read[name], tensor) for name, tensor in whole.items())


def test_a_base_models_checkpoint_is_read_without_its_prefix(saved: Path) -> None:
    whole = load_file(saved / "model.safetensors")

    def strip(content: dict[str, torch.Tensor]) -> None:
        for name in list(content):
            content[name.removeprefix("model.")] = content.pop(name)

    rewrite(saved, strip)
    read = tensors(read_source(str(saved)))
    assert all(torch.equal(read[name], tensor) for name, tensor in whole.items())


def test_tensors_that_are_stored_one_by_one_are_read_into_the_fused_one(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config("mixtral", num_local_experts=4))
    model.save_pretrained(tmp_path)
    stored = set(load_file(tmp_path / "model.safetensors"))
    assert stored != {name for name, _ in model.named_parameters()}  # one by one in the file, fused in the model
    read = tensors(read_source(str(tmp_path)))
    assert all(torch.equal(read[name], parameter) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("count", [2, 3])
def test_of_a_part_no_more_than_the_part_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config("mixtral", num_local_experts=4))
    model.save_pretrained(tmp_path)
    bytes_read: list[int] = []
    fill = OpenFile._fill
    monkeypatch.setattr(
        OpenFile, "_fill", lambda file, into, start: (bytes_read.append(len(into)), fill(file, into, start))
    )
    for index in range(count):
        part = Zero3Partition(index=index, count=count)
        read = tensors(read_source(str(tmp_path)), part=part)
        for name, parameter in model.named_parameters():
            for box in part.boxes(parameter.shape):
                assert torch.equal(read[name][box], parameter[box]), (name, box)
    assert sum(bytes_read) < 1.1 * sum(parameter.nbytes for parameter in model.parameters())


def test_a_part_of_a_shard_that_is_padded(saved: Path) -> None:
    whole = load_file(saved / "model.safetensors")["model.embed_tokens.weight"]
    shard = share_of(tuple(whole.shape), 0, 2, 3, multiple=128)
    local = nn.Parameter(torch.full(shard.local_shape, torch.nan))
    mark(local, shard)
    lazy = open_tensors(saved).tensors["model.embed_tokens.weight"]
    with torch.no_grad():
        for index in range(3):
            fill(local, lazy, Zero3Partition(index=index, count=3))
    assert shard.padding and torch.equal(local, shard.take(whole))


def test_a_missing_tensor_is_named(saved: Path) -> None:
    rewrite(saved, lambda content: content.pop("model.norm.weight"))
    with pytest.raises(UserError, match=r"lack model\.norm\.weight"):
        tensors(read_source(str(saved)))


def test_a_misshapen_tensor_is_named_with_both_shapes(saved: Path) -> None:
    rewrite(saved, lambda content: content.update({"model.norm.weight": torch.ones(7)}))
    with pytest.raises(UserError, match=r"model\.norm\.weight has shape \(7,\), but the config expects \(64,\)"):
        tensors(read_source(str(saved)))


def test_an_extra_tensor_is_a_warning_that_names_it(saved: Path) -> None:
    rewrite(saved, lambda content: content.update({"model.extra": torch.ones(7)}))
    with pytest.warns(UserWarning, match=r"model\.extra"):
        tensors(read_source(str(saved)))


def test_a_broken_file_is_one_line(saved: Path) -> None:
    (saved / "model.safetensors").write_bytes(b"not tensors")
    with pytest.raises(UserError, match="cannot be read"):
        tensors(read_source(str(saved)))


def test_presets_can_be_read() -> None:
    for name in presets():
        assert read_source(name).weights is None


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (None, "no config.json"),
        ("{", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ("{}", "has no model_type"),
    ],
)
def test_a_directory_that_holds_no_model_is_told(tmp_path: Path, content: str | None, wanted: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=wanted):
        model_directory(str(tmp_path))


def test_a_directory_of_adapters_is_told_from_one_that_holds_nothing(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="contains adapters but no model"):
        model_directory(str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"num_attention_heads": 7}, "is not a multiple of the number of attention heads"),
        ({"hidden_size": "64"}, "expected int, got str"),
        ({"hidden_act": "no_such"}, "KeyError: 'no_such'"),
    ],
)
def test_a_config_that_describes_no_model_is_told_in_one_line(
    saved: Path, changes: dict[str, Any], wanted: str
) -> None:
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(UserError, match=wanted) as told:
        build_skeleton(read_source(str(saved)).config)
    assert "\n" not in str(told.value)


def test_what_transformers_would_not_save_is_saved_if_it_can_be_read(saved: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(saved)
    model.config.max_length, model.generation_config.temperature = 9, 0.7
    for refused in (model.config, model.generation_config):
        with pytest.raises(ValueError, match=r"do_sample|max_length"):
            refused.save_pretrained(saved)
    model.config.token, model.generation_config.api_key = "of-the-hub", "of-a-server"
    export_config(ModelSource.of_model(model), torch.float32, saved)
    assert not any("of-" in (saved / f"{name}config.json").read_text() for name in ("", "generation_"))
    assert AutoModelForCausalLM.from_pretrained(saved).generation_config.temperature == 0.7
    model.generation_config.max_new_tokens = 0
    with pytest.raises(UserError, match=r"generation_config of the LlamaForCausalLM in memory .*max_new_tokens"):
        ModelSource.of_model(model)


def test_a_broken_generation_config_is_told(saved: Path) -> None:
    (saved / "generation_config.json").write_text("{")
    with pytest.raises(UserError, match=r"generation_config\.json: cannot be read"):
        read_source(str(saved))


def test_an_unknown_model_type_is_told(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no-such-type"}))
    with pytest.raises(UserError, match="not a model that transformers supports"):
        read_source(str(tmp_path))
