"""The implementation of attention: the wish, the config's own, the default, and what cannot be had."""

import json
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, _registry, current_flash_attention_impl, restore_flash_attention_impl
from transformers import AutoConfig, BloomConfig, LlamaConfig

from harness.arguments import TrainingArguments
from harness.errors import UserError
from harness.hf.layers.attention import (
    AttentionKernels,
    on_any_device,
    require_available,
    require_sdpa_backend,
    with_attention,
)
from harness.hf.skeleton import build_skeleton

CPU = torch.device("cpu")
SIZES = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def built(config, wanted=None):
    return build_skeleton(with_attention(config, wanted)).config._attn_implementation


def test_the_wish_comes_before_the_config_and_the_config_before_the_default(tmp_path: Path) -> None:
    assert built(LlamaConfig(**SIZES)) == "sdpa"
    assert built(BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=99)) == "eager"  # it has no sdpa
    own = {"model_type": "llama", "attn_implementation": "eager", **SIZES}
    (tmp_path / "config.json").write_text(json.dumps(own))
    config = AutoConfig.from_pretrained(tmp_path)
    assert built(config) == "eager"
    assert built(config, "sdpa") == "sdpa"
    assert config._attn_implementation == "eager"  # the config is left as it was


def test_what_cannot_be_had_is_one_line() -> None:
    require_available(LlamaConfig(**SIZES), CPU, torch.float32)
    with pytest.raises(UserError, match="flash_attention_2: needs a GPU and its Python package"):
        require_available(with_attention(LlamaConfig(**SIZES), "flash_attention_2"), CPU, torch.bfloat16)
    flex = with_attention(LlamaConfig(**SIZES, attention_dropout=0.1), "flex_attention")
    with pytest.raises(UserError, match="flex_attention: trains only on a GPU"):
        require_available(flex, CPU, torch.bfloat16)
    with pytest.raises(UserError, match="flex_attention: does not support dropout: set the model's attention"):
        require_available(flex, torch.device("cuda"), torch.bfloat16)
    flex.attention_dropout = 0.0
    require_available(flex, torch.device("cuda"), torch.float32)
    with pytest.raises(
        UserError, match=r"does not support an attention .*: use another --attn_implementation than sdpa"
    ):
        built(BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=99), "sdpa")
    with pytest.raises(UserError, match="--attn_implementation paged: not one of eager, sdpa"):
        TrainingArguments(attn_implementation="paged")


@pytest.mark.parametrize("name", ["flash_attention_2", "flex_attention"])
def test_a_model_with_an_attention_of_gpus_is_tried_without_it(name: str) -> None:
    model = build_skeleton(LlamaConfig(**SIZES))
    model.config._attn_implementation = name
    with on_any_device(model):
        assert model.model.layers[0].self_attn.config._attn_implementation == "sdpa"
    assert model.model.layers[0].self_attn.config._attn_implementation == name


@pytest.mark.parametrize(
    ("first", "generation", "shapes", "found"),
    [
        ("auto", 9, 1, "CUDNN_ATTENTION"),
        ("auto", 9, 16, "CUDNN_ATTENTION"),
        ("auto", 9, 17, None),
        ("auto", 8, 1, None),
        ("cudnn", 8, 100, "CUDNN_ATTENTION"),
        ("efficient", 9, 1, "EFFICIENT_ATTENTION"),
    ],
)
def test_the_kernel_that_is_tried_first(
    first: str, generation: int, shapes: int, found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (generation, 0))
    usual = torch._C._get_sdp_priority_order()
    with AttentionKernels(first, torch.device("cuda")).ordered(range(shapes)):
        order = torch._C._get_sdp_priority_order()
    assert order == usual if found is None else order[0] == getattr(SDPBackend, found).value
    assert sorted(order)[:4] == sorted(usual)[:4] and torch._C._get_sdp_priority_order() == usual
    with AttentionKernels(first, torch.device("cpu")).ordered([]):
        assert torch._C._get_sdp_priority_order() == usual


def test_the_flash_attention_of_another_package_takes_the_place_of_torchs_and_comes_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Handle:
        def remove(self) -> None:
            pass

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, "FA3", Handle)  # torch's own needs the package
    with AttentionKernels("fa3", torch.device("cuda")).ordered(range(100)):
        assert current_flash_attention_impl() == "FA3"
        assert torch._C._get_sdp_priority_order()[0] == SDPBackend.FLASH_ATTENTION.value
    restore_flash_attention_impl()
    AttentionKernels("fa3", torch.device("cpu"))
    assert current_flash_attention_impl() is None


@pytest.mark.parametrize(
    ("wanted", "attention", "device", "words"),
    [
        ("cudnn", None, "cpu", "on a CPU: omit"),
        ("flash", "eager", "cuda", "acts on sdpa attention, and this run's is eager"),
        ("fa3", "sdpa", "cuda", "needs the package flash_attn_interface"),
    ],
)
def test_a_kernel_that_cannot_act_is_refused(wanted: str, attention: str | None, device: str, words: str) -> None:
    with pytest.raises(UserError, match=f"--sdpa_backend {wanted}: .*{words}"):
        require_sdpa_backend(wanted, with_attention(LlamaConfig(**SIZES), attention), torch.device(device))
