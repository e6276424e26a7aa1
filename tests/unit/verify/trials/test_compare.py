"""The training in one process, and how far an execution may be from it."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from harness.verify.trials.compare import (
    MOST,
    USUAL,
    compressed_limit,
    distance,
    is_another_course,
    limit_in_16_bits,
    noise_limit,
    other_than_numbers,
)
from harness.verify.trials.composition import Composition
from harness.verify.trials.reference import TrainingResult, reference
from harness.verify.trials.subject import make_subject

PLAIN = Composition.parse("llama steps=2")


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainingResult, list[TrainingResult]]:
    """A training, and the same from weights that are off by rounding errors."""
    torch.set_num_threads(1)
    subject = make_subject(PLAIN, tmp_path_factory.mktemp("models"))
    return reference(PLAIN, subject), [reference(PLAIN, subject, rounding=seed) for seed in (1, 2, 3)]


def test_rounding_errors_are_allowed_and_little_more(numbers: tuple[TrainingResult, list[TrainingResult]]) -> None:
    wanted, moved = numbers
    assert distance(wanted, wanted).within(replace(USUAL, **dict.fromkeys(asdict(USUAL), 0.0)))
    limit = noise_limit(wanted, lambda seed: moved[seed - 1])
    assert all(distance(each, wanted).within(limit) for each in moved)
    for name, value in asdict(limit).items():
        assert getattr(USUAL, name) <= value <= getattr(MOST, name)
    assert limit.loss < 1e-5 and limit.weights < 2e-3


def test_a_training_may_take_a_course_that_rounding_leads_to(
    numbers: tuple[TrainingResult, list[TrainingResult]],
) -> None:
    wanted, _ = numbers
    other = TrainingResult(**{**vars(wanted), "losses": [loss * 1.01 for loss in wanted.losses]})
    assert not distance(other, wanted).within(USUAL)
    assert is_another_course(other, lambda seed: other if seed == 7 else wanted, USUAL)
    assert not is_another_course(other, lambda _seed: wanted, USUAL)


@pytest.mark.parametrize("what", ["loss", "norm", "weight", "nan"])
def test_a_number_that_is_off_is_seen(numbers: tuple[TrainingResult, list[TrainingResult]], what: str) -> None:
    wanted, _ = numbers
    name = next(name for name in wanted.weights if "mlp" in name)
    moved = wanted.weights[name] - wanted.before[name]
    changed = {
        "loss": {"losses": [wanted.losses[0], wanted.losses[1] * 1.00001]},
        "norm": {"norms": [wanted.norms[0] * 1.0001, wanted.norms[1]]},
        "weight": {"weights": {**wanted.weights, name: wanted.weights[name] + 0.02 * moved}},
        "nan": {"losses": [wanted.losses[0], float("nan")]},
    }
    assert not distance(TrainingResult(**{**vars(wanted), **changed[what]}), wanted).within(USUAL)


def test_names_shapes_dtypes_and_texts_are_told(numbers: tuple[TrainingResult, list[TrainingResult]]) -> None:
    wanted, _ = numbers
    name = min(wanted.weights)
    others = {key: tensor for key, tensor in wanted.weights.items() if key != name}
    said = {
        f"the export lacks {name} (1 in all)": others,
        "the export has x, which it should not (1 in all)": {**wanted.weights, "x": torch.ones(1)},
        f"{name} is torch.bfloat16": {**others, name: wanted.weights[name].bfloat16()},
    }
    for text, weights in said.items():
        found = other_than_numbers(TrainingResult(**{**vars(wanted), "weights": weights}), wanted, texts=True)
        assert found is not None and found.startswith(text)
    other = TrainingResult(**{**vars(wanted), "texts": ["\0"]})
    assert other_than_numbers(other, wanted, texts=False) is None
    assert "prompts are continued by" in str(other_than_numbers(other, wanted, texts=True))


def test_16_bits_and_compression_are_allowed_what_they_do() -> None:
    own = replace(USUAL, loss=1e-3, first_norm=1e-6)
    plain, split = (limit_in_16_bits(Composition.parse(f"llama precision=bf16 : {at}=2"), own) for at in ("pp", "tp"))
    assert own.first_norm < plain.first_norm and plain.loss < own.loss < split.loss
    assert compressed_limit(PLAIN, USUAL) == USUAL
    few, many = (compressed_limit(Composition.parse(f"llama : dp=2 bits={bits}"), USUAL) for bits in (8, 4))
    assert USUAL.norm < few.norm < many.norm


def test_experts_of_any_width_are_trained(tmp_path: Path) -> None:
    """Grouped products refuse rows that are not of whole 16 bytes."""
    composition = Composition.parse('mixtral steps=1 config={"intermediate_size":95}')
    assert reference(composition, make_subject(composition, tmp_path)).losses


def test_a_model_is_made_once_however_its_config_is_written(tmp_path: Path) -> None:
    line = 'llama config={"num_hidden_layers":1,"intermediate_size":24} : dp=2'
    as_given = Composition.parse(line)
    assert make_subject(as_given, tmp_path).base == make_subject(Composition.parse(str(as_given)), tmp_path).base
