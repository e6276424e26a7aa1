"""A buffer that is computed while a model is built, and stands in no checkpoint, is right on every rank as well."""

from __future__ import annotations

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from harness.hf.skeleton import ModelSource, build_skeleton, read_source
from harness.hf.weights.initialization import constructed, is_unfilled, mark_unfilled
from harness.parallel.pipeline.staged_module import build_layers
from harness.verify.tiny_copy import tiny_config, tiny_ids, tiny_model
from tests.support.layers import prepare


def test_a_model_read_from_a_directory_has_the_buffers_of_its_constructor(tmp_path):
    config = tiny_config("falcon_h1")
    tiny_model(config).save_pretrained(tmp_path)
    source = read_source(str(tmp_path))
    cut = prepare(source)
    ids = tiny_ids(tiny_model(config))
    value = ids
    for layer in build_layers(cut.layers, 0, len(cut.layers), 0).calls:
        value = layer(value)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).train()
    torch.testing.assert_close(value, whole(input_ids=ids).logits, rtol=1e-5, atol=1e-6)


def test_only_buffers_and_small_parameters_become_real(monkeypatch):
    monkeypatch.setattr("harness.hf.weights.initialization.SMALL", 100)
    skeleton = build_skeleton(tiny_config("falcon_h1"))
    tensors = constructed(skeleton, seed=0)
    small = {name for name, p in skeleton.named_parameters(remove_duplicate=False) if p.numel() <= 100}
    assert tensors.keys() == small | dict(skeleton.named_buffers()).keys() and small
    assert not any(tensor.is_meta for tensor in tensors.values())
    assert not any(parameter.is_meta for parameter in nn.Linear(64, 2).parameters()), "parameters are themselves again"


def test_what_nothing_fills_is_told():
    module = nn.BatchNorm1d(2)
    mark_unfilled(module.buffers())
    module.running_mean.zero_()
    assert [name for name, buffer in module.named_buffers() if is_unfilled(buffer)] == ["running_var"]


def test_a_parameter_that_only_the_constructor_fills_has_its_value():
    config = tiny_config("apertus")  # its activation has learnt scales
    causal = prepare(ModelSource(name="apertus", config=config, weights=None))
    built = build_layers(causal.layers, 1, 2, 0).modules[1]
    for name, wanted in AutoModelForCausalLM.from_config(config).named_parameters():
        if name.startswith("model.layers.0.") and name.endswith(("alpha_p", "alpha_n")):
            assert torch.equal(built.get_parameter(name), wanted), name
