"""The flags of samples, batches and steps."""

from dataclasses import dataclass
from typing import ClassVar

from harness.arguments.flags import Flags, flag
from harness.config.values.arguments import AutoValues
from harness.errors import UserError


@dataclass(kw_only=True)
class BatchArguments(Flags):
    """How long a sample is, how many make a step, and how many steps there are."""

    TITLE: ClassVar[str] = "Samples, batches and steps"

    block_size: int | None = flag(
        None, "tokens per sample of text or conversations (default: the model's length, at most 1024)", hf_only=True
    )
    packing: bool = flag(False, "pack whole documents into blocks; attention stays within each document", hf_only=True)
    max_steps: int = flag(-1, "optimizer steps; -1: as many as num_train_epochs needs", least=-1)
    num_train_epochs: float = flag(3.0, "passes through the data, unless max_steps is given", least=0)
    per_device_train_batch_size: int = flag(AutoValues.per_device_train_batch_size, "samples per micro-batch", least=1)
    per_device_eval_batch_size: int | None = flag(
        None, "samples per evaluation micro-batch (default: as in training; with a router loss 8)", least=1
    )
    gradient_accumulation_steps: int = flag(
        AutoValues.gradient_accumulation_steps, "micro-batches per step on each data-parallel rank", least=1
    )
    global_batch_size: int | None = flag(
        None, "samples per step over all ranks, in every layout; sets the accumulation", least=1
    )
    shuffle_buffer_size: int = flag(
        0, "samples of a stream that are read at once and shuffled; 0: they keep the order of the stream", least=0
    )
    dataloader_num_workers: int = flag(
        0, "processes on each rank that read the next steps' samples ahead; 0: the rank reads them itself", least=0
    )

    def check(self) -> None:
        """Refuse a run without steps."""
        if self.max_steps == 0:
            raise UserError("--max_steps 0: must be at least 1, or -1 to train for --num_train_epochs")
