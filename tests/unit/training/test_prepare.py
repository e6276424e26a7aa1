"""What becomes of the Trainer's data sets: tokens are left alone, and what cannot be prepared is told at once."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING

from harness import TrainingArguments, UserError
from harness.arguments.configure import read_run_config
from harness.console import plain_console
from harness.data.inputs.datasets import Datasets, _require_cut, user_datasets
from harness.data.inputs.sample_form import SampleForm
from harness.data.tokenizer import ByteTokenizer
from harness.hf.skeleton import ModelSource, read_source
from harness.topology.env import LaunchEnv
from harness.training.prepare.trainable import trainable_layers

LAYOUT = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 8}
TOKENS = [{"input_ids": [1, 2, 3]}]
PACKED = [{"input_ids": [1, 2, 3], "position_ids": [0, 1, 0]}]
CHATS = [{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}]


def prepare(train: Any, tokenizer: Any = None, model: str | None = "tiny-llama", **arguments: Any) -> Datasets:
    source = read_source(model) if model else None
    config = read_run_config(TrainingArguments(**arguments), world_size=1)
    return user_datasets(train, None, tokenizer, source, config, LaunchEnv(), plain_console(0))


def test_tokens_and_pairs_are_left_alone() -> None:
    pairs = [(1.0, 2.0)]
    assert prepare(TOKENS).train is TOKENS
    assert prepare(PACKED, packing=True).train is PACKED
    assert prepare(pairs, model=None).train is pairs
    assert prepare(CHATS, model=None).train is CHATS  # a collator of the user's own makes tokens of them


@pytest.mark.parametrize(
    ("train", "arguments", "words"),
    [
        (CHATS, {}, "needs processing_class, the tokenizer"),
        (CHATS, {"tokenizer": ByteTokenizer(), "block_size": 4096}, "the model has 512 positions"),
        (TOKENS, {"packing": True}, "add position_ids that begin at 0 with each document"),
        (CHATS, {"packing": True, "model": None}, "--packing has no effect with your own data_collator"),
        (CHATS, {"block_size": 8, "model": None}, "--block_size has no effect with your own data_collator"),
    ],
)
def test_what_cannot_be_prepared_is_told(train: Any, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        prepare(train, **arguments)


@pytest.mark.parametrize(("vocabulary", "rows", "fits"), [(300, 200, False), (200, 300, False), (300, 300, True)])
def test_the_tokenizer_must_fit_the_embedding_and_the_head(vocabulary: int, rows: int, fits: bool) -> None:
    config = CONFIG_MAPPING["marian"](
        vocab_size=vocabulary,
        decoder_vocab_size=rows,
        pad_token_id=0,
        tie_word_embeddings=False,
        share_encoder_decoder_embeddings=False,
    )
    source = ModelSource(name="marian", config=config, weights=None)
    arguments = TrainingArguments(block_size=8)
    if fits:
        SampleForm.of(ByteTokenizer(), source, arguments)
        return
    with pytest.raises(UserError, match="ids go up to 256, the model's vocabulary has 200 ids"):
        SampleForm.of(ByteTokenizer(), source, arguments)


def test_a_model_that_cannot_be_cut_is_refused_before_anything_is_tokenised() -> None:
    source = ModelSource(name="it", config=CONFIG_MAPPING["stablelm"](qk_layernorm=True), weights=None)
    for size in (1, 2):
        args = TrainingArguments(deepspeed_config={**LAYOUT, "tensor_parallel": {"autotp_size": size}}, block_size=8)
        config = read_run_config(args, world_size=size)
        refused = pytest.raises(UserError, match="each head has a norm of its own") if size == 2 else nullcontext()
        with refused:
            _require_cut(source, config)
            assert size == 1


def test_a_function_among_layers_has_its_own_name_and_speed_counts_samples() -> None:
    sample = (torch.zeros(2, 4), torch.zeros(2, 4))
    layers = trainable_layers([nn.Linear(4, 4), torch.tanh], nn.functional.mse_loss, sample)
    assert layers.names == ["Linear", "tanh"] and layers.speed_unit == "samples"
    ids = (torch.zeros(2, 4, dtype=torch.long), torch.zeros(2, 4, dtype=torch.long))
    assert trainable_layers([nn.Embedding(4, 4)], nn.functional.mse_loss, ids).speed_unit == "tokens"
