"""Conversations, packed, through the training script: two stages learn what one process learns, and nothing else.

The loss is that of the answers alone, each conversation by itself, as the exported model gives it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from harness import Trainer, TrainingArguments, UserError
from harness.training.data.tokenizer import ByteTokenizer
from tests.distributed.ranks import run_ranks
from tests.distributed.training import tiny_model
from tests.e2e.launching import launch, metrics

pytestmark = pytest.mark.ranks

CHATS: list[list[dict[str, str]]] = [
    [
        {"role": "user", "content": f"{i} + {i}?"},
        {"role": "assistant", "content": f"It is {2 * i}."},
        *([{"role": "user", "content": "And twice?"}, {"role": "assistant", "content": str(4 * i)}] * (i % 3)),
    ]
    for i in range(40)
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """The same run on two stages and in one process, and what the first said."""
    folder = tmp_path_factory.mktemp("chat")
    (folder / "chat.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in CHATS))
    config = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}}
    (folder / "pp1.json").write_text(json.dumps(config))
    config["pipeline"] = {"stages": 2, "activation_checkpoint_interval": 1}
    (folder / "pp2.json").write_text(json.dumps(config))
    flags: tuple[Any, ...] = ("--model_name_or_path", tiny_model(folder / "model", "llama", True))
    flags += ("--train_file", folder / "chat.jsonl", "--validation_file", folder / "chat.jsonl", "--packing")
    flags += ("--block_size", 128, "--max_steps", 3, "--learning_rate", 1e-3, "--tokenizer_name", "bytes")
    said = ""
    for ranks, name in ((2, "pp2"), (0, "pp1")):
        done = launch(ranks, *flags, "--deepspeed_config", folder / f"{name}.json", "--output_dir", folder / name)
        assert done.returncode == 0, done.stdout + done.stderr
        said = said or done.stdout
    return folder / "pp2", folder / "pp1", said


def test_two_stages_learn_what_one_process_learns(runs: tuple[Path, Path, str]) -> None:
    staged, alone, said = runs
    assert "training: 40 conversations of" in said and "packed into" in said
    for mine, theirs in zip(metrics(staged), metrics(alone), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=2e-6)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=2e-5)
    assert json.loads((staged / "run.json").read_text())["arguments"]["packing"] is True


def test_the_loss_is_that_of_the_answers_each_conversation_alone(runs: tuple[Path, Path, str]) -> None:
    folder = runs[0]
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    total, counted = 0.0, 0
    for chat in CHATS:
        told = tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
        ids, answers = torch.tensor(told["input_ids"]), torch.tensor(told["assistant_masks"]).bool()
        with torch.no_grad():
            logits = model(ids[None]).logits[0, :-1]
        total += float(torch.nn.functional.cross_entropy(logits[answers[1:]], ids[1:][answers[1:]], reduction="sum"))
        counted += int(answers[1:].sum())
    seen = json.loads((folder / "evaluations.jsonl").read_text().splitlines()[-1])["eval_loss"]
    assert seen == pytest.approx(total / counted, rel=5e-6)


def conversations_in_memory(model: str, folder: str) -> dict[str, float]:
    """The evaluation loss of conversations handed to the Trainer, padded and packed, by layout; each then trains."""
    found = {}
    for packing in (False, True):
        for name, section in {"tp2": {"tensor_parallel": {"autotp_size": 2}}, "z3": {}}.items():
            stage = 1 if section else 3
            config = {"train_batch_size": 4, "zero_optimization": {"stage": stage}, **section}
            config["train_micro_batch_size_per_gpu"] = 2
            trainer = Trainer(
                model,
                TrainingArguments(
                    deepspeed_config=config, output_dir=f"{folder}/{name}{packing}", block_size=128, packing=packing
                ),
                train_dataset=[{"messages": chat} for chat in CHATS],
                eval_dataset=Dataset.from_list([{"messages": chat} for chat in CHATS]),
                processing_class=ByteTokenizer(),
            )
            found[f"{name} {'packed' if packing else 'padded'}"] = trainer.evaluate()["eval_loss"]
            assert trainer.training_step().grad_norm
            trainer.close()
    return found


def refusals(model: str, folder: str) -> list[str]:
    """What is said to position ids that the model has not, and to packed samples for a model that mixes them."""
    said = []
    packed = [{"input_ids": [5] * 8, "position_ids": [0, 1, 2, 3, *range(start, start + 4)]} for start in (0, 500) * 4]
    for name, data in ((model, packed[1:]), (f"{model}-bloom", packed[::2] * 2)):
        with pytest.raises(UserError) as caught:
            Trainer(name, TrainingArguments(output_dir=f"{folder}/refused"), train_dataset=data * 3)
        said.append(str(caught.value))
    return said


def in_memory(model: str, folder: str) -> tuple[dict[str, float], list[str]]:
    return conversations_in_memory(model, folder), refusals(model, folder)


def test_padded_and_packed_conversations_have_one_loss_in_other_layouts(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model", "qwen3", False)
    tiny_model(tmp_path / "model-bloom", "bloom", False)
    losses, said = run_ranks(2, in_memory, model, str(tmp_path), timeout_s=300)[0]
    assert said[0] == "position_ids reach 503, the model has 128 positions: shorten them"
    assert "'bloom' does not separate packed documents" in said[1]
    first = next(iter(losses.values()))
    assert len(losses) == 4
    assert {name: loss for name, loss in losses.items() if loss != pytest.approx(first, rel=5e-6)} == {}
