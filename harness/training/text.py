"""The script's data: text files, or the embedded default, as blocks of tokens for training and evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from harness.config.errors import UserError
from harness.models.locate import model_directory
from harness.models.skeleton import read_source
from harness.topology.env import LaunchEnv
from harness.training.arguments import TrainingArguments
from harness.training.data.blocks import make_blocks, once_per_host
from harness.training.data.sources import hold_out, read_documents
from harness.training.data.tokenizer import Tokenizer, check_vocabulary, load_tokenizer
from harness.training.distributed import start
from harness.training.preflight import ScriptArguments

LONGEST_DEFAULT = 1024  # as run_clm.py


@dataclass(frozen=True, kw_only=True)
class TextDatasets:
    """Blocks of tokens, and the tokenizer that made them."""

    train: Any
    evaluation: Any
    tokenizer: Tokenizer


def text_datasets(script: ScriptArguments, args: TrainingArguments, env: LaunchEnv) -> TextDatasets:
    """Read, tokenise and cut the text; on each host one rank does it, the others read its cache."""
    directory = model_directory(script.model_name_or_path)
    tokenizer = load_tokenizer(script.tokenizer_name, directory)
    config = read_source(script.model_name_or_path).config.get_text_config(decoder=True)
    check_vocabulary(tokenizer, config.vocab_size)
    block_size = _block_size(script, getattr(config, "max_position_embeddings", None))
    start(env)

    def build() -> tuple[Any, Any]:
        return _build(script, args, tokenizer, block_size)

    train, evaluation = once_per_host(build, local_rank=env.local_rank, barrier=dist.barrier)
    return TextDatasets(train=train, evaluation=evaluation, tokenizer=tokenizer)


def _build(script: ScriptArguments, args: TrainingArguments, tokenizer: Tokenizer, block_size: int) -> tuple[Any, Any]:
    documents = read_documents(script.train_file)
    evaluation = None
    if script.validation_file is not None:
        evaluation = make_blocks(read_documents(script.validation_file), tokenizer, block_size)
    elif args.eval_steps:
        documents, held_out = hold_out(documents)
        evaluation = make_blocks(held_out, tokenizer, block_size)
    return make_blocks(documents, tokenizer, block_size), evaluation


def _block_size(script: ScriptArguments, longest: int | None) -> int:
    if script.block_size is None:
        return min(LONGEST_DEFAULT, longest or LONGEST_DEFAULT)
    if longest is not None and script.block_size > longest:
        raise UserError(f"--block_size {script.block_size}: the model has {longest} positions; use at most {longest}")
    return script.block_size
