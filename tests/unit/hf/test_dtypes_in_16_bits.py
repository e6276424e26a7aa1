"""In 16 bits a layer's parameters and buffers have the dtypes that `from_pretrained` gives them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from harness.hf.causal import assemble
from harness.hf.skeleton import ModelSource
from harness.parallel.comm import TensorParallel
from harness.verify.tiny_copy import tiny_config, tiny_model


@pytest.mark.parametrize(
    "family", ["kimi_linear", "gemma4_text", "deepseek_v3", "falcon_h1", "ernie4_5_moe", "hunyuan_v1_moe", "llama"]
)
def test_tensors_have_the_dtypes_of_from_pretrained(family: str, tmp_path: Path) -> None:
    config = tiny_config(family)
    tiny_model(config).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    expected: dict[str, torch.Tensor] = dict(loaded.named_parameters())
    expected |= {name: buffer for name, buffer in loaded.named_buffers() if buffer.is_floating_point()}
    causal = assemble(
        ModelSource(name=family, config=loaded.config, weights=tmp_path),
        tensor=TensorParallel(),
        device=torch.device("cpu"),
        dtype=torch.bfloat16,
        seed=0,
        finish=lambda _: None,
        keep_fp32=True,
    )
    built = [spec.build() for spec in causal.layers]
    found = {name: each for layer in built for name, each in (*layer.named_parameters(), *layer.named_buffers())}
    held = found.keys() & expected.keys()
    assert {name: found[name].dtype for name in held} == {name: expected[name].dtype for name in held}
    for name in held:
        assert torch.equal(found[name], expected[name]), name
