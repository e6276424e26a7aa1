"""Norms and rotations in fewer passes: transformers' numbers, for what reads as Llama's, and nothing else replaced."""

import copy
import sys

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from harness.extras.fusing.fused import ROTATION, RMSNorm, Rotation, fuse
from tests.support.models import model_of

CPU = torch.device("cpu")


def gradients(output: Tensor, *inputs: Tensor) -> list[Tensor]:
    torch.manual_seed(1)
    return [output.detach(), *torch.autograd.grad((output.float() * torch.randn(output.shape)).sum(), inputs)]


@pytest.mark.parametrize("shape", [(2, 3, 48), (2, 5, 4, 16), (7,)], ids=str)
def test_a_norm_is_that_of_llama(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    hidden = (5 * torch.randn(shape)).requires_grad_()
    norm = LlamaRMSNorm(shape[-1], eps=1e-5)
    nn.init.normal_(norm.weight)
    found = gradients(RMSNorm.apply(hidden, norm.weight, 1e-5), hidden, norm.weight)
    for ours, theirs in zip(found, gradients(norm(hidden), hidden, norm.weight), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-6)


def test_a_norm_gives_gradients_to_what_wants_some() -> None:
    hidden, weight = torch.randn(2, 3, 8, requires_grad=True), torch.randn(8)
    RMSNorm.apply(hidden, weight, 1e-6).sum().backward()
    assert hidden.grad is not None
    weight.requires_grad_()
    RMSNorm.apply(hidden.detach(), weight, 1e-6).sum().backward()
    assert weight.grad is not None


def test_a_rotation_is_that_of_llama() -> None:
    torch.manual_seed(0)
    q, k = (torch.randn(2, 5, heads, 8, requires_grad=True) for heads in (4, 2))
    angles = torch.randn(2, 5, 4)
    cos, sin = (torch.cat([each, each], -1) for each in (angles.cos(), 1.1 * angles.sin()))
    plain = modeling_llama.apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    for x, expected in zip((q, k), plain, strict=True):
        output = Rotation.apply(x.transpose(1, 2), cos.unsqueeze(1), sin.unsqueeze(1))
        assert output.stride() == expected.stride()
        for ours, theirs in zip(gradients(output, x), gradients(expected, x), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
    ("family", "norms", "rotations"),
    [("llama", 7, 3), ("qwen3", 13, 3), ("mixtral", 7, 3), ("gemma2", 0, 3), ("gpt2", 0, 0)],
)
def test_a_fused_model_computes_the_same(family: str, norms: int, rotations: int) -> None:
    torch.manual_seed(0)
    model = model_of(family)
    ids = torch.randint(0, model.config.vocab_size, (2, 12))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def step() -> list[Tensor]:
        loss = model(input_ids=ids, labels=ids).loss
        found = torch.autograd.grad(loss, trained, allow_unused=True)
        return [loss.detach(), *(each for each in found if each is not None)]

    expected = step()
    fuse(model, CPU)
    fuse(model, CPU)  # a second time changes nothing
    changed = [type(module).__name__ for module in model.modules() if "forward" in vars(module)]
    assert [sum(kind in name for name in changed) for kind in ("Norm", "Attention")] == [norms, rotations]
    for ours, theirs in zip(step(), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_what_reads_otherwise_is_left_alone() -> None:
    class Own(LlamaRMSNorm):
        def forward(self, hidden_states: Tensor) -> Tensor:
            return hidden_states

    taken = LlamaRMSNorm(4)
    taken.forward = lambda hidden_states: hidden_states  # as another package may have done
    layer = nn.ModuleList([Own(4), GptOssRMSNorm(4), taken, nn.LayerNorm(4)])
    before = [vars(module).get("forward") for module in layer]
    fuse(layer, CPU)
    assert [vars(module).get("forward") for module in layer] == before


def steps_of(model: nn.Module, ids: Tensor) -> set[str]:
    """Names of the operations in a model's backward pass."""
    found: set[str] = set()
    waiting = [model(input_ids=ids).logits.grad_fn]
    while waiting:
        step = waiting.pop()
        if step is not None and step.name() not in found:
            found.add(step.name())
        waiting += [following for following, _ in getattr(step, "next_functions", ())]
    return found


def test_other_models_of_the_process_compute_as_before() -> None:
    ids = torch.tensor([[1, 2, 3]])
    beside = copy.deepcopy(model := model_of("llama", num_hidden_layers=1))
    home = sys.modules[type(model).__module__]
    before = dict(vars(home))
    fuse(model, CPU)
    assert {"RMSNormBackward", "RotationBackward"} <= steps_of(model, ids)
    assert vars(home) == before
    for other in (beside, model_of("llama", num_hidden_layers=1)):
        assert not {"RMSNormBackward", "RotationBackward"} & steps_of(other, ids)
    assert {"RMSNormBackward", "RotationBackward"} <= steps_of(copy.deepcopy(model), ids)


def test_other_dtypes_and_sizes_are_transformers_own() -> None:
    model = model_of("llama").bfloat16()
    ids = torch.randint(0, model.config.vocab_size, (2, 12))
    expected = model(input_ids=ids).logits
    fuse(model, CPU)
    assert torch.equal(model(input_ids=ids).logits, expected)
    plain = modeling_llama.apply_rotary_pos_emb
    attention = next(module for module in model.modules() if "Attention" in type(module).__name__)
    own = attention.forward.__globals__[ROTATION]  # type: ignore[union-attr]
    q, cos = torch.randn(1, 2, 3, 8).bfloat16(), torch.randn(1, 3, 8)
    for ours, theirs in zip(own(q, q, cos, cos), plain(q, q, cos, cos), strict=True):
        assert ours.dtype == torch.float32 and torch.equal(ours, theirs)
    wide = torch.randn(1, 2, 3, 6)
    with pytest.raises(RuntimeError, match="must match the size"):
        own(wide, wide, cos, cos)
