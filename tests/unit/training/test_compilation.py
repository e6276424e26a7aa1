"""What torch.compile cannot compile is refused before a model is built; what stays out of it runs as it is written."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from harness import UserError
from harness.checking import check
from harness.checking.rules.view import Target
from harness.config.text.document import from_values
from harness.parallel.compiling import Eager, compile_modules, waits_for_compiler
from harness.training.engine.spec import LayerTraits
from harness.training.prepare.trainable import require_compilable


def model(*, uses_rng: bool = False, causal: object = True) -> Any:
    return cast("Any", SimpleNamespace(causal=causal, traits=LayerTraits(uses_rng=uses_rng)))


@pytest.mark.parametrize(
    ("trainable", "backend", "words"),
    [
        (model(), "indutcor", "torch has no backend 'indutcor'; it has .*inductor"),
        (model(causal=None), "inductor", "for a list of layers remove it"),
        (model(uses_rng=True), "aot_eager", "set its dropout rates and --neftune_noise_alpha to 0"),
    ],
)
def test_what_cannot_be_compiled_is_refused(trainable: Any, backend: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        require_compilable(trainable, backend)
    require_compilable(model(), "inductor", {"mode": "max-autotune-no-cudagraphs", "dynamic": True})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"modes": "default"}, "torch.compile takes no 'modes'; it takes fullgraph"),
        ({"mode": "default", "options": {"max_autotune": True}}, "takes a mode or options"),
    ],
)
def test_options_that_torch_does_not_take_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        require_compilable(model(), "inductor", options)


def test_check_refuses_zero_3_and_targets_that_do_not_know_the_key() -> None:
    def said(stage: int, target: Target = "harness") -> list[str]:
        asked = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": stage},
            "compile": {"enabled": True},
        }
        return [found.message for found in check(from_values(asked), target=target)]

    assert said(2) == []
    assert "torch.compile cannot compile a layer whose parameters ZeRO-3" in said(3)[0]
    assert said(2, "deepspeed") == ["enabled is a key of the harness"]


def test_a_run_says_which_steps_wait_for_the_compiler() -> None:
    assert "of another length, wait for inductor, which keeps its code in /" in waits_for_compiler("inductor")
    assert waits_for_compiler("eager").endswith("wait for eager")


def test_an_eager_function_is_called_by_compiled_code() -> None:
    seen: list[Tensor] = []

    @Eager
    def note(x: Tensor) -> Tensor:
        """Note."""
        seen.append(x)
        return x

    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return note(x * 2) + 1

    layer = Layer()
    compile_modules([layer], backend="eager", dynamic=True)
    x = torch.ones(3)
    assert torch.equal(layer(x), torch.full((3,), 3.0)) and torch.equal(layer(x), torch.full((3,), 3.0))
    assert len(seen) == 2 and note.__doc__ == "Note."
