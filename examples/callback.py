"""A callback that keeps the smoothed loss, and saves and stops as soon as it is low enough.

python examples/callback.py --enough 4.5 --output_dir runs/callback
"""

import argparse
import random
from pathlib import Path
from typing import Any

from datasets import Dataset

from harness import StepRecord, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class StopWhenGoodEnough(TrainerCallback):
    """Stop when the exponential moving average of the loss falls below `enough`."""

    def __init__(self, enough: float, memory: float = 0.8) -> None:
        self.enough, self.memory = enough, memory
        self.smoothed: float | None = None

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, record: StepRecord, **_: Any
    ) -> None:
        """Ask all ranks to save and stop; any rank may ask, and all act after the same step."""
        before = record.loss if self.smoothed is None else self.smoothed
        self.smoothed = self.memory * before + (1 - self.memory) * record.loss
        if self.smoothed < self.enough:
            control.should_save = control.should_training_stop = True

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, checkpoint: Path, **_: Any
    ) -> None:
        """Say where the checkpoint is."""
        if state.is_world_process_zero:
            print(f"smoothed loss {self.smoothed:.3f} after step {state.global_step}: saved {checkpoint}")


def main() -> None:
    """Train a tiny model to count, until it does so well enough."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--enough", type=float, default=3.0)
    parser.add_argument("--output_dir", default="runs/callback")
    args = parser.parse_args()
    starts = random.Random(0).choices(range(200), k=256)
    samples = Dataset.from_list([{"input_ids": list(range(start, start + 32))} for start in starts])
    trainer = Trainer(
        model="tiny-llama",
        args=TrainingArguments(args.output_dir, deepspeed_config="zero2", max_steps=60, learning_rate=1e-3),
        train_dataset=samples,
        callbacks=[StopWhenGoodEnough(args.enough)],
    )
    trainer.train()


if __name__ == "__main__":
    main()
