"""What torch.compile cannot compile is refused before a model is built; what stays out of it runs as it is written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import register_backend
from torch._dynamo.exc import Unsupported

from harness import UserError
from harness.checking import check
from harness.checking.rules.view import Target
from harness.config.text.document import from_values
from harness.extras.fusing import fused, kernels
from harness.extras.fusing.fused import RMSNorm, with_globals
from harness.extras.fusing.kernels import Turn
from harness.extras.fusing.liger import FusedModule, LigerKernels
from harness.extras.fusing.rotations import turned
from harness.parallel.compiling import Eager, compile_modules, waits_for_compiler
from harness.training.engine.spec import LayerTraits
from harness.training.prepare.trainable import require_compilable
from tests.support.graphs import graphs_of_steps, tokens
from tests.support.models import model_of
from tests.support.torch_kernels import use_torch


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
        ({"modes": "default"}, "unexpected keyword argument 'modes'"),
        ({"mode": "fastest"}, "Unrecognized mode=fastest, should be one of: default, "),
        ({"mode": "default", "options": {"max_autotune": True}}, "Either mode or options can be specified"),
        ({"options": {"max_tune": True}}, "Unexpected optimization option max_tune$"),
    ],
)
def test_options_that_torch_does_not_take_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as refused:
        require_compilable(model(), "inductor", options)
    assert str(refused.value).startswith("compile.mode, compile.kwargs: torch.compile refuses them: ")


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
    several = waits_for_compiler("eager", {"dynamic": False})
    assert several.endswith("each length waits for eager; of more than 8 lengths the others run uncompiled")


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


FACTOR = 2.0


def test_functions_with_globals_of_their_own_are_compiled_apart() -> None:
    def scaled(x: Tensor) -> Tensor:
        y = x * FACTOR
        print(end="")  # where the graph breaks, the compiled function is called by its name in the globals
        return y + 1

    x = torch.ones(3)
    for function in (with_globals(scaled, {}), with_globals(scaled, {}), with_globals(scaled, {"FACTOR": 3.0}), scaled):
        compiled = torch.compile(function, backend="eager")
        assert torch.equal(compiled(x), function(x))


def packed(*lengths: int) -> dict[str, list[int]]:
    """Documents of these lengths in one sample."""
    return {
        name: [value for length in lengths for value in values(length)]
        for name, values in (("input_ids", lambda n: tokens(n)["input_ids"]), ("position_ids", lambda n: [*range(n)]))
    }


@pytest.mark.usefixtures("never_split")
@pytest.mark.parametrize(
    ("lengths", "flags", "graphs"),
    [
        ([16] * 4, {}, [1, 1, 1, 1]),
        ([6, 9, 14, 20, 25, 31], {}, [1, 2, 2, 2, 2, 2]),
        pytest.param([6, 9, 14, 20], {"gradient_checkpointing": True}, [1, 2, 2, 2], marks=pytest.mark.thorough),
        ([16] * 4, {"eval_steps": 2}, [1, 1, 2, 2]),
    ],
    ids=["one-length", "lengths", "checkpointing", "evaluation"],
)
def test_layers_that_are_alike_are_compiled_once_and_once_more_for_all_lengths(
    lengths: list[int], flags: dict[str, Any], graphs: list[int], tmp_path: Path
) -> None:
    assert graphs_of_steps(tmp_path, [tokens(length) for length in lengths], "eager", **flags) == graphs


@pytest.mark.usefixtures("never_split")
@pytest.mark.parametrize(
    ("options", "graphs"),
    [({"dynamic": False}, [1, 2, 3]), ({"dynamic": True}, [1, 1, 1]), ({"kwargs": {"disable": True}}, [0, 0, 0])],
    ids=str,
)
def test_options_of_the_config_act(options: dict[str, Any], graphs: list[int], tmp_path: Path) -> None:
    rows = [tokens(length) for length in (6, 9, 14)]
    assert graphs_of_steps(tmp_path, rows, "eager", options) == graphs


@pytest.mark.usefixtures("never_split")
@pytest.mark.thorough
def test_the_compiler_gets_the_mode_and_a_whole_graph_is_demanded(tmp_path: Path) -> None:
    modes: list[object] = []

    def backend(graph: Any, _: object, **given: object) -> Any:
        modes.append(given.get("mode"))
        return graph.forward

    register_backend(backend, name="noting")
    assert graphs_of_steps(tmp_path / "mode", [tokens(6)], "noting", {"mode": "reduce-overhead"}) == [1]
    assert modes == ["reduce-overhead"]
    in_fp8 = {"fp8": "emulate", "bf16": True}
    assert graphs_of_steps(tmp_path / "broken", [tokens(6)], "eager", **in_fp8)[0] > 1
    with pytest.raises(Unsupported):
        graphs_of_steps(tmp_path / "whole", [tokens(6)], "eager", {"fullgraph": True}, **in_fp8)


DOCUMENTS = [(6, 4), (3, 9), (5, 5, 7), (20,), (2, 2, 2), (11, 14)]
"""Lengths of the documents of samples, whose own lengths differ too."""


@pytest.mark.usefixtures("never_split")
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.thorough)])
def test_packed_documents_of_any_lengths_are_compiled_as_samples_of_any_length(backend: str, tmp_path: Path) -> None:
    rows = [packed(*lengths) for lengths in DOCUMENTS]
    assert graphs_of_steps(tmp_path, rows, backend, packing=True) == [1, 2, 2, 2, 2, 2]


@pytest.mark.usefixtures("never_split")
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.thorough)])
def test_kernels_of_liger_are_compiled_as_often_as_the_layers_are_without_them(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an autograd function like Liger's in each norm, as Liger itself needs a GPU."""
    norms = [name for name, module in model_of("qwen3").named_modules() if "RMSNorm" in type(module).__name__]
    norm = FusedModule(
        forward=lambda module, x: RMSNorm.apply(x, module.weight, module.variance_epsilon), attributes={}
    )
    found = LigerKernels(dict.fromkeys(norms, norm))
    monkeypatch.setattr("harness.extras.fusing.liger.find_kernels", lambda *_: found)
    rows = [tokens(length) for length in (6, 9, 14, 20)]
    assert graphs_of_steps(tmp_path, rows, backend, use_liger_kernel=True) == [1, 2, 2, 2]


def test_a_rotation_by_the_kernel_is_part_of_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernel replaces is tried once, outside of the graph. Torch's operations stand in for the kernel."""

    def rotate(heads: Sequence[Tensor], cos: Tensor, sin: Tensor, turn: Turn, *, backward: bool = False) -> Any:
        return tuple(turned(each, cos, -sin if backward else sin, turn) for each in heads)

    use_torch(monkeypatch)
    monkeypatch.setattr(kernels, "rotate", rotate)
    for name in ("norm_of", "gated_norm_of", "fused_activation"):
        monkeypatch.setattr(fused, name, lambda module: None)
    monkeypatch.setattr(fused, "gated", lambda module: {})
    monkeypatch.setattr(fused, "join_sums", lambda module: None)
    ids = torch.arange(24).view(2, 12)
    model = model_of("llama", num_hidden_layers=1)
    wanted = model(ids).logits
    wanted.sum().backward()
    of_weights = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    model.zero_grad()
    (layer,) = model.model.layers
    fused.fuse(layer, torch.device("cpu"))
    layer.compile(backend="eager", fullgraph=True)  # which refuses a break
    found = model(ids).logits
    found.sum().backward()
    assert torch.equal(found, wanted)
    assert "forward" in vars(layer.self_attn)
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight.grad, of_weights[name])
