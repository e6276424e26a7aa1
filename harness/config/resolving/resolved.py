"""The result of resolving a config."""

from __future__ import annotations

from dataclasses import dataclass

from harness.config.values.json_object import JsonObject
from harness.schedules import ModelChunks


@dataclass(frozen=True, kw_only=True)
class Filled:
    """A value that was not in the file, with its pointer and its source."""

    pointer: str
    value: object
    source: str


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A config for DeepSpeed, and the settings that the harness reads from it.

    It has no "auto", except before the data is read (`resolve_before_data`), where it depends on data or model.
    """

    config: JsonObject  # as passed to DeepSpeed
    alone: JsonObject  # for DeepSpeed without the harness; DeepSpeed then shards the model itself
    filled: tuple[Filled, ...]
    pp_size: int
    tp_size: int
    dp_size: int
    ep_size: int  # expert-parallel ranks, each with whole experts; 1: tensor-parallel ranks share each expert
    token_pieces: int  # number of pieces in which a layer's tokens are sent to experts on other data-parallel ranks
    cp_size: int  # data-parallel ranks over which each sequence is split
    sequence_parallel: bool  # whether tensor-parallel ranks split the sequence between the blocks of a layer
    compile_backend: str | None  # torch.compile's backend for decoder layers; None if they are not compiled
    compile_options: JsonObject  # other keyword arguments of torch.compile
    micro_batch: int
    accumulation: int
    train_batch: int
    zero_stage: int
    precision: str  # fp32, bf16 or fp16
    partition: str  # balanced, measured, uniform, parameters or type:REGEX
    schedule: str  # the pipeline schedule
    chunks: ModelChunks  # the model chunks, and the stage of each
    gradient_bits: int | None  # bits of gradients between data-parallel ranks: 8, 4, 0 (off); None: a trial decides
    reduces_once: bool  # whether ZeRO-2 averages gradients once per step instead of in each micro-batch
    activation_checkpoint_interval: int  # decoder layers that are recomputed together; 0 is off
    loss_tile: int  # number of tokens whose loss is computed at a time; 0: all
    attention_tile: int  # number of queries whose masks and attention are computed at a time; 0: all
    feed_forward_tile: int  # number of tokens that feed-forward blocks and norms compute at a time; 0: all

    @property
    def batch_ranks(self) -> int:
        """Number of data-parallel ranks that read different samples."""
        return self.dp_size // self.cp_size
