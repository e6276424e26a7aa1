"""One small fine-tuning twice, by HuggingFace's Trainer and by the harness: are the losses the same?

    python scripts/bench/compare_hf.py

Data, model and flags are the same; a tokenizer and a model are made first. Then LoRA on conversations, and plain text
in blocks, ten steps each. Each step takes the whole data set, so that the order of samples, which the two choose
differently, does not count. Prints the largest difference of what both report, and writes results/compare_hf.json.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from peft import PeftModel
from report import RESULTS, write_report
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

ROOT = Path(__file__).resolve().parents[2]
SAMPLES, STEPS, BLOCK = 32, 10, 64
SAME: dict[str, Any] = {
    "learning_rate": 1e-3, "lr_scheduler_type": "cosine", "warmup_steps": 2, "weight_decay": 0.1, "max_steps": STEPS,
    "per_device_train_batch_size": 8, "gradient_accumulation_steps": SAMPLES // 8, "logging_steps": 1, "seed": 7,
}  # fmt: skip
LORA = {"lora_r": 8, "lora_alpha": 16, "lora_target_modules": "q_proj,v_proj"}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] }}<|im_end|>{% endgeneration %}{% else %}{{ m['content'] }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_inputs(folder: Path) -> None:
    """Write a tokenizer with a model, conversations, and plain text that fills as many blocks as a step takes."""
    draw = random.Random(1)
    words = ["red", "green", "small", "round", "tree", "river", "runs", "sings", "quickly", "slowly", "and", "the"]
    sentences = [" ".join(draw.choices(words, k=draw.randint(5, 30))) + "." for _ in range(4 * SAMPLES)]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        sentences, trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=special[0], pad_token=special[0])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    with (folder / "chat.jsonl").open("w") as chat:
        for question, answer in zip(sentences[:SAMPLES], sentences[SAMPLES : 2 * SAMPLES], strict=True):
            turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            chat.write(json.dumps({"messages": turns}) + "\n")
    tokens, count = SAMPLES * BLOCK, 0
    for name, half in (("a", sentences), ("b", sentences[::-1])):
        with (folder / f"{name}.jsonl").open("w") as text:
            for sentence in chain(half, half):
                size = len(tokenizer(sentence)["input_ids"]) + 1
                if count + size > tokens + BLOCK - 1 or count >= tokens // (2 if name == "a" else 1):
                    break
                count += size
                text.write(json.dumps({"text": sentence}) + "\n")


def by_huggingface(folder: Path, data: Any, collator: Any, model: Any) -> list[dict[str, float]]:
    """Train as a script for HuggingFace's Trainer does; return what it logs of each step."""
    args = TrainingArguments(output_dir=str(folder / "hf"), report_to="none", save_strategy="no", use_cpu=True, **SAME)
    trainer = Trainer(model=model, args=args, train_dataset=data, data_collator=collator)
    trainer.train()
    return [row for row in trainer.state.log_history if "loss" in row]


def chat_by_huggingface(folder: Path, adapters: Path) -> list[dict[str, float]]:
    """LoRA on the answers of conversations; it begins with the adapters that the harness began with."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")

    def encoded(row: dict[str, Any]) -> dict[str, Any]:
        found = tokenizer.apply_chat_template(
            row["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        pairs = zip(found["input_ids"], found["assistant_masks"], strict=True)
        return {"input_ids": found["input_ids"], "labels": [token if learnt else -100 for token, learnt in pairs]}

    data = load_dataset("json", data_files=str(folder / "chat.jsonl"), split="train")
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    adapted = PeftModel.from_pretrained(model, adapters, is_trainable=True)
    collator = DataCollatorForSeq2Seq(tokenizer, padding=True)
    return by_huggingface(folder, data.map(encoded, remove_columns="messages"), collator, adapted)


def text_by_huggingface(folder: Path) -> list[dict[str, float]]:
    """Plain text in blocks, as in run_clm.py, with the end-of-text token between documents."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")

    def blocks(rows: dict[str, Any]) -> dict[str, Any]:
        joined = list(chain(*(tokenizer(text + tokenizer.eos_token)["input_ids"] for text in rows["text"])))
        cut = [joined[i : i + BLOCK] for i in range(0, len(joined) // BLOCK * BLOCK, BLOCK)]
        return {"input_ids": cut, "labels": cut}

    files = [str(folder / name) for name in ("a.jsonl", "b.jsonl")]
    data = load_dataset("json", data_files=files, split="train")
    data = data.map(blocks, batched=True, batch_size=len(data), remove_columns="text")
    assert len(data) == SAMPLES, f"{len(data)} blocks, not {SAMPLES}: correct make_inputs"
    return by_huggingface(folder, data, default_data_collator, AutoModelForCausalLM.from_pretrained(folder / "model"))


def by_harness(folder: Path, name: str, **flags: Any) -> list[dict[str, float]]:
    """Train by the script with flags of HuggingFace's names; return metrics.jsonl."""
    out = folder / name
    words = [f"--{flag}={value}" for flag, value in {**SAME, **flags}.items() if flag != "train_file"]
    words += ["--train_file", *flags["train_file"]]
    command = [sys.executable, ROOT / "scripts/train.py", f"--model_name_or_path={folder}/model", *words]
    subprocess.run([*command, f"--output_dir={out}", "--save_steps=0"], check=True)
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def compared(theirs: list[dict[str, float]], ours: list[dict[str, float]]) -> dict[str, Any]:
    """Return the largest difference of what both report of each step."""
    pairs = list(zip(theirs, ours, strict=True))
    return {name: max(abs(a[name] - b[name]) for a, b in pairs) for name in ("loss", "grad_norm", "learning_rate")} | {
        "losses": {"huggingface": [a["loss"] for a in theirs], "harness": [b["loss"] for b in ours]}
    }


def main() -> None:
    """Run both, compare, report."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_inputs(folder)
        lora = {"train_file": (f"{folder}/chat.jsonl",), "use_peft": True, **LORA}
        by_harness(folder, "initial", **lora, learning_rate=0)  # peft and the harness draw other initial adapters
        ours = by_harness(folder, "chat", **lora)
        text = by_harness(folder, "text", train_file=(f"{folder}/a.jsonl", f"{folder}/b.jsonl"), block_size=BLOCK)
        found = {
            "conversations with LoRA": compared(chat_by_huggingface(folder, folder / "initial"), ours),
            "text in blocks": compared(text_by_huggingface(folder), text),
        }
    print(json.dumps(found, indent=2))
    write_report(RESULTS / "compare_hf.json", found, what=str(__doc__))


if __name__ == "__main__":
    main()
