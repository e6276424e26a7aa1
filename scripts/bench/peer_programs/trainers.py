"""Trainers: HuggingFace's with DeepSpeed, and the harness in each of its layouts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from transformers import Trainer as HFTrainer
from transformers import TrainerCallback, default_data_collator
from transformers import TrainingArguments as HFArguments

from harness import Trainer, TrainingArguments
from peer_programs.raw_deepspeed import config
from peer_programs.task import LARGEST_NORM, RATE, Task

if TYPE_CHECKING:
    from peft import LoraConfig

SAME: dict[str, Any] = {
    "learning_rate": RATE,
    "lr_scheduler_type": "constant",
    "weight_decay": 0.0,
    "max_grad_norm": LARGEST_NORM,
    "logging_steps": 1,
}


class _Clock(TrainerCallback):
    """Takes the time from the end of a step to the end of the next: weights may travel in between."""

    reads_weights = False

    def __init__(self, task: Task) -> None:
        self._task, self._begun = task, 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._begun = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        now = time.perf_counter()
        self._task.seconds.append(now - self._begun)
        self._begun = now


def hf_trainer(stage: int, task: Task, *, callbacks: Sequence[TrainerCallback] = (), **options: Any) -> None:
    """Train with HuggingFace's Trainer and a ZeRO stage of DeepSpeed; `options` of its TrainingArguments."""
    data = [{"input_ids": row, "labels": row} for row in task.samples().tolist()]
    arguments = HFArguments(
        output_dir=str(task.folder / "hf"),
        deepspeed=config(task.work, task.size, zero_optimization={"stage": stage}),
        gradient_accumulation_steps=task.work.micro_batches // task.size,
        max_steps=task.steps,
        save_strategy="no",
        report_to="none",
        use_cpu=task.device.type == "cpu",
        disable_tqdm=True,
        per_device_train_batch_size=task.work.samples,
        bf16=task.work.dtype == "bfloat16",
        **SAME,
        **options,
    )
    trainer = HFTrainer(
        task.model(),
        arguments,
        train_dataset=data,
        data_collator=default_data_collator,
        callbacks=[_Clock(task), *callbacks],
    )
    trainer.train()
    task.losses += [row["loss"] for row in trainer.state.log_history if "loss" in row]


def trainer_of(
    task: Task,
    sections: dict[str, Any],
    replicas: int = 1,
    *,
    callbacks: Sequence[TrainerCallback] = (),
    data: list[dict[str, Any]] | None = None,
    peft_config: LoraConfig | None = None,
    **more: Any,
) -> Trainer:
    """Return a Trainer of the harness in the layout of some sections of a DeepSpeed config; `data` or the task's."""
    arguments = TrainingArguments(
        deepspeed_config=config(task.work, replicas, **sections),
        output_dir=str(task.folder / "harness"),
        overwrite_output_dir=True,
        gradient_accumulation_steps=task.work.micro_batches // replicas,
        max_steps=task.steps,
        save_steps=0,
        verify_plan="off",
        per_device_train_batch_size=task.work.samples,
        bf16=sections.get("bf16", {}).get("enabled", task.work.dtype == "bfloat16"),
        **SAME,
        **more,
    )
    if data is None:
        data = [{"input_ids": row} for row in task.samples().tolist()]
    return Trainer(str(task.folder), arguments, train_dataset=data, callbacks=callbacks, peft_config=peft_config)


def harness(sections: dict[str, Any], replicas: int, task: Task) -> None:
    """Train with the harness."""
    trainer = trainer_of(task, sections, replicas, callbacks=[_Clock(task)])
    trainer.train()
    task.losses += [row["loss"] for row in trainer.state.log_history if "loss" in row]
    trainer.close()


harness_one = partial(harness, {"zero_optimization": {"stage": 0}}, 1)
harness_zero1 = partial(harness, {"zero_optimization": {"stage": 1}}, 2)
harness_zero3 = partial(harness, {"zero_optimization": {"stage": 3}}, 2)
harness_pipeline = partial(harness, {"pipeline": {"stages": 2}}, 1)
harness_zero_bubble = partial(harness, {"pipeline": {"stages": 2, "schedule": "zero-bubble"}}, 1)
harness_tensor = partial(harness, {"tensor_parallel": {"autotp_size": 2}}, 1)
harness_experts = partial(
    harness,
    {"zero_optimization": {"stage": 1}, "expert_parallel": {"enabled": True, "autoep_size": 2}},
    2,
)
hf_zero3 = partial(hf_trainer, 3)
hf_zero1 = partial(hf_trainer, 1)
hf_zero1_fused = partial(hf_trainer, 1, use_liger_kernel=True, torch_compile=True)
harness_zero1_alone = partial(harness, {"zero_optimization": {"stage": 1}}, 1)
