"""What a model is made from: its class is the one that its config stands for, and no code of its own is run."""

from __future__ import annotations

import json

import pytest
from transformers import CONFIG_MAPPING, LlamaConfig, LlamaForCausalLM, LlamaModel

from harness.errors import UserError
from harness.hf.skeleton import ModelSource, position_limit, read_source, text_decoder
from harness.verify.tiny_copy import tiny_config, tiny_model


class Widened(LlamaForCausalLM):
    """A forward of its own behind a config that stands for another."""


class WidenedConfig(LlamaConfig):
    """Stands for no model."""

    model_type = "widened"


def test_a_model_in_memory_is_what_its_config_stands_for():
    model = tiny_model(tiny_config("llama"))
    assert ModelSource.of_model(model).name == "LlamaForCausalLM"


@pytest.mark.parametrize("kind", [Widened, LlamaModel])
def test_a_model_of_another_class_is_refused(kind):
    with pytest.raises(UserError, match=rf"register\(LlamaConfig, {kind.__name__}, exist_ok=True\)"):
        ModelSource.of_model(kind(tiny_config("llama")))


def test_a_model_that_no_config_stands_for_is_refused():
    with pytest.raises(UserError, match=r"register\(WidenedConfig, Widened"):
        ModelSource.of_model(Widened(WidenedConfig(**tiny_config("llama").to_dict())))


@pytest.mark.parametrize(("stated", "wanted"), [(128, 128), (-1, None), (0, None)])
def test_a_limit_of_positions_is_a_positive_number(stated, wanted):
    config = tiny_config("llama")
    config.max_position_embeddings = stated
    assert position_limit(config) == wanted


def test_code_in_a_directory_is_not_run(tmp_path):
    config = {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text("raise SystemExit(3)\n")
    with pytest.raises(UserError, match="needs custom code"):
        read_source(str(tmp_path))


def test_a_text_part_without_a_causal_class_is_refused():
    with pytest.raises(UserError, match=r"transformers has no causal decoder for its text part \(blip_text_model\)"):
        text_decoder(CONFIG_MAPPING["blip"]())


@pytest.mark.filterwarnings("ignore:only the text decoder")
@pytest.mark.parametrize(("family", "kind"), [("emu3", "Emu3ForCausalLM"), ("mllama", "MllamaForCausalLM")])
def test_a_text_part_that_transformers_builds_from_the_whole_config_alone_is_built(family, kind, tmp_path):
    """Also from the directory that training has written, whose config is that of the text part."""
    text_decoder(CONFIG_MAPPING[family]()).save_pretrained(tmp_path)
    assert type(read_source(str(tmp_path)).skeleton()).__name__ == kind


@pytest.mark.filterwarnings("ignore:only the text decoder")
@pytest.mark.parametrize(("family", "text"), [("inkling_mm_model", "inkling_text"), ("aria", "aria_text")])
def test_of_a_model_of_several_parts_the_text_decoder_is_trained(family, text):
    """One of these says whether the head is the embedding table, the other does not."""
    whole = CONFIG_MAPPING[family]()
    found = text_decoder(whole)
    assert found.model_type == text
    tied = [getattr(config, "tie_word_embeddings", None) for config in (found, whole)]
    assert tied[0] == tied[1]
