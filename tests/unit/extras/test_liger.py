"""Liger's kernels in the layers that a rank builds; where Liger and Triton are installed, run one by one on the CPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoConfig, PretrainedConfig
from transformers.models.llama import modeling_llama

from harness.errors import UserError
from harness.extras.fusing import fusing
from harness.extras.fusing.liger import FusedModule, LigerKernels, liger_kernels
from harness.hf.causal import assemble
from harness.hf.skeleton import ModelSource
from harness.parallel.comm import TensorParallel
from harness.verify.tiny_copy import shrink
from tests.support.graphs import graphs_of_steps, tokens
from tests.support.models import model_of

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    from triton import language
CPU = torch.device("cpu")
IDS = torch.tensor([[1, 2, 3, 4, 5, 6]])
with_liger = pytest.mark.skipif(
    not INTERPRETED,
    reason="needs liger-kernel and triton: install them, set TRITON_INTERPRET=1",
)


def tiny(family: str) -> PretrainedConfig:
    return shrink(AutoConfig.for_model(family), tensor=2)


def layers_of(config: PretrainedConfig, kernels: LigerKernels | None) -> list[nn.Module]:
    causal = assemble(
        ModelSource(name="tiny", config=config, weights=None),
        tensor=TensorParallel(),
        device=CPU,
        dtype=torch.float32,
        seed=0,
        finish=(lambda _: None) if kernels is None else kernels.put_into,
    )
    return [spec.build() for spec in causal.layers]


def loss_and_gradients(layers: list[nn.Module]) -> tuple[float, list[torch.Tensor]]:
    value = IDS
    for layer in layers:
        value = layer(value)
    loss = nn.functional.cross_entropy(value[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
    loss.backward()
    return float(loss), [own.grad for layer in layers for own in layer.parameters() if own.grad is not None]


def test_a_cpu_or_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UserError, match="--use_liger_kernel: needs a GPU and the package liger-kernel"):
        liger_kernels(tiny("llama"), CPU)


def test_auto_takes_the_harness_s_kernels_and_says_why_it_takes_none_of_liger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    source = ModelSource(name="tiny", config=tiny("llama"), weights=None)
    change, line = fusing(source, CPU, own=True, liger="auto")
    change(model := model_of("llama"))
    assert [type(each).__name__ for each in model.modules() if "forward" in vars(each)][:2] == [
        "LlamaAttention",
        "LlamaRMSNorm",
    ]
    assert line == (
        "--use_liger_kernel auto: the harness's kernels in LlamaRMSNorm, LlamaAttention; Liger's in no module: needs a "
        "GPU and the package liger-kernel (pip install liger-kernel), and one of the two is missing here"
    )


def test_auto_takes_liger_s_kernels_where_the_harness_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    twice = FusedModule(forward=lambda module, x: 2 * type(module).forward(module, x), attributes={})
    liger = LigerKernels({"model.norm": twice, "model.layers.1.mlp": twice})
    monkeypatch.setattr("harness.extras.fusing.find_kernels", lambda *_: liger)
    source = ModelSource(name="tiny", config=model_of("llama").config, weights=None)
    for own, ours, theirs in (
        (True, "LlamaRMSNorm, LlamaAttention", "LlamaMLP"),
        (False, "no module", "LlamaMLP, LlamaRMSNorm"),
    ):
        change, line = fusing(source, CPU, own=own, liger="auto")
        assert line == f"--use_liger_kernel auto: the harness's kernels in {ours}; Liger's in {theirs}"
        changed = model_of("llama")
        change(changed)
        for name, doubled in (("model.norm", not own), ("model.layers.1.mlp", True), ("model.layers.0.mlp", False)):
            module, x = changed.get_submodule(name), torch.randn(2, 64)
            torch.testing.assert_close(module(x), (1 + doubled) * type(module).forward(module, x))


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Triton's interpreter run Liger's kernels: floats become its numbers, CUDA's functions are made of its own."""
    import numpy
    import triton
    from triton.language.extra import libdevice
    from triton.runtime import interpreter

    before = interpreter._implicit_cvt

    def with_floats(value: object) -> object:
        if not isinstance(value, float):
            return before(value)
        held = interpreter.TensorHandle(numpy.array([value], dtype=numpy.float32), language.float32)
        return language.tensor(held, language.float32)

    monkeypatch.setattr(interpreter, "_implicit_cvt", with_floats)
    # Liger's files take these when they are first imported
    monkeypatch.setattr(libdevice, "rsqrt", triton.jit(_rsqrt))
    monkeypatch.setattr(libdevice, "tanh", triton.jit(_tanh))


def _rsqrt(x):
    return 1 / language.sqrt(x)


def _tanh(x):
    return 2 * language.sigmoid(2 * x) - 1


@with_liger
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3", "phi3", "mixtral"])
def test_kernels_give_the_loss_and_the_gradients(family: str) -> None:
    config = tiny(family)
    plain, wanted = loss_and_gradients(layers_of(config, None))
    layers = layers_of(config, liger_kernels(config, CPU))
    fused = {type(module).__name__ for layer in layers for module in layer.modules() if "forward" in vars(module)}
    assert any("Norm" in name for name in fused) and not any("Experts" in name for name in fused)
    loss, gradients = loss_and_gradients(layers)
    assert loss == pytest.approx(plain, abs=1e-6)
    torch.testing.assert_close(gradients, wanted, atol=1e-5, rtol=1e-4)


@with_liger
@pytest.mark.usefixtures("interpreted")
def test_other_models_of_the_process_keep_their_modules_and_functions() -> None:
    before = dict(vars(modeling_llama))
    kernels = liger_kernels(tiny("llama"), CPU)
    assert vars(modeling_llama) == before
    rotating = [each.forward for name, each in kernels.modules.items() if name.endswith("self_attn")]
    assert len(rotating) > 1 and len(set(rotating)) == 1
    on_meta = [torch.empty(1, 2, 4, 8, device="meta") for _ in range(2)]
    tables = [torch.empty(1, 4, 8, device="meta") for _ in range(2)]
    for forward in rotating:
        own = forward.__globals__["apply_rotary_pos_emb"]
        assert own is not modeling_llama.apply_rotary_pos_emb
        assert [part.shape for part in own(*on_meta, *tables)] == [part.shape for part in on_meta]


@with_liger
@pytest.mark.usefixtures("interpreted")
def test_a_family_that_liger_does_not_know_is_one_line() -> None:
    with pytest.raises(UserError, match="--use_liger_kernel: Liger has no kernels for model type 'gpt2'"):
        liger_kernels(tiny("gpt2"), CPU)


@with_liger
@pytest.mark.thorough
@pytest.mark.usefixtures("interpreted")
def test_layers_with_liger_s_own_kernels_are_compiled_for_a_second_length_and_for_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.runtime.interpreter import GridExecutor

    # The compiler knows Triton's kernels on a GPU; it cannot trace their interpreter, so here the graph breaks at each.
    monkeypatch.setattr(GridExecutor, "__call__", torch.compiler.disable(GridExecutor.__call__))
    rows = [tokens(length) for length in (6, 9, 14, 20)]
    first, second, *later = graphs_of_steps(tmp_path, rows, "eager", use_liger_kernel=True)
    assert 0 < first < second and later == [second] * 2
