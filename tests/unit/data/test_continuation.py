"""What a model makes of prompts through its engine: the tokens that `generate` of the same weights gives."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from harness import Trainer, TrainingArguments
from harness.data.continuation import continued
from harness.extras.exporting.exporter import Exporter

PROMPTS = [[72, 101, 108], [5], [9, 9, 9, 9, 9, 9, 9]]


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    """A tiny Llama after three steps with a large learning rate, which no longer says the same id for ever."""
    rows = [{"input_ids": [(7 * i * i + 31 * k) % 250 for k in range(12)]} for i in range(24)]
    folder = str(tmp_path_factory.mktemp("continued"))
    args = TrainingArguments(folder, max_steps=3, learning_rate=0.02, save_steps=0, lr_scheduler_type="constant")
    made = Trainer("tiny-llama", args, rows)
    made.train()
    yield made
    made.close()


def generated(trainer: Trainer, prompt: list[int], most: int) -> list[int]:
    """What transformers' greedy search gives, without an end."""
    model = Exporter(trainer.run).gather()
    assert model is not None
    model.generation_config.eos_token_id = None
    ids = torch.tensor([prompt])
    found = model.generate(ids, max_new_tokens=most, do_sample=False, attention_mask=torch.ones_like(ids))
    return [int(token) for token in found[0, len(prompt) :]]


def test_each_token_is_that_of_transformers_greedy_search(trainer: Trainer) -> None:
    found = continued(trainer.run.engine, PROMPTS, most=3, length=10, ends=None)
    assert found == [generated(trainer, prompt, 3) for prompt in PROMPTS]
    assert len({tuple(row) for row in found}) > 1
    # by itself, and with a longer filling: neither its neighbours nor what stands behind it have a say in it
    assert continued(trainer.run.engine, PROMPTS[:1], 3, 16, None) == found[:1]


@pytest.mark.parametrize(
    ("most", "length", "lengths"),
    [
        pytest.param(2, 9, [2, 2, 2], id="as-many-as-asked"),
        pytest.param(3, 9, [3, 3, 2], id="the-longest-prompt-reaches-the-length"),
        pytest.param(1, 8, [1, 1, 1], id="both-at-once"),
    ],
)
def test_a_continuation_stops_at_the_number_or_at_the_length(
    trainer: Trainer, most: int, length: int, lengths: list[int]
) -> None:
    assert list(map(len, continued(trainer.run.engine, PROMPTS, most, length, None))) == lengths


def test_a_continuation_stops_before_the_end_id_and_the_others_go_on(trainer: Trainer) -> None:
    whole = continued(trainer.run.engine, PROMPTS, 3, 10, None)
    for ends in {whole[0][0], whole[2][2]}:
        wanted = [row[: row.index(ends)] if ends in row else row for row in whole]
        assert continued(trainer.run.engine, PROMPTS, 3, 10, ends) == wanted


def test_nothing_to_continue_runs_no_forward_and_nobody_listens_afterwards(trainer: Trainer) -> None:
    engine = trainer.run.engine
    assert continued(engine, [], 6, 13, None) == []
    with pytest.raises(IndexError):
        continued(engine, [[10**6]], 1, 3, None)  # an id that the model has not
    assert engine.loss.observer is None
