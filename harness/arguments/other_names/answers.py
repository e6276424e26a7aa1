"""Words that the tables of several programs share."""

from __future__ import annotations

LAYOUT = "--pipeline_parallel_size and --tensor_parallel_size; the data-parallel size is what ranks are left"
PRECISION = "--bf16 or --fp16; without them the run is in float32"
CHECKPOINTING = "--gradient_checkpointing"
DATA = "--train_file (.txt, .jsonl, .json, .csv, .parquet or a directory; several as a.jsonl:0.7 b/:0.3)"
ZERO = "--deepspeed_config zero2 or zero3"
ADAPTER = "--use_peft (LoRA)"
