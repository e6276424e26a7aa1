"""What a callback is given besides arguments, state and control: HuggingFace's keywords, where there is such a thing.

A keyword or a moment of HuggingFace's that does not exist here is refused when the callback is added: it would be
None, or never called, in silence.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from functools import cache
from typing import Protocol

from harness.data.tokenizer import Tokenizer
from harness.errors import UserError
from harness.training.engine.engine import Engine


class GivingTrainer(Protocol):
    """What the Trainer has for the keywords of every moment."""

    engine: Engine
    processing_class: Tokenizer | None

    @property
    def model(self) -> object:
        """Return this rank's layers."""


GIVEN: Mapping[str, Callable[[GivingTrainer], object]] = {
    "trainer": lambda trainer: trainer,
    "model": lambda trainer: trainer.model,
    "processing_class": lambda trainer: trainer.processing_class,
    "optimizer": lambda trainer: trainer.engine.deepspeed.optimizer,
    "lr_scheduler": lambda trainer: trainer.engine.deepspeed.lr_scheduler,
}
"""Keywords of every moment, and what makes them of the Trainer."""

NOT_GIVEN = {
    "tokenizer": "name it processing_class",
    "train_dataloader": "there is none here: take trainer.train_dataset",
    "eval_dataloader": "there is none here: take trainer.eval_dataset",
}

NOT_CALLED = {
    "on_substep_end": "on_step_end",
    "on_pre_optimizer_step": "on_step_end",
    "on_optimizer_step": "on_step_end",
    "on_prediction_step": "on_evaluate or on_predict",
    "on_push_begin": "on_save",
}
"""HuggingFace's moments that do not exist here, and what to use instead."""


def keywords(method: Callable[..., object], trainer: GivingTrainer) -> dict[str, object]:
    """Return those of the keywords of every moment that a callback's method takes."""
    taken = _parameters(getattr(method, "__func__", method))
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values())
    return {name: make(trainer) for name, make in GIVEN.items() if takes_all or name in taken}


def require_called(callback: object, moments: Collection[str]) -> None:
    """Raise UserError if a callback of the user's own has a method that is never called, or that names a keyword which
    is never given."""
    for name in (*NOT_CALLED, *moments):
        method = getattr(callback, name, None)
        if method is None or getattr(method, "__module__", "").startswith("transformers."):
            continue
        where = f"{type(callback).__name__}.{name}"
        if name in NOT_CALLED:
            raise UserError(f"callback {where} is never called here: use {NOT_CALLED[name]}")
        for keyword in _parameters(getattr(method, "__func__", method)).keys() & NOT_GIVEN.keys():
            raise UserError(f"callback {where} takes {keyword}: {NOT_GIVEN[keyword]}")


@cache
def _parameters(function: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters
