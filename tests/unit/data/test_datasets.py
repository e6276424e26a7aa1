"""What becomes of the Trainer's data sets: tokens are left alone, and what cannot be prepared is told at once."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING

from harness import TrainingArguments, UserError
from harness.arguments.configure import RunConfig
from harness.arguments.themes.script import ScriptArguments
from harness.console import plain_console
from harness.data.inputs.datasets import SampleForm, script_datasets, user_datasets
from harness.data.tokenizer import ByteTokenizer
from harness.hf.skeleton import ModelSource, read_source
from harness.hf.unbuilt import require_cut
from harness.installed import read_run_config
from harness.preflight import check_inputs
from harness.topology.env import LaunchEnv
from harness.training.parts.data import DataRequest, Datasets, UserData
from harness.training.prepare.trainable import trainable_layers

LAYOUT = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 8}
TOKENS = [{"input_ids": [1, 2, 3]}]
PACKED = [{"input_ids": [1, 2, 3], "position_ids": [0, 1, 0]}]
CHATS = [{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}]


def prepare(train: Any, tokenizer: Any = None, model: str | None = "tiny-llama", **arguments: Any) -> Datasets:
    source = read_source(model) if model else None
    args = TrainingArguments(**arguments)
    config = read_run_config(args, world_size=1)
    return user_datasets(UserData(train_dataset=train, processing_class=tokenizer), request_of(args, config, source))


def request_of(args: TrainingArguments, config: RunConfig, source: ModelSource | None) -> DataRequest:
    return DataRequest(args=args, config=config, source=source, env=LaunchEnv(), console=plain_console(0))


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


def test_an_evaluation_alone_needs_no_training_data(tmp_path: Path) -> None:
    (tmp_path / "validation.jsonl").write_text('{"text": "words of the validation data"}\n')
    (tmp_path / "train.jsonl").write_text("".join(f'{{"text": "words of line {i}"}}\n' for i in range(40)))
    missing = ScriptArguments(
        train_file=(str(tmp_path / "gone.jsonl"),), validation_file=(str(tmp_path / "validation.jsonl"),)
    )
    held_out = ScriptArguments(train_file=(str(tmp_path / "train.jsonl"),))
    found = {}
    for name, script in {"missing": missing, "held_out": held_out, "both": held_out}.items():
        args = TrainingArguments(str(tmp_path / "run"), block_size=4, do_eval=True, do_train=name == "both" or None)
        config = check_inputs(script, args, LaunchEnv(), None)
        found[name] = script_datasets(script, request_of(args, config, read_source("tiny-llama")))
    assert [data.train is None for data in found.values()] == [True, True, False]
    assert all(data.evaluation is not None and len(data.evaluation) for data in found.values())  # type: ignore[arg-type]
    assert len(found["held_out"].evaluation) == len(found["both"].evaluation)  # type: ignore[arg-type]


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
            require_cut(source, config.resolved.tp_size, config.resolved.ep_size)
            assert size == 1


def test_a_function_among_layers_has_its_own_name_and_speed_counts_samples() -> None:
    sample = (torch.zeros(2, 4), torch.zeros(2, 4))
    layers = trainable_layers([nn.Linear(4, 4), torch.tanh], nn.functional.mse_loss, sample)
    assert layers.names == ["Linear", "tanh"] and layers.speed_unit == "samples"
    ids = (torch.zeros(2, 4, dtype=torch.long), torch.zeros(2, 4, dtype=torch.long))
    assert trainable_layers([nn.Embedding(4, 4)], nn.functional.mse_loss, ids).speed_unit == "tokens"
