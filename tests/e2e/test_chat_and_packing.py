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
from harness.batches.order import batch_indices
from harness.data.files.documents import as_documents
from harness.data.mixing import Joined
from harness.data.on_disk.cache import Preparation
from harness.data.samples import make_samples
from harness.data.tokenizer import ByteTokenizer
from tests.e2e.launching import SCRIPT
from tests.support.ranks import run_ranks, script_on_ranks
from tests.support.training import by_torch, logged, tiny_model

pytestmark = [pytest.mark.ranks, pytest.mark.thorough]

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
    for ranks, name in ((2, "pp2"), (1, "pp1")):
        done = script_on_ranks(
            ranks, SCRIPT, *flags, "--deepspeed_config", folder / f"{name}.json", "--output_dir", folder / name
        )
        assert done.returncode == 0, done.stdout + done.stderr
        said = said or done.stdout
    previewed = script_on_ranks(1, SCRIPT, *flags, "--preview_samples", 2, "--output_dir", folder / "previewed")
    assert previewed.returncode == 0 and previewed.stdout.count("[[It is") >= 2, previewed.stdout + previewed.stderr
    assert "step 1/" not in previewed.stdout and not (folder / "previewed" / "metrics.jsonl").exists()
    return folder / "pp2", folder / "pp1", said


def test_two_stages_learn_what_one_process_learns(runs: tuple[Path, Path, str]) -> None:
    staged, alone, said = runs
    assert "training: 40 conversations of" in said and "packed into" in said
    assert "tokens are in the loss (" in said and "[[It is 0.<|end-of-document|>]]" in said
    described = json.loads((staged / "run.json").read_text())["data"]
    assert sum(described["lengths"]["counts"]) == 40 and described["sources"][0]["learnt"] > 0
    for mine, theirs in zip(logged(staged), logged(alone), strict=True):
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


LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"zero_optimization": {"stage": 1}, "tensor_parallel": {"autotp_size": 2}},
    "pp2": {"zero_optimization": {"stage": 1}, "pipeline": {"stages": 2}},
    "z3": {"zero_optimization": {"stage": 3}},
}
Steps = list[tuple[float, float, float]]
"""Loss, gradient norm and tokens of each step."""


def conversations_in_memory(model: str, folder: str) -> tuple[dict[str, float], dict[str, Steps]]:
    """The evaluation loss of conversations handed to the Trainer, padded and packed, by layout; each then trains."""
    losses, curves = {}, {}
    for packing in (False, True):
        for name, section in LAYOUTS.items():
            config = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 1 if name == "pp2" else 2, **section}
            arguments = TrainingArguments(
                deepspeed_config=config, output_dir=f"{folder}/{name}{packing}", block_size=128, packing=packing,
                max_steps=3, learning_rate=1e-3, lr_scheduler_type="constant", adam_beta2=0.95, save_steps=0,
            )  # fmt: skip
            trainer = Trainer(
                model,
                arguments,
                train_dataset=[{"messages": chat} for chat in CHATS],
                eval_dataset=Dataset.from_list([{"messages": chat} for chat in CHATS]),
                processing_class=ByteTokenizer(),
            )
            key = f"{name} {'packed' if packing else 'padded'}"
            losses[key] = trainer.evaluate()["eval_loss"]
            if not packing:  # as a run evaluates what it holds out of several sources
                halves = [
                    as_documents([{"messages": chat} for chat in part], "chats") for part in (CHATS[:25], CHATS[25:])
                ]
                prepared = [make_samples(half, ByteTokenizer(), 128, Preparation(folder)) for half in halves]
                found = trainer.evaluate(Joined(prepared, ["x/a.jsonl", "y/a.jsonl"]))
                assert min(found["eval_a_loss"], found["eval_a2_loss"]) < found["eval_loss"]
                losses[f"{key}, in parts"] = found["eval_loss"]
            records = [trainer.training_step() for _ in range(1 if packing else 3)]
            curves[key] = [(r.loss, r.grad_norm or 0.0, r.tokens_per_second * r.step_seconds) for r in records]
            trainer.close()
    return losses, curves


def padded_to_the_block(model_dir: str, folder: Path) -> Steps:
    """The same steps by plain torch, each conversation on as many tokens as a block has."""
    documents = as_documents([{"messages": chat} for chat in CHATS], "chats")
    samples = make_samples(documents, ByteTokenizer(), 128, Preparation(folder))
    model = AutoModelForCausalLM.from_pretrained(model_dir).train()
    steps = batch_indices(0, 12, len(samples), seed=42).reshape(3, 4)
    batches = [[samples[row] for row in rows] for rows in steps.tolist()]
    coming = iter(batches)

    def loss_of_batch() -> torch.Tensor:
        batch = next(coming)
        ids, labels = (torch.stack([sample[name] for sample in batch]) for name in ("input_ids", "labels"))
        logits: torch.Tensor = model(ids).logits[:, :-1]
        return torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1))

    tokens = [float(samples.lengths(rows).sum()) for rows in steps]
    return [(*pair, count) for pair, count in zip(by_torch(model, loss_of_batch), tokens, strict=True)]


def refusals(model: str, folder: str) -> list[str]:
    """What is said to position ids that the model has not, and to packed samples for a model that mixes them."""
    said = []
    packed = [{"input_ids": [5] * 8, "position_ids": [0, 1, 2, 3, *range(start, start + 4)]} for start in (0, 500) * 4]
    for name, data in ((model, packed[1:]), (f"{model}-mamba", packed[::2] * 2)):
        with pytest.raises(UserError) as caught:
            Trainer(name, TrainingArguments(output_dir=f"{folder}/refused"), train_dataset=data * 3)
        said.append(str(caught.value))
    return said


def in_memory(model: str, folder: str) -> tuple[dict[str, float], dict[str, Steps], list[str]]:
    return *conversations_in_memory(model, folder), refusals(model, folder)


def test_padded_and_packed_conversations_have_one_loss_in_other_layouts(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model", "qwen3", False)
    tiny_model(tmp_path / "model-mamba", "mamba", False)
    losses, curves, said = run_ranks(2, in_memory, model, str(tmp_path), timeout_s=300)[0]
    assert said[0] == "sample 0: position_ids reach 503, but the model has 128 positions: shorten its documents"
    assert "'mamba' does not separate packed documents" in said[1]
    first = next(iter(losses.values()))
    assert len(losses) == 9
    assert {name: loss for name, loss in losses.items() if loss != pytest.approx(first, rel=5e-6)} == {}
    wanted = padded_to_the_block(model, tmp_path)
    for name, curve in curves.items():
        assert len(curve) == (1 if "packed" in name else 3)
        if "padded" in name:  # however long the samples of a batch were made
            assert [step[0] for step in curve] == pytest.approx([step[0] for step in wanted], rel=2e-6), name
            assert [step[1] for step in curve] == pytest.approx([step[1] for step in wanted], rel=2e-5), name
            assert [step[2] for step in curve] == pytest.approx([step[2] for step in wanted]), name
