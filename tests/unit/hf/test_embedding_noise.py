"""NEFTune's noise: as large as its formula says, in training alone."""

from __future__ import annotations

import torch
from torch import nn

from harness.hf.decoder import EmbeddingNoise, embedding_noise
from harness.hf.skeleton import read_source


def test_noise_is_as_large_as_the_formula_and_only_in_training() -> None:
    embedding = nn.Embedding(10, 16)
    ids = torch.arange(8).view(2, 4)
    plain = embedding(ids)
    embedding.register_forward_hook(EmbeddingNoise(module="", alpha=4.0))
    noise = (embedding(ids) - plain).abs()
    assert 0.9 * 4.0 / (4 * 16) ** 0.5 < noise.max() <= 4.0 / (4 * 16) ** 0.5 + 1e-6
    assert torch.equal(embedding.eval()(ids), plain)


def test_the_embedding_is_the_one_that_the_model_names() -> None:
    model = read_source("tiny-gpt2").skeleton()
    noise = embedding_noise(model, 5.0)
    assert noise is not None and noise.module == "transformer.wte"
    assert embedding_noise(model, None) is None
