"""`--verify_plan`: what all ranks conclude from what each has found, and when a cut is tried at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, PretrainedConfig

from harness import Trainer, TrainingArguments, UserError
from harness.verify.sharding import _worst

ROWS = [{"input_ids": [1, 2, 3, 4]}] * 2


@pytest.mark.parametrize(
    ("found", "answer"),
    [
        pytest.param((0.0, None, None), (None, None), id="right"),
        pytest.param((0.3, "wrong", None), ("wrong", None), id="wrong"),
        pytest.param((float("inf"), "wrong", None), ("wrong", None), id="without-end"),
        pytest.param((0.0, None, "too large"), (None, "too large"), id="not-tried"),
    ],
)
def test_a_rank_alone_concludes_what_it_has_found(
    found: tuple[float, str | None, str | None], answer: tuple[str | None, str | None]
) -> None:
    assert _worst(found) == answer


def said(folder: Path, capsys: pytest.CaptureFixture[str], model: Any = "tiny-llama", **arguments: Any) -> str:
    """What the start of a run says."""
    Trainer(
        model, TrainingArguments(str(folder), max_steps=1, per_device_train_batch_size=1, **arguments), ROWS
    ).close()
    return capsys.readouterr().out


def small(name: str, **values: Any) -> PretrainedConfig:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return CONFIG_MAPPING[name](vocab_size=64, **{**sizes, **values})


@pytest.mark.parametrize(("asked", "tried"), [("auto", False), ("on", True)])
def test_a_family_of_the_matrix_is_tried_where_the_user_asks_for_it(
    asked: str, tried: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(tmp_path, capsys, verify_plan=asked)
    assert ("verified: the sharded model matches the whole one (tiny copy" in text) is tried


def test_a_model_that_looks_ahead_is_refused_whatever_the_layout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match=r"model type 'bert': .*: set is_decoder to true in its config.json") as caught:
        said(tmp_path, capsys, small("bert"), verify_plan="on")
    assert "\n" not in str(caught.value)
