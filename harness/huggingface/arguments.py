"""The arguments of the Trainer for scripts written for HuggingFace's: what they pass and read besides the flags."""

import json
import logging
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from typing import TYPE_CHECKING

from harness.arguments import TrainingArguments
from harness.arguments.themes.flags import ALIASES, default_of
from harness.command_line import other_programs
from harness.config.values.json_object import JsonObject
from harness.topology.env import LaunchEnv

if TYPE_CHECKING:  # arguments are read without torch
    import torch
    from transformers.training_args import ParallelMode


class HuggingFaceArguments(TrainingArguments):
    """The flags, and what scripts for HuggingFace's TrainingArguments pass and read besides them."""

    @classmethod
    def advice(cls, name: str, value: object, known: Collection[str]) -> str | None:
        """Return what to do instead; None for HuggingFace arguments that ask for what the harness always does."""
        return None if other_programs.is_idle(name, value) else other_programs.advice(name, known)

    def __setattr__(self, name: str, value: object) -> None:
        """Set a flag, by any of its names, or an attribute of the program. UserError as the constructor.

        Only names that HuggingFace knows are refused, unless a derived class declares them: others are the program's.
        """
        name = ALIASES.get(name, name)
        declared = hasattr(type(self), name) or any(item.name == name for item in fields(self))
        if not declared and name in other_programs.other_programs().not_taken:
            self.own_names({name: value})
        super().__setattr__(name, value)

    @property
    def process_index(self) -> int:
        """The rank of this process."""
        return _env().rank

    @property
    def local_process_index(self) -> int:
        """The rank of this process on its host."""
        return _env().local_rank

    @property
    def local_rank(self) -> int:
        """The rank of this process on its host; -1 for a single process, as in HuggingFace."""
        return _env().local_rank if self.world_size > 1 else -1

    @property
    def world_size(self) -> int:
        """The number of all processes."""
        return _env().world_size

    @property
    def parallel_mode(self) -> "ParallelMode":
        """HuggingFace's name for one process, or for several."""
        from transformers.training_args import ParallelMode

        return ParallelMode.DISTRIBUTED if self.world_size > 1 else ParallelMode.NOT_PARALLEL

    @property
    def device(self) -> "torch.device":
        """The device of this process."""
        import torch
        from deepspeed.accelerator import get_accelerator

        name = get_accelerator().device_name()
        return torch.device("cpu") if name == "cpu" else torch.device(name, self.local_process_index)

    @property
    def n_gpu(self) -> int:
        """The number of GPUs of this process: 1, or 0 on a CPU."""
        return int(self.device.type != "cpu")

    @property
    def should_log(self) -> bool:
        """Whether this process is rank 0, which logs."""
        return self.process_index == 0

    @property
    def should_save(self) -> bool:
        """Whether this process is rank 0."""
        return self.process_index == 0

    @property
    def train_batch_size(self) -> int:
        """Number of samples in a micro-batch."""
        return self.per_device_train_batch_size

    @property
    def eval_batch_size(self) -> int:
        """Number of samples in a micro-batch of an evaluation."""
        return self.per_device_eval_batch_size or self.per_device_train_batch_size

    def to_dict(self) -> JsonObject:
        """Return the flags by name."""
        return asdict(self)

    def to_json_string(self) -> str:
        """Return the flags as JSON."""
        return json.dumps(self.to_dict(), indent=2, default=str)

    def to_sanitized_dict(self) -> JsonObject:
        """Return the flags as numbers, booleans and text, as monitors take them."""
        plain = (bool, int, float, str)
        return {name: value if isinstance(value, plain) else str(value) for name, value in self.to_dict().items()}

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """Return the number of warm-up steps in a run of `num_training_steps`."""
        return self.warmup(num_training_steps)

    def get_process_log_level(self) -> int:
        """Return logging.WARNING, transformers' own level."""
        return logging.WARNING

    @contextmanager
    def main_process_first(self, local: bool = True, desc: str = "work") -> Iterator[None]:  # noqa: ARG002
        """Run the block on rank 0 (with `local`, on the first rank of each host) before the others.

        Has no effect before a Trainer is made: until then there is no process group, and all run the block at once.
        """
        import torch.distributed as dist

        from harness.topology.agreement import host_group

        waits = (self.local_process_index if local else self.process_index) > 0
        is_open = dist.is_initialized() and self.world_size > 1
        if is_open and waits:
            dist.barrier(host_group())
        try:
            yield
        finally:
            if is_open and not waits:
                dist.barrier(host_group())

    if not TYPE_CHECKING:  # a type checker knows the flags

        def __getattr__(self, name: str) -> object:
            """Return the value of a HuggingFace argument that does not exist here: the passed value, or its default.

            Only values without effect are accepted, so the default describes the behaviour, too.
            """
            if not name.startswith("_"):
                if name in ALIASES:
                    return getattr(self, ALIASES[name])
                if name in self.without_effect:
                    return self.without_effect[name]
                from transformers import TrainingArguments as Theirs

                for item in fields(Theirs):
                    if item.name == name:
                        return default_of(item)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def _env() -> LaunchEnv:
    return LaunchEnv.from_environ(os.environ)
