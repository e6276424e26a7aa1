"""What travels besides the hidden state: found by running the model, exact in value and gradient."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, PreTrainedModel

from harness.errors import UserError
from harness.hf.forward.payload import CarriedTensor, PayloadSpec, StagePayload
from harness.hf.skeleton import ModelSource, read_source
from harness.parallel.pipeline.staged_module import Unpacker, build_layers, pack_payload
from harness.verify.tiny_copy import tiny_config, tiny_model
from tests.support.layers import prepare
from tests.support.models import config, model_of

FAMILIES = ("gemma3n_text", "zamba")
OTHERS = ("hy_v4", "deepseek_v4", "gemma4_text", "inkling2_text", "longcat_flash", "pegasus")


def three_stages(model: PreTrainedModel, value: Any) -> Any:
    """The output of the model cut into three stages that share nothing, and a gradient for the parameters of each."""
    stages = [prepare(ModelSource.of_model(model)) for _ in range(3)]
    depth = len(stages[0].layers)
    bounds = [0, depth // 3, 2 * depth // 3, depth]
    for stage, start, stop in zip(stages, bounds, bounds[1:], strict=False):
        value = Unpacker()(pack_payload(value)) if start else value
        for call in build_layers(stage.layers, start, stop, 0).calls:
            value = call(value)
    return value


@pytest.mark.parametrize("family", [*FAMILIES, *(pytest.param(name, marks=pytest.mark.thorough) for name in OTHERS)])
def test_models_with_states_give_their_own_logits_in_three_stages(family: str) -> None:
    model = tiny_model(tiny_config(family))
    ids = torch.randint(2, 300, (3, 17), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(three_stages(model, ids), model(input_ids=ids, use_cache=False).logits)


def test_position_ids_reach_every_layer() -> None:
    model = model_of("llama").train()
    ids = torch.randint(2, 300, (2, 16), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(6), torch.arange(10)]).repeat(2, 1)
    with torch.no_grad():
        wanted = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        assert torch.equal(three_stages(model, (ids, positions)), wanted)
        assert not torch.equal(three_stages(model, ids), wanted)


def test_a_schema_says_what_lies_where() -> None:
    states = (CarriedTensor(name="early", made=-1, used=1), CarriedTensor(name="late", made=1, used=3))
    schema = PayloadSpec(states=states, tokens=True)
    assert [schema.names(boundary) for boundary in range(5)] == [["early"], ["early"], ["late"], ["late"], []]
    hidden, early = torch.zeros(1, 2, 3), torch.ones(2)
    opened = schema.open(1, schema.close(1, StagePayload(hidden=hidden, states={"early": early})))
    assert torch.equal(opened.states["early"], early) and opened.hidden is hidden


def test_layers_that_share_a_block_are_tied() -> None:
    causal = prepare(ModelSource.of_model(tiny_model(tiny_config("zamba"))))
    built = build_layers(causal.layers, 0, len(causal.layers), 0)
    held = [{id(p) for p in module.parameters()} for module in built.modules.values()]
    shared = [(i, j) for i in range(len(held)) for j in range(i) if held[i] & held[j]]
    assert shared and all(len({type(built.modules[i]) for i in pair}) == 1 for pair in shared if 0 not in pair)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_the_text_decoder_of_a_model_of_several_parts_is_trained_alone(family: str, tmp_path: Path) -> None:
    outer, vision = {"llama": ("llava", "clip_vision_model"), "gemma3_text": ("gemma3", "siglip_vision_model")}[family]
    image = dict(model_type=vision, hidden_size=32, intermediate_size=48, num_hidden_layers=2, image_size=28)
    image |= dict(num_attention_heads=2, patch_size=14)
    text = {**config(family).to_dict(), "model_type": family}
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(CONFIG_MAPPING[outer](text_config=text, vision_config=image))
    model.float().eval().save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="model is trained; its other parts stay"):
        source = read_source(str(tmp_path))
    assert source.config.model_type == family
    value: Any = torch.randint(3, 300, (2, 12), generator=torch.Generator().manual_seed(1))
    wanted = model(input_ids=value, use_cache=False).logits
    causal = prepare(source)
    for call in build_layers(causal.layers, 0, len(causal.layers), 0).calls:
        value = call(value)
    assert torch.equal(value, wanted)


def test_models_that_cannot_be_cut_say_why(tmp_path: Path) -> None:
    for family, reason in (("hrm_text", "beside its layers"), ("xlm", "between its layers")):
        with pytest.raises(UserError, match=reason):
            prepare(ModelSource(name=family, config=tiny_config(family), weights=None))
    CONFIG_MAPPING["blip"]().save_pretrained(tmp_path)
    with pytest.raises(UserError, match="no causal decoder for its text part"):
        read_source(str(tmp_path))
