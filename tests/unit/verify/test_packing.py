"""Models that keep packed documents apart, and the ways in which others do not."""

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from harness.errors import UserError
from harness.hf.skeleton import ModelSource
from harness.verify.packing import require_documents_apart, require_flash_apart
from harness.verify.tiny_copy import shrink, tiny_config, tiny_ids, tiny_model
from tests.support.layers import build, prepare, run

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("family", "attention"),
    [
        *((family, kind) for family in ("llama", "gpt2", "gemma3_text", "mixtral") for kind in ("eager", "sdpa")),
        ("gpt_oss", "eager"),  # gives its masks no position ids
        ("opt", "sdpa"),
        ("mpt", "eager"),  # takes none: its slopes say how far apart tokens are
    ],
)
def test_models_whose_masks_transformers_makes_keep_documents_apart(family: str, attention: str) -> None:
    config = CONFIG_MAPPING[family]()
    config._attn_implementation = attention
    require_documents_apart(config)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("mamba", {}),  # a state along the row
        ("bart", {"is_decoder": True}),  # numbers positions by itself
        ("lfm2", {"layer_types": ["conv"] * 6, "num_hidden_layers": 6}),  # convolutions over the row
    ],
)
def test_models_whose_documents_see_each_other_are_refused(family: str, settings: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"'{family}' does not separate packed documents: .* train without"):
        require_documents_apart(CONFIG_MAPPING[family](**settings))


def test_a_model_that_is_not_causal_is_refused_as_such() -> None:
    with pytest.raises(UserError, match="'gemma': its logits depend on later tokens, so it is not a causal decoder"):
        require_documents_apart(CONFIG_MAPPING["gemma"](use_bidirectional_attention=True))


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("axk1", "num_key_value_heads is 2, .* for each of the 4 heads, .* set num_key_value_heads to 4"),
        ("kimi_linear", "does not separate packed documents"),  # which more key heads would not change
    ],
)
def test_fewer_key_heads_than_the_weights_have_are_named(family: str, reason: str) -> None:
    config = tiny_config(family)
    config.num_key_value_heads = 2
    with pytest.raises(UserError, match=reason):
        require_documents_apart(config)


def test_keys_from_a_compressed_form_keep_documents_apart_in_a_tiny_copy() -> None:
    require_documents_apart(tiny_config("minicpm3"))  # whose queries cannot share keys


def test_flash_attention_takes_one_packed_sample_at_a_time() -> None:
    config = CONFIG_MAPPING["llama"]()
    config._attn_implementation = "flash_attention_2"
    with pytest.raises(UserError, match="micro-batches of one sample, but this one has 2"):
        require_flash_apart(config, 2, CPU, torch.bfloat16)
    require_flash_apart(CONFIG_MAPPING["llama"](), 2, CPU, torch.float32)  # without flash-attention nothing is asked


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma3_text", "mpt"])
def test_two_stages_give_packed_documents_the_logits_of_each_alone(family: str) -> None:
    model = tiny_model(shrink(CONFIG_MAPPING[family]()))
    ids, lengths = tiny_ids(model), (5, 1, 17, 9)
    positions = torch.cat([torch.arange(length) for length in lengths]).repeat(len(ids), 1)
    first, second = (prepare(ModelSource.of_model(model)) for _ in range(2))
    with torch.no_grad():
        packed = run(build(second, 2), run(build(first, 0, 2), (ids, positions)))
        alone = [model(input_ids=document, use_cache=False).logits for document in ids.split(lengths, dim=1)]
    torch.testing.assert_close(packed, torch.cat(alone, dim=1), rtol=5e-6, atol=5e-6)
