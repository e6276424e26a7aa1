"""LoRA on conversations, in two pipeline stages.

    deepspeed --num_accelerators 2 examples/lora_chat.py --output_dir runs/lora-chat

With a model of your own: --model path/to/model. Its tokenizer is used, and needs a chat template. The result is a
directory of adapters, which peft and transformers load.
"""

import argparse
from pathlib import Path

from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer

from harness import ByteTokenizer, Trainer, TrainingArguments

CHATS = [
    [
        {"role": "user", "content": f"What is {a} plus {b}?"},
        {"role": "assistant", "content": f"{a} plus {b} is {a + b}."},
    ]
    for a in range(8)
    for b in range(8)
]


def main() -> None:
    """Train adapters on the answers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny-llama", help="a preset, or a HuggingFace directory")
    parser.add_argument("--output_dir", default="runs/lora-chat")
    parser.add_argument("--max_steps", type=int, default=20)
    parser.add_argument("--local_rank", type=int)  # the deepspeed launcher adds it
    args = parser.parse_args()

    trainer = Trainer(
        model=args.model,
        args=TrainingArguments(
            deepspeed_config="pipeline_checkpointing",
            output_dir=args.output_dir,
            max_steps=args.max_steps,
            block_size=64,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=4,
            learning_rate=1e-2,
            save_steps=0,
        ),
        train_dataset=Dataset.from_list([{"messages": chat} for chat in CHATS]),
        processing_class=AutoTokenizer.from_pretrained(args.model) if Path(args.model).is_dir() else ByteTokenizer(),
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
