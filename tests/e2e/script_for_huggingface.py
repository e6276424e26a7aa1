"""A script for HuggingFace's Trainer with the arguments and calls of transformers' run_clm.py; the imports are ours."""

import math
import sys
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import transformers
from datasets import load_dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, set_seed
from transformers.trainer_utils import get_last_checkpoint

from harness import Trainer, TrainingArguments


@dataclass
class ModelArguments:
    """Which model."""

    model_name_or_path: str | None = None
    tokenizer_name: str | None = None
    cache_dir: str | None = None
    model_revision: str = "main"
    token: str | None = None
    trust_remote_code: bool = False
    dtype: str | None = None


@dataclass
class DataTrainingArguments:
    """Which data."""

    train_file: str | None = None
    validation_file: str | None = None
    max_train_samples: int | None = None
    streaming: bool = False
    block_size: int | None = None
    overwrite_cache: bool = False
    validation_split_percentage: int | None = 5
    preprocessing_num_workers: int | None = None


model_args, data_args, args = HfArgumentParser(
    (ModelArguments, DataTrainingArguments, TrainingArguments)
).parse_args_into_dataclasses()
transformers.utils.logging.set_verbosity(args.get_process_log_level())
print(f"{args.local_rank} {args.device} {args.n_gpu} {args.parallel_mode.value == 'distributed'} {args.fp16}")
folder = Path(args.output_dir)
last = get_last_checkpoint(args.output_dir) if folder.is_dir() and args.do_train else None
set_seed(args.seed)
raw = load_dataset("text", data_files={"train": data_args.train_file, "validation": data_args.validation_file})
config = AutoConfig.from_pretrained(model_args.model_name_or_path)
tokenizer = AutoTokenizer.from_pretrained(model_args.tokenizer_name or model_args.model_name_or_path)
model = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path, config=config)
if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
    model.resize_token_embeddings(len(tokenizer))


def group(examples: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
    """Join the texts and cut them into blocks."""
    size = data_args.block_size
    joined = {name: list(chain(*rows)) for name, rows in examples.items()}
    total = len(joined["input_ids"]) // size * size
    cut = {name: [row[i : i + size] for i in range(0, total, size)] for name, row in joined.items()}
    return {**cut, "labels": cut["input_ids"].copy()}


with args.main_process_first(desc="tokenising"):
    tokens = raw.map(lambda rows: tokenizer(rows["text"]), batched=True, remove_columns=["text"])
with args.main_process_first(desc="grouping"):
    blocks = tokens.map(group, batched=True)


def compute_metrics(predictions: transformers.EvalPrediction) -> dict[str, float]:
    """Count the tokens that are predicted right."""
    right = predictions.predictions[:, :-1] == predictions.label_ids[:, 1:]
    return {"accuracy": float(right.mean())}


trainer = Trainer(
    model=model,
    args=args,
    train_dataset=blocks["train"] if args.do_train else None,
    eval_dataset=blocks["validation"] if args.do_eval else None,
    processing_class=tokenizer,
    data_collator=transformers.default_data_collator,
    compute_metrics=compute_metrics if args.do_eval else None,
    preprocess_logits_for_metrics=(lambda logits, labels: logits.argmax(dim=-1)) if args.do_eval else None,
)
if args.do_train:
    result = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint or last)
    trainer.save_model()
    metrics = {**result.metrics, "train_samples": len(blocks["train"])}
    trainer.log_metrics("train", metrics)
    trainer.save_metrics("train", metrics)
    trainer.save_state()
if args.do_eval:
    metrics = trainer.evaluate()
    metrics["perplexity"] = math.exp(metrics["eval_loss"])
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
card = {"finetuned_from": model_args.model_name_or_path, "tasks": "text-generation"}
if args.push_to_hub:
    trainer.push_to_hub(**card)
else:
    trainer.create_model_card(**card)
sys.exit(0)
