"""A sum and the norm that follows it are one kernel in each direction, where a layer's code has them in this order.

With torch's operations in the place of the kernels, which are compared with them in test_kernels.py.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from harness.extras.fusing import kernels
from harness.extras.fusing.fused import fuse
from harness.extras.fusing.residual_norms import NormOfSum
from tests.support.models import model_of
from tests.support.torch_kernels import use_torch

CPU = torch.device("cpu")


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The directions in which the kernel has had a sum, in order."""
    use_torch(monkeypatch)
    taken: list[str] = []
    norm, norm_backward = kernels.norm, kernels.norm_backward

    def forward(*args: Any, plus: Tensor | None = None) -> Any:
        taken.extend(["forward"] * (plus is not None))
        return norm(*args, plus=plus)

    def backward(*args: Any, of_total: Tensor | None = None, **kwargs: Any) -> Any:
        taken.extend(["backward"] * (of_total is not None))
        return norm_backward(*args, of_total=of_total, **kwargs)

    monkeypatch.setattr(kernels, "norm", forward)
    monkeypatch.setattr(kernels, "norm_backward", backward)
    return taken


def joined_of(model: nn.Module) -> list[str]:
    """Return the names of the norms that take sums."""
    found = (name for name, each in model.named_modules() if isinstance(_function(each), NormOfSum))
    return [name.rpartition(".")[2] for name in found]


def _function(module: nn.Module) -> object:
    return getattr(module.forward, "__func__", None)


def step(model: nn.Module, ids: Tensor) -> list[Tensor]:
    """Return the logits and the gradients of a model."""
    outputs = model(input_ids=ids, labels=ids)
    found = torch.autograd.grad(outputs.loss, list(model.parameters()), allow_unused=True)
    return [outputs.logits.detach(), *(each for each in found if each is not None)]


def largest_difference(found: list[Tensor], wanted: list[Tensor]) -> float:
    pairs = zip(found, wanted, strict=True)
    return max(float((a.float() - b.float()).abs().max() / b.float().abs().max()) for a, b in pairs)


@pytest.mark.parametrize(
    ("family", "norm"),
    [
        ("llama", "post_attention_layernorm"),
        ("qwen3", "post_attention_layernorm"),
        ("mixtral", "post_attention_layernorm"),
        ("phi3", "post_attention_layernorm"),
        ("granite", "post_attention_layernorm"),  # adds a product
        ("gemma3_text", "pre_feedforward_layernorm"),  # weights minus one
        ("olmo", None),  # norms without weights
        ("olmo2", None),  # norms before each sum
        ("cohere2", None),  # one norm for both blocks
        ("gpt2", None),  # decides between them whether there is a second attention
    ],
)
def test_a_family_computes_as_before_with_its_sums_in_its_norms(family: str, norm: str | None, sums: list[str]) -> None:
    torch.manual_seed(0)
    model = model_of(family)
    ids = torch.randint(0, model.config.vocab_size, (2, 12))
    exact = step(model, ids)
    narrow = copy.deepcopy(model).bfloat16()
    plain = step(narrow, ids)
    for each in (model, narrow):
        fuse(each, CPU)
        fuse(each, CPU)  # a second time changes nothing
    layers = model.config.num_hidden_layers
    assert joined_of(model) == [norm] * (layers if norm else 0)
    assert largest_difference(step(model, ids), exact) < 2e-6
    found = step(narrow, ids)
    assert sums == 2 * (["forward"] * len(joined_of(model)) + ["backward"] * len(joined_of(model)))
    assert torch.allclose(found[0], plain[0], rtol=2**-6, atol=2**-6)
    assert largest_difference(found, exact) < 1.5 * largest_difference(plain, exact)


class Layer(nn.Module):
    """Sums in several orders, of which one keeps its name."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.layer_norm = LlamaRMSNorm(width, eps=1e-5), nn.LayerNorm(width)
        nn.init.normal_(self.norm.weight)
        nn.init.normal_(self.layer_norm.bias)

    def forward(self, x: Tensor, y: Tensor, *, known: bool = True) -> tuple[Tensor, ...]:
        before = y
        total = y + 2 * x
        kept = total
        residual = total
        y = self.norm(residual)
        if known:
            x = x + y
            x = self.layer_norm(x)
        else:
            x = x + y
            x = x * 2
            x = self.layer_norm(x)
        return x, y * before, kept, total + residual


def results(layer: nn.Module, inputs: list[Tensor], **kwargs: bool) -> list[Tensor]:
    outputs = layer(*inputs, **kwargs)
    grads = [torch.randn(each.shape, generator=torch.Generator().manual_seed(1)).to(each) for each in outputs]
    return [*outputs, *torch.autograd.grad(outputs, [*inputs, *layer.parameters()], grads)]


@pytest.mark.parametrize("known", [True, False])
def test_only_the_sum_that_is_normalised_is_replaced(known: bool, sums: list[str]) -> None:
    layer = Layer()
    inputs = [torch.randn(2, 3, 8).requires_grad_() for _ in range(2)]
    expected = results(layer, inputs, known=known)
    fuse(layer, CPU)
    assert joined_of(layer) == ["norm", "layer_norm"]
    found = results(layer, inputs, known=known)
    assert sums == ["forward", "forward", "backward", "backward"][:: 1 if known else 2]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_sum_or_a_norm_that_nothing_reads_has_no_gradient(sums: list[str]) -> None:
    fuse(layer := Layer(), CPU)
    x, y = (torch.randn(2, 3, 8).requires_grad_() for _ in range(2))
    total, normal = layer.norm(x, y)
    expected = torch.autograd.grad(LlamaRMSNorm.forward(layer.norm, x + y).sum(), x)
    torch.testing.assert_close(torch.autograd.grad(normal.sum(), x, retain_graph=True), expected)
    assert torch.equal(torch.autograd.grad(total.sum(), y)[0], torch.ones_like(y))
    assert sums == ["forward", "backward", "backward"]


def test_terms_of_two_shapes_or_dtypes_are_added_by_torch(sums: list[str]) -> None:
    norm = Layer().bfloat16().norm
    fuse(holder := Layer().bfloat16(), CPU)
    holder.norm.load_state_dict(norm.state_dict())
    x, y = torch.randn(2, 3, 8).bfloat16(), torch.randn(2, 3, 8)
    for plus in (y, y[:1].bfloat16(), torch.randn(2, 8, 3).bfloat16().mT):
        total, normal = holder.norm(x, plus)
        assert torch.equal(total, x + plus)
        torch.testing.assert_close(normal, norm(total), rtol=2**-7, atol=2**-9)
    assert sums == []


def test_hooks_of_a_norm_run_and_another_module_in_its_place_gets_the_sum(sums: list[str]) -> None:
    fuse(layer := Layer(), CPU)
    calls: list[str] = []
    layer.norm.register_forward_pre_hook(lambda *_: calls.append("before"))
    layer.norm.register_forward_hook(lambda *_: calls.append("after"))
    x, y = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    layer(x, y)
    assert calls == ["before", "after"]
    layer.norm = nn.Identity()  # as adapters replace modules
    assert torch.equal(layer(x, y)[1], (y + 2 * x) * y)


class Recomputed(GradientCheckpointingLayer, Layer):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        total = x + y
        y = self.norm(total)
        return y, total


class Renamed(Layer):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        total = x + y
        total = total.clone()
        return self.norm(total), total


class InOne(Layer):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        normal = self.norm(x + y)
        return (normal,)


@pytest.mark.parametrize("kind", [Renamed, InOne])
def test_a_layer_that_does_more_between_them_stays(kind: type[nn.Module], sums: list[str]) -> None:
    fuse(layer := kind(), CPU)
    assert joined_of(layer) == [] and "forward" not in vars(layer)


def test_a_layer_is_still_recomputed_as_transformers_does(sums: list[str]) -> None:
    fuse(layer := Recomputed(), CPU)
    layer.gradient_checkpointing, calls = True, []

    def recompute(function: Any, *args: Any) -> Any:
        calls.append(function)
        return checkpoint(function, *args, use_reentrant=False)

    layer._gradient_checkpointing_func = recompute
    normal, total = layer.train()(*(torch.randn(2, 3, 8).requires_grad_() for _ in range(2)))
    (normal + total).sum().backward()
    assert len(calls) == 1
    assert sums == ["forward", "forward", "backward"]
