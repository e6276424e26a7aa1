"""The core: all that is read with the Trainer, found from the sources. It holds no part, and it only gets smaller."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig
from torch.utils.data import IterableDataset

import harness
from harness import TrainingArguments, UserError
from harness.installed import PARTS
from harness.training.trainer import Trainer
from tests.support.core import AROUND, CORE, closure, files_of_tests, lies_in, modules

MOST_LINES = 30_000
LEAST_TESTS = 78  # files that run where the parts are deleted: scripts/test_core


def test_the_core_imports_no_part_and_grows_no_more() -> None:
    core = closure(CORE)
    assert [name for name in sorted(core) if lies_in(name, (*PARTS, *AROUND))] == []
    lines = sum(len(modules()[name].read_text(encoding="utf-8").splitlines()) for name in core)
    assert MOST_LINES - 300 < lines <= MOST_LINES, "lower MOST_LINES when the core has become smaller"


def test_most_files_of_tests_need_no_part() -> None:
    assert len(files_of_tests("tests.unit")) >= LEAST_TESTS


@pytest.mark.parametrize(
    ("asked", "flag", "part"),
    [
        ({"profile": 2}, "--profile", "harness.report"),
        ({"use_liger_kernel": True}, "--use_liger_kernel", "harness.extras"),
        ({"dataloader_num_workers": 2}, "--dataloader_num_workers", "harness.extras"),
        ({"rebalance_steps": 2}, "--rebalance_steps", "harness.extras"),
        ({"metric_for_best_model": "f1"}, "--metric_for_best_model", "harness.extras"),
        ({"nonfinite": "rollback"}, "--nonfinite rollback", "harness.extras"),
        ({"output_router_logits": True}, "--output_router_logits", "harness.extras"),
        ({"report_to": "csv"}, "--report_to", "harness.extras"),
        ({"deepspeed_config": {"tiling": {"loss": 4}}}, "tiling", "harness.verify"),
        ({"deepspeed_config": {"gradient_compression": {"bits": 8}}}, "gradient_compression", "harness.extras"),
    ],
)
def test_what_needs_an_absent_part_is_refused_in_one_line(
    asked: dict[str, Any], flag: str, part: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as refused:
        Trainer("tiny-llama", TrainingArguments(str(tmp_path), **asked))
    assert str(refused.value) == f"{flag} needs {part}, which is not installed: start without {flag}"


def test_adapters_are_refused_without_the_part_that_trains_them(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^LoRA needs harness\.extras, which is not installed: start without LoRA$"):
        Trainer("tiny-llama", TrainingArguments(str(tmp_path)), peft_config=LoraConfig(r=2))


def test_an_argument_that_the_core_does_not_take_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^Trainer takes no tokenizer: leave it out$"):
        Trainer(model="tiny-llama", args=TrainingArguments(str(tmp_path)), tokenizer=None)


TOKENS = [{"input_ids": [(5 * row + place) % 250 for place in range(8)]} for row in range(8)]


class Endless(IterableDataset[dict[str, object]]):
    """Samples without an end."""

    def __iter__(self) -> Iterator[dict[str, object]]:
        return cycle(dict(row) for row in TOKENS)


@pytest.mark.parametrize(
    ("data", "flags", "refusal"),
    [
        ([{"text": "a"}], {}, "train_dataset has text: to turn text and conversations into samples needs harness.data"),
        (Endless(), {}, "an IterableDataset as train_dataset needs harness.data, which is not installed"),
        (TOKENS, {"shuffle_buffer_size": 2}, "--shuffle_buffer_size needs harness.data, which is not installed"),
        (TOKENS, {"packing": True}, "--packing needs harness.data, which is not installed"),
    ],
)
def test_what_is_not_samples_is_refused_without_the_part_that_makes_them(
    data: object, flags: dict[str, object], refusal: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as refused:
        Trainer("tiny-llama", TrainingArguments(str(tmp_path), **flags), data)  # type: ignore[arg-type]
    assert str(refused.value).startswith(refusal)


def test_a_run_without_parts_comes_to_the_losses_of_one_with_all(tmp_path: Path) -> None:
    losses = []
    for kind in (Trainer, harness.Trainer):
        args = TrainingArguments(str(tmp_path / kind.__module__), max_steps=2, eval_steps=2, save_steps=1)
        args.fused_kernels = False  # fewer operations round differently
        trainer = kind("tiny-llama", args, TOKENS, TOKENS[:2])
        losses.append((trainer.train().training_loss, trainer.evaluate()["eval_loss"]))
        trainer.predict(TOKENS[:2])
        trainer.close()
    assert losses[0] == losses[1]
