"""Gates, norms with a gate and activations of families are found by trial, and compute what they did.

With torch's operations in the place of the kernels, which are compared with them in test_kernels.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2FN
from transformers.models.bloom.modeling_bloom import BloomGelu
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4MLP
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNormGated
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLDenseMLP
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated
from transformers.models.step3p7.modeling_step3p7 import Step3p7MLP

from harness.extras.fusing.activations import activation_of, fused_activation
from harness.extras.fusing.found_gates import gated
from harness.extras.fusing.fused import fuse
from harness.extras.fusing.gated_norms import GatedNorm, gated_norm_of
from harness.extras.fusing.gates import FeedForward, GateOfOne
from harness.extras.fusing.kernels import Activation, Gate
from harness.verify.tiny_copy import tiny_config, tiny_ids, tiny_model
from tests.support.torch_kernels import use_torch

CPU = torch.device("cpu")
BF16 = 2**-7
"""Two units in the last place."""


def gradients(made: Tensor, inputs: list[Tensor], grad: Tensor) -> Any:
    return torch.autograd.grad(made, inputs, grad)


@pytest.fixture(autouse=True)
def torch_for_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    use_torch(monkeypatch)


@pytest.mark.parametrize(
    ("module", "name", "is_replaced"),
    [
        (ACT2FN["gelu_new"], "gelu_tanh", True),
        (ACT2FN["gelu_fast"], "gelu_tanh", True),
        (ACT2FN["gelu_python"], "gelu", True),
        (BloomGelu(), "gelu_tanh", True),
        (ACT2FN["relu2"], "relu2", True),
        (ACT2FN["quick_gelu"], "swish", True),
        (ACT2FN["gelu"], "gelu", False),
        (ACT2FN["gelu_pytorch_tanh"], "gelu_tanh", False),
        (ACT2FN["silu"], "silu", False),
        (nn.SiLU(), "silu", False),
        (nn.Sigmoid(), "sigmoid", False),
        (ACT2FN["gelu_10"], None, False),
        (ACT2FN["mish"], None, False),
        (nn.Dropout(0.5), None, False),
        (nn.Identity(), None, False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_activation_is_found_by_what_it_computes(module: nn.Module, name: str | None, is_replaced: bool) -> None:
    state = torch.get_rng_state()
    found = activation_of(module)
    assert (None if found is None else found.name) == name
    fused = fused_activation(module)
    assert (fused is not None) == is_replaced
    assert torch.equal(torch.get_rng_state(), state)
    if fused is None:
        return
    x = (2 * torch.randn(64)).requires_grad_()
    for ours, theirs in zip(
        *([made, *gradients(made, [x], x.detach())] for made in (fused(module, x), module(x))), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    narrow = x.detach().bfloat16()
    in_float32 = module(narrow.float())
    ours, theirs = ((made - in_float32).abs().max() for made in (fused(module, narrow), module(narrow)))
    assert ours <= theirs  # one rounding instead of one for each operation


CONFIG = SimpleNamespace(
    **dict(hidden_size=24, intermediate_size=40, num_local_experts=3, num_experts_per_tok=2, hidden_act="silu"),
    **dict(swiglu_limit=5.0, swiglu_alpha=1.702, swiglu_limits_shared=[3.0], share_expert_dim=40, mlp_bias=False),
    **dict(dense_intermediate_size=40),
)
ALPHA = Activation("swish", 1.702)
SILU = Activation("silu")


def test_gates_of_experts_are_found_by_what_they_compute() -> None:
    experts = GptOssExperts.__new__(GptOssExperts)
    nn.Module.__init__(experts)
    experts.alpha, experts.limit = 1.702, 7.0
    found = gated(experts)
    assert found == {"_apply_gate": GateOfOne(Gate(ALPHA, limit=7.0, offset=1.0, neighbours=True))}
    both = (6 * torch.randn(5, 48)).bfloat16().requires_grad_()
    made = [found["_apply_gate"](experts, both), experts._apply_gate(both)]
    assert torch.equal(*made)
    ours, theirs = (gradients(each, [both], made[0].detach())[0] for each in made)
    torch.testing.assert_close(ours, theirs, rtol=BF16, atol=BF16)


@pytest.mark.parametrize(
    ("block", "how", "layers"),
    [
        (MiniMaxM3VLDenseMLP(CONFIG), Gate(ALPHA, limit=5.0, offset=1.0), ("gate_up_proj", "down_proj")),
        (DeepseekV4MLP(CONFIG), Gate(SILU, limit=5.0), ("gate_proj", "up_proj", "down_proj")),
        (Step3p7MLP(CONFIG, 0), Gate(SILU, limit=3.0, clamps_after=True), ("gate_proj", "up_proj", "down_proj")),
    ],
    ids=lambda value: type(value).__name__,
)
def test_blocks_with_clamped_gates_are_found_by_what_they_compute(
    block: nn.Module, how: Gate, layers: tuple[str, ...]
) -> None:
    assert gated(block) == {"forward": FeedForward(how, layers)}
    torch.manual_seed(0)
    x = (20 * torch.randn(7, 24)).requires_grad_()
    inputs = [x, *block.parameters()]
    grad = torch.randn(7, 24)
    theirs = block(x)
    fuse(block, CPU)
    ours = block(x)
    for mine, wanted in zip(
        [ours, *gradients(ours, inputs, grad)], [theirs, *gradients(theirs, inputs, grad)], strict=True
    ):
        torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-4)


class Crossed(nn.Module):
    """Names its layers in another order than it calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self.both, self.limit = nn.Linear(8, 8), nn.Linear(8, 16), 2.0

    def forward(self, x: Tensor) -> Tensor:
        up, gate = self.both(x).chunk(2, -1)
        return self.out(up.clamp(-self.limit, self.limit) * functional.silu(gate.clamp(max=self.limit)))


class Lopsided(Crossed):
    def forward(self, x: Tensor) -> Tensor:
        up, gate = self.both(x).chunk(2, -1)
        return self.out(up.clamp(0.0, self.limit) * torch.tanh(gate))


def test_the_order_of_layers_is_that_of_calls_and_other_gates_are_left_alone() -> None:
    assert gated(Crossed()) == {"forward": FeedForward(Gate(SILU, limit=2.0, gate_last=True), ("both", "out"))}
    assert gated(Lopsided()) == {}


class Dropping(Crossed):
    """Drops elements, and only in training."""

    def forward(self, x: Tensor) -> Tensor:
        up, gate = self.both(x).chunk(2, -1)
        gated = up.clamp(-self.limit, self.limit) * functional.silu(gate.clamp(max=self.limit))
        return self.out(functional.dropout(gated, 0.5, self.training))


class DroppingRelu(nn.Module):
    """The same of an activation."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(functional.relu(x).square(), 0.5, self.training)


@pytest.mark.parametrize("training", [True, False])
def test_what_drops_elements_in_training_does_so_if_it_was_tried_in_evaluation(training: bool) -> None:
    block, x = Dropping().train(training), torch.randn(64, 8)
    method = gated(block)["forward"]  # the product alone
    with torch.random.fork_rng():
        assert not torch.equal(method(block.train(), x), method(block, x))
    assert fused_activation(DroppingRelu().train(training)) is None


class ConstantGate(Qwen3NextRMSNormGated):
    """Has the outputs of a norm with a gate, and half of the gate's gradient."""

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        assert gate is not None
        return super().forward(hidden_states, (gate + gate.detach()) / 2)


def test_outputs_of_a_norm_with_a_gate_without_its_gradients_are_not_enough() -> None:
    assert gated_norm_of(ConstantGate(8, eps=1e-6)) is None


@pytest.mark.parametrize(
    ("norm", "expected"),
    [
        (Qwen3NextRMSNormGated(8, eps=1e-6), GatedNorm(False, "silu", "weight", 8, 1e-6)),
        (KimiLinearRMSNormGated(8, eps=1e-5), GatedNorm(False, "sigmoid", "weight", 8, 1e-5)),
        (MambaRMSNormGated(8, group_size=4, eps=1e-5), GatedNorm(True, "silu", "weight", 4, 1e-5)),
        (FalconH1RMSNormGated(12, eps=1e-6, n_groups=3), GatedNorm(False, "silu", "weight", 4, 1e-6)),
        (FalconH1RMSNormGated(8, norm_before_gate=False), GatedNorm(True, "silu", "weight", 8, 1e-6)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_norm_with_a_gate_is_found_by_what_it_computes(norm: nn.Module, expected: GatedNorm) -> None:
    assert gated_norm_of(norm) == expected
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    norm.bfloat16()
    width = norm.weight.numel()  # type: ignore[operator]
    x, gate = ((3 * torch.randn(4, 3, width)).bfloat16().requires_grad_() for _ in range(2))
    ours, theirs = expected(norm, x, gate), norm(x, gate)
    torch.testing.assert_close(ours, theirs, rtol=2 * BF16, atol=BF16 / 4)
    grad = torch.randn(ours.shape).bfloat16()
    for mine, wanted in zip(gradients(ours, [x, gate], grad), gradients(theirs, [x, gate], grad), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=0.03, atol=0.03)
    assert torch.equal(expected(norm.float(), x, gate), norm(x, gate))  # weights of another dtype: the family's code
    assert gated_norm_of(LlamaRMSNorm(8)) is None


FAMILIES = {
    "gpt_oss": {"GptOssExperts"},
    "deepseek_v4": {"DeepseekV4Experts", "DeepseekV4MLP"},
    "qwen3_next": {"Qwen3NextRMSNormGated", "Qwen3NextAttention"},
    "mamba2": {"MambaRMSNormGated"},
    "nemotron": {"ReLUSquaredActivation"},
    "gpt2": {"NewGELUActivation"},
    "bloom": {"BloomGelu"},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families_compute_as_before(family: str) -> None:
    model = tiny_model(tiny_config(family))
    ids = tiny_ids(model)
    trained = list(model.parameters())

    def step() -> list[Tensor]:
        loss = model(input_ids=ids, labels=ids).loss
        found = torch.autograd.grad(loss, trained, allow_unused=True)
        return [loss.detach(), *(each for each in found if each is not None)]

    expected = step()
    fuse(model, CPU)
    changed = {type(m).__name__ for m in model.modules() if {"forward", "_apply_gate"} & vars(m).keys()}
    assert changed >= FAMILIES[family]
    largest = max(float(each.abs().max()) for each in expected[1:])
    for ours, theirs in zip(step(), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-5 * largest)
