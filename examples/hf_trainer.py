"""The same JSON in HuggingFace's Trainer: a preset is a plain DeepSpeed config.

    torchrun --nproc_per_node 1 examples/hf_trainer.py --deepspeed_config ds_configs/zero2.json

HuggingFace's Trainer has no pipeline stages: take a preset without them, and ask `ds-harness check FILE --target hf`
what it makes of the file.
"""

import argparse
import sys

from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments, set_seed

from harness import Severity, check, load


def main() -> int:
    """Check the config as HuggingFace's Trainer will read it, then train with it; returns 1 if it has errors."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--deepspeed_config", default="ds_configs/zero2.json")
    parser.add_argument("--output_dir", default="runs/hf-trainer")
    parser.add_argument("--max_steps", type=int, default=5)
    parser.add_argument("--local_rank", type=int)  # the deepspeed launcher adds it
    args = parser.parse_args()

    errors = [item for item in check(load(args.deepspeed_config), target="hf") if item.severity is Severity.ERROR]
    if errors:
        print(f"hf_trainer: {errors[0]}", file=sys.stderr)
        return 1
    set_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("models/presets/tiny-llama"))
    samples = [list(range(start, start + 32)) for start in range(200)]
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            deepspeed=args.deepspeed_config,
            output_dir=args.output_dir,
            max_steps=args.max_steps,
            per_device_train_batch_size=8,
            learning_rate=1e-3,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=Dataset.from_list([{"input_ids": ids, "labels": ids} for ids in samples]),
    )
    trainer.train()
    return 0


if __name__ == "__main__":
    sys.exit(main())
