"""Norms and rotations of families are found by trial, and what computes something else is left alone."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.nanochat.modeling_nanochat import NanoChatRMSNorm
from transformers.models.olmo.modeling_olmo import OlmoLayerNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from harness.extras.fusing import kernels
from harness.extras.fusing.fused import fuse
from harness.extras.fusing.kernels import HALVES, Turn
from harness.extras.fusing.norms import Norm, norm_of
from harness.extras.fusing.rotations import rotations
from tests.support.models import model_of
from tests.support.torch_kernels import use_torch

CPU = torch.device("cpu")
LLAMAS = Norm(centred=False, weight="weight", bias=None, offset=0.0, epsilon=1e-5)


@pytest.mark.parametrize(
    ("norm", "expected"),
    [
        (LlamaRMSNorm(8, eps=1e-5), LLAMAS),
        (GptOssRMSNorm(8, eps=1e-5), LLAMAS),
        (Gemma2RMSNorm(8, eps=1e-5), Norm(False, "weight", None, 1.0, 1e-5)),
        (CohereLayerNorm(8, eps=1e-5), Norm(True, "weight", None, 0.0, 1e-5)),
        (OlmoLayerNorm(8), Norm(True, None, None, 0.0, 1e-5)),
        (NanoChatRMSNorm(eps=1e-6), Norm(False, None, None, 0.0, 1e-6)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_norm_is_found_by_what_it_computes(norm: nn.Module, expected: Norm) -> None:
    assert norm_of(norm) == expected
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    x = (3 * torch.randn(4, 3, 8)).bfloat16().requires_grad_()
    ours, theirs = expected(norm.bfloat16(), x), norm(x)
    torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=2**-9)
    grad = torch.randn(ours.shape).bfloat16()
    torch.testing.assert_close(
        *(torch.autograd.grad(each, x, grad)[0] for each in (ours, theirs)), rtol=0.02, atol=0.02
    )
    assert torch.equal(expected(norm.float(), x), norm(x))  # weights of another dtype: the family's own code


class Halved(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return 0.5 * super().forward(hidden_states)


class InTraining(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states) if self.training else hidden_states


class Detached(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states.detach())


class ConstantScale(LlamaRMSNorm):
    """Has a norm's outputs, and no gradient through the mean square."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        wide = hidden_states.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * (wide * scale.detach()).type_as(hidden_states)


class Clipped(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states.clamp(-10, 10))


@pytest.mark.parametrize(
    "module",
    [
        Halved(8),
        InTraining(8),
        Detached(8),
        ConstantScale(8),
        Clipped(8),
        Qwen3NextRMSNormGated(8),
        nn.LayerNorm(8),
        nn.GELU(),
    ],
    ids=lambda module: type(module).__name__,
)
def test_what_computes_something_else_is_no_norm(module: nn.Module) -> None:
    assert norm_of(module) is None


class Count(TorchDispatchMode):
    """Counts operations that are no views; those of a kernel count as one."""

    count = 0
    in_kernel = False

    def __torch_dispatch__(self, called: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not self.in_kernel and called.overloadpacket.__name__ not in FREE and not called.is_view
        return called(*args, **(kwargs or {}))

    def as_one(self, kernel: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            self.count += not self.in_kernel
            before, self.in_kernel = self.in_kernel, True
            try:
                return kernel(*args, **kwargs)
            finally:
                self.in_kernel = before

        return run


FREE = ("detach", "_unsafe_view", "empty", "empty_like")


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_5_text"])
def test_norms_with_weights_minus_one_are_one_kernel_in_16_bits(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_torch(monkeypatch)
    norm = next(each for each in model_of(family).modules() if (found := norm_of(each)) and found.offset)
    norm.bfloat16()
    x = torch.randn(2, 3, 5, norm.weight.numel()).bfloat16().requires_grad_()  # type: ignore[operator]
    for given in (x, x.transpose(1, 2), x.permute(2, 0, 1, 3)):
        expected = type(norm).forward(norm, given)
        counted = Count()
        with monkeypatch.context() as patched:
            for name in ("norm", "norm_backward"):
                patched.setattr(kernels, name, counted.as_one(getattr(kernels, name)))
            fuse(norm, CPU)
            with counted:
                found = norm(given)
                assert counted.count == 1
                ours = torch.autograd.grad(found, [x, *norm.parameters()], given.detach())
                assert counted.count == 2
        assert found.stride() == given.stride()
        torch.testing.assert_close(found, expected, rtol=2**-8, atol=0)
        theirs = torch.autograd.grad(expected, [x, *norm.parameters()], given.detach())
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02)


PAIRS = {"pairs": True, "into_pairs": True}
ROTATIONS = {
    "llama": HALVES,
    "cohere": Turn("pairs", wide=True, **PAIRS),
    "glm4": Turn("first half", **PAIRS),
    "gpt_oss": Turn("each"),
    "olmo2": Turn(wide=True),
    "llama4": Turn("each", wide=True, tokens=1, **PAIRS),
    "deepseek_v2": Turn("each", wide=True, **PAIRS),
}


@pytest.mark.parametrize("family", ROTATIONS)
def test_a_rotation_is_found_by_what_it_computes(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[Turn] = []
    use_torch(monkeypatch)
    by_torch = kernels.rotate

    def rotate(heads: list[Tensor], cos: Tensor, sin: Tensor, turn: Turn, *, backward: bool = False) -> Any:
        used.append(turn)
        return by_torch(heads, cos, sin, turn, backward=backward)

    monkeypatch.setattr(kernels, "rotate", rotate)
    home = import_module(f"transformers.models.{family}.modeling_{family}")
    turn = ROTATIONS[family]
    kind = next(value for name, value in vars(home).items() if name.endswith("Attention"))
    (name, fused), *_ = rotations(kind.forward).items()
    dtype = torch.float32 if turn.wide else torch.bfloat16
    angles = [torch.randn(2, 5, 8 if turn.angles == "each" else 16).to(dtype) for _ in range(2)]
    more = [torch.complex(*angles)] if family in ("llama4", "deepseek_v2") else angles
    heads = [torch.randn(2, 5, count, 16).bfloat16() for count in (4, 2)]
    heads = [(each if turn.tokens == 1 else each.transpose(1, 2)).requires_grad_() for each in heads]
    made = [rotating(*heads, *more) for rotating in (fused, getattr(home, name))]
    results = [[*each, *torch.autograd.grad(each, heads, heads)] for each in made]
    assert used[-2:] == [turn, turn]
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2**-7 * float(theirs.detach().abs().max()))
    assert all(map(torch.equal, results[0][:2], results[1][:2]))
