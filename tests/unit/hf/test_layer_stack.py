"""Which of a model's lists of modules holds its decoder layers, and how large its vocabulary is."""

from __future__ import annotations

import pytest
import torch
from transformers import CONFIG_MAPPING

from harness.errors import UserError
from harness.hf.forward.placeholders import find_stack
from harness.hf.skeleton import ModelSource, build_skeleton, text_decoder
from harness.hf.unbuilt import require_cut, vocabulary_size
from harness.parallel.comm import TensorParallel
from harness.verify.comparison import find_difference
from harness.verify.tiny_copy import shrink, tiny_config, tiny_ids, tiny_model
from tests.support.layers import prepare

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("family", "fields", "stack"),
    [
        ("llama", {}, "model.layers"),
        ("bart", {}, "model.decoder.layers"),
        ("git", {}, "git.encoder.layer"),  # the encoder of its images is as deep, and larger
        ("phi4_multimodal", {}, "model.layers"),
        ("longcat_flash", {}, "model.layers"),
        ("longcat_flash", {"num_layers": 1}, "model.layers"),  # counts as two, as many as a layer has attentions
    ],
)
def test_the_list_of_decoder_layers_is_found(family: str, fields: dict[str, int], stack: str) -> None:
    config = tiny_config(family)
    for name, value in fields.items():
        setattr(config, name, value)
    assert find_stack(build_skeleton(config)) == stack


def test_one_layer_that_counts_as_two_is_cut_right() -> None:
    config = tiny_config("longcat_flash")
    config.num_layers = 1
    assert find_difference(config, prepare, TensorParallel(), CPU) is None


@pytest.mark.filterwarnings("ignore:only the text decoder")
def test_layers_that_text_skips_keep_their_weights_after_the_others() -> None:
    config = shrink(text_decoder(CONFIG_MAPPING["mllama"]()))
    assert find_difference(config, prepare, TensorParallel(), CPU) is None
    outer = prepare(ModelSource(name="it", config=config, weights=None)).outer
    skipped = {f"model.layers.{index}" for index in config.cross_attention_layers}
    assert skipped and skipped <= outer.epilogue.keys() and skipped.isdisjoint(outer.layer_names)


def test_fewer_key_heads_than_the_weights_have_are_named() -> None:
    config = tiny_config("deepseek_v3")
    config.num_key_value_heads = 2
    with pytest.raises(UserError, match=r"for each of the 4 heads, .* set num_key_value_heads to 4"):
        prepare(ModelSource(name="it", config=config, weights=None))


def test_a_deeper_encoder_beside_the_layers_is_no_hindrance_to_the_cut() -> None:
    config = tiny_config("phi4_multimodal")
    config.num_hidden_layers = 1
    require_cut(ModelSource(name="it", config=config, weights=None), 2, 1)


def test_a_config_without_a_depth_or_with_another_has_costs_too() -> None:
    part = dict(vocab_size=260, hidden_size=32, intermediate_size=48, num_attention_heads=2, num_key_value_heads=2)
    part |= dict(num_hidden_layers=1, max_position_embeddings=128)
    config = CONFIG_MAPPING["blt"](
        vocab_size=260,
        max_position_embeddings=128,
        encoder_hash_byte_group_vocab=320,
        encoder_config=part | {"hidden_size_global": 64},
        decoder_config=part | {"hidden_size_global": 64},
        global_config=part | {"hidden_size": 64, "num_hidden_layers": 2},
        patcher_config=part,
    )
    assert find_stack(build_skeleton(config)) == "model.global_transformer.layers"
    model = prepare(ModelSource(name="it", config=config, weights=None))
    assert all(cost.flops_per_token() > 0 for cost in model.costs(32, checkpointed=False))
    deeper = tiny_config("xlstm")  # `num_blocks` counts its layers
    deeper.num_hidden_layers = 3
    model = prepare(ModelSource(name="it", config=deeper, weights=None))
    assert len(model.costs(32, checkpointed=False)) == 6


@pytest.mark.parametrize(("rows", "wanted"), [(60, 60), (200, 90)])
def test_of_two_vocabularies_the_ids_lie_in_both(rows: int, wanted: int) -> None:
    config = CONFIG_MAPPING["marian"](
        vocab_size=90,
        decoder_vocab_size=rows,
        d_model=16,
        decoder_layers=1,
        decoder_attention_heads=2,
        decoder_ffn_dim=16,
        tie_word_embeddings=False,
        share_encoder_decoder_embeddings=False,
        pad_token_id=0,
    )
    model = tiny_model(config)
    assert vocabulary_size(model) == wanted
    assert int(tiny_ids(model).max()) < wanted
    assert find_difference(config, prepare, TensorParallel(), CPU) is None
