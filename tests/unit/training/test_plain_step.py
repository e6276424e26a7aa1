"""A step that neither logs, evaluates nor saves calls only what its run uses."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import transformers

import harness
from harness import Trainer, TrainerCallback, TrainingArguments
from tests.support.training import rows

HARNESS = Path(harness.__file__).parent
NUMBERS = ("training/engine", "deepspeed", "parallel", "hf", "extras/fusing", "config/model")  # forward to update
MODEL = ("training/engine", "parallel", "hf/decoder", "hf/forward", "hf/layers", "hf/context", "config/model")
OPTIONAL = (
    "PlaceholderForward",
    "OuterForward",
    "PayloadSpec",
    "LayerInputs",
    "SourceLosses",
    "FiniteWatch",
    "KeyedRng",
)


class Walk(TrainerCallback):
    """Notes each function of the harness that is called between the ends of step 2 and step 3, and how deep."""

    def __init__(self) -> None:
        self.called: set[tuple[str, str]] = set()
        self.depth = self.deepest = 0

    def _note(self, frame: FrameType, event: str, _argument: object) -> None:
        if event == "return":
            self.depth = max(0, self.depth - 1)
        path = Path(frame.f_code.co_filename)
        if event == "call":
            self.depth += 1
            if path.is_relative_to(HARNESS):
                self.called.add((path.relative_to(HARNESS).as_posix(), frame.f_code.co_qualname))
                self.deepest = max(self.deepest, self.depth)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        sys.setprofile(self._note if state.global_step == 2 else None)


class Theirs(transformers.TrainerCallback):
    """Has no method of its own."""


@pytest.mark.usefixtures("never_split")
def test_between_two_events_a_step_is_a_straight_path(tmp_path: Path) -> None:
    walk = Walk()
    args = TrainingArguments(str(tmp_path), max_steps=4, logging_steps=10, save_steps=10, report_to="none")
    trainer = Trainer("tiny-llama", args, rows() * 8, callbacks=[walk, Theirs])
    trainer.train()
    trainer.close()
    # a reader of a step: of its 25 calls at the deepest place, 12 are torch's and transformers'
    files = sorted({file for file, _ in walk.called})
    assert len(files) <= 20, " ".join(files)
    assert len(walk.called) <= 120 and walk.deepest <= 25
    loop = {(file, name) for file, name in walk.called if not file.startswith(NUMBERS)}
    assert 20 < len(loop) <= 40 and len({file for file, _ in loop}) <= 8
    names = {name for _, name in loop}
    assert {"Trainer._after_step", "BatchStream.next_step", "Recorder.step", "MetricsFile.write"} <= names
    events = {"Run.events_after", "Run.next_event", "keywords", "all_reduce_max", "record_step", "Secrets.without"}
    assert not names & (events | {"sample_order", "padding_of"})  # not needed here, or computed once for many steps
    assert not {name for name in names if name.startswith(("Checkpoints.", "Rollback.", "TrainerCallback."))}
    model = {(file, name) for file, name in walk.called if file.startswith(MODEL)}
    assert 20 < len(model) <= 45 and len({file for file, _ in model}) <= 12
    assert {("hf/decoder.py", f"{kind}.forward") for kind in ("Prologue", "DecoderLayer", "Epilogue")} <= model
    assert not {name for _, name in model if name.startswith(OPTIONAL)}
