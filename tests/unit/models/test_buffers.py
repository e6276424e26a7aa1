"""A buffer that is computed while a model is built, and stands in no checkpoint, is right on every rank as well."""

from __future__ import annotations

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from harness.models.buffers import built_buffers, mark_unfilled, unfilled
from harness.models.causal import assemble
from harness.models.skeleton import build_skeleton, read_source
from harness.models.tiny import tiny_config, tiny_ids, tiny_model
from harness.parallel.comm import TensorParallel
from harness.parallel.staged import build_layers


def test_a_model_read_from_a_directory_has_the_buffers_of_its_constructor(tmp_path):
    config = tiny_config("falcon_h1")
    tiny_model(config).save_pretrained(tmp_path)
    source = read_source(str(tmp_path))
    device = torch.device("cpu")
    cut = assemble(
        source, tensor=TensorParallel(), device=device, dtype=torch.float32, seed=0, finish=lambda layer: None
    )
    ids = tiny_ids(tiny_model(config))
    value = ids
    for layer in build_layers(cut.layers, 0, len(cut.layers), 0).calls:
        value = layer(value)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).train()
    torch.testing.assert_close(value, whole(input_ids=ids).logits, rtol=1e-5, atol=1e-6)


def test_only_buffers_become_real():
    skeleton = build_skeleton(tiny_config("falcon_h1"))
    buffers = built_buffers(skeleton)
    assert buffers.keys() == dict(skeleton.named_buffers()).keys()
    assert not any(buffer.is_meta for buffer in buffers.values())
    assert not any(parameter.is_meta for parameter in nn.Linear(2, 2).parameters()), "parameters are themselves again"


def test_what_nothing_fills_is_told():
    module = nn.BatchNorm1d(2)
    mark_unfilled(module)
    module.running_mean.zero_()
    assert unfilled(module.named_buffers()) == ["running_var"]
