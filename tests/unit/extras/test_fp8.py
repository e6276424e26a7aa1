"""Products in fp8: the codes and scales of torch's own kernel, scales that ranks share, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import LlamaConfig

from harness.arguments import TrainingArguments
from harness.arguments.themes.lora import LoraArguments
from harness.arguments.themes.script import ScriptArguments
from harness.cli import main
from harness.errors import UserError
from harness.extras.fp8 import product as of_product
from harness.extras.fp8.layers import fp8_layers
from harness.extras.fp8.product import E4M3, Fp8Product, emulated, on_device
from harness.hf.causal import assemble
from harness.hf.skeleton import ModelSource
from harness.parallel.comm import TensorParallel
from harness.preflight import check_inputs
from harness.topology.env import LaunchEnv
from tests.support.layers import build, run
from tests.support.models import model_of

OWN = Fp8Product(multiply=emulated)


def random(*shape: int, seed: int = 0) -> Tensor:
    """Rows of very different sizes, as tokens have them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator) * torch.logspace(-3, 3, shape[0])[:, None]


def rounded(rows: Tensor) -> Tensor:
    """Each row in e4m3 by the largest power of two that keeps it in range, found one row at a time."""
    found = []
    for row in rows.double():
        scale = 1.0
        while row.abs().max() * scale * 2 <= 448:
            scale *= 2
        while row.abs().max() * scale > 448:
            scale /= 2
        found.append((row * scale).float().to(E4M3).double() / scale)
    return torch.stack(found)


def test_the_three_products_round_each_row_that_is_summed_over() -> None:
    x, weight = random(12, 32).requires_grad_(), random(16, 32, seed=1).requires_grad_()
    grad = random(12, 16, seed=2)
    y = OWN(nn.Identity(), x, weight, None)
    y.backward(grad)
    wanted = rounded(x.detach()) @ rounded(weight.detach()).t()
    of_x = rounded(grad) @ rounded(weight.detach().t()).t()
    of_weight = rounded(grad.t()) @ rounded(x.detach().t()).t()
    for found, right in ((y, wanted), (x.grad, of_x), (weight.grad, of_weight)):
        assert found is not None
        torch.testing.assert_close(found.detach().double(), right, rtol=1e-5, atol=1e-5 * right.abs().max().item())


def test_the_error_of_a_product_is_that_of_three_bits_of_mantissa() -> None:
    x, weight = random(64, 256), random(32, 256, seed=1)
    exact, found = linear(x, weight), OWN(nn.Identity(), x, weight, None)
    error = ((found - exact).norm(dim=1) / exact.norm(dim=1)).mean()
    assert 0.01 < error < 0.06


def test_emulation_gives_the_numbers_of_torchs_kernel() -> None:
    a, of_a = of_product._quantised(random(32, 64), random(32, 64).abs().amax(1, keepdim=True))
    b, of_b = of_product._quantised(random(48, 64, seed=1), random(48, 64, seed=1).abs().amax(1, keepdim=True))
    try:
        wanted = on_device(a, b, of_a, of_b, torch.bfloat16)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        pytest.skip(f"this torch has no such product on a CPU: {str(error).splitlines()[0]}")
    torch.testing.assert_close(emulated(a, b, of_a, of_b, torch.bfloat16), wanted, rtol=1e-2, atol=0)


def test_ranks_that_share_a_sum_have_the_codes_of_the_whole_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = random(8, 64), random(16, 64, seed=1)
    x[:, :32] *= 100  # the halves of a row differ in size
    largest = [x.abs().amax(1, keepdim=True), weight.abs().amax(1, keepdim=True)]
    monkeypatch.setattr(of_product, "group_size", lambda group: 2)
    monkeypatch.setattr(of_product, "_largest_of_group", lambda values, group: largest)
    shared: Any = Fp8Product(multiply=emulated, group=SimpleNamespace(), cut_inputs=True)
    halves = [shared(nn.Identity(), x[:, part], weight[:, part], None) for part in (slice(32), slice(32, 64))]
    torch.testing.assert_close(sum(halves), OWN(nn.Identity(), x, weight, None), rtol=1e-5, atol=1e-2)


def spec(**changes: Any) -> Any:
    found = {"fp8": "emulate", "precision": "bf16", **changes}
    return SimpleNamespace(
        args=SimpleNamespace(fp8=found["fp8"]),
        resolved=SimpleNamespace(precision=found["precision"]),
    )


def test_linear_layers_of_decoder_layers_compute_in_fp8_and_nothing_else() -> None:
    source = ModelSource.of_model(model_of("llama"))
    causal = assemble(
        source,
        tensor=TensorParallel(),
        device=torch.device("cpu"),
        dtype=torch.bfloat16,
        seed=0,
        finish=fp8_layers(spec(), torch.device("cpu"), source.config),
    )
    built = build(causal)
    changed = {n for m in built.modules.values() for n, child in m.named_modules() if hasattr(child, "product")}
    linears = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert {name.rpartition(".")[2] for name in changed} == linears
    ids = torch.arange(24).reshape(2, 12)
    found, exact = run(built, ids), model_of("llama").bfloat16()(ids).logits
    assert 0 < (found - exact).norm() / exact.norm() < 0.1
    found.float().logsumexp(-1).sum().backward()
    assert all(
        p.grad is not None and p.grad.dtype == torch.bfloat16 for m in built.modules.values() for p in m.parameters()
    )


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"precision": "fp32"}, '--fp8 emulate needs "bf16": {"enabled": true}: this run computes in fp32'),
        ({"fp8": "rowwise"}, "--fp8 rowwise needs an NVIDIA GPU of compute capability 8.9 or more: remove --fp8"),
        (
            {"fp8": "rowwise", "device": torch.device("cuda")},
            "--fp8 rowwise needs compute capability 8.9, and NVIDIA A100 has 8.0: remove --fp8",
        ),
    ],
)
def test_a_run_that_cannot_compute_in_fp8_is_refused(
    changes: dict[str, Any], refusal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    with pytest.raises(UserError) as told:
        fp8_layers(spec(**changes), changes.get("device", torch.device("cpu")), LlamaConfig())
    assert str(told.value).startswith(refusal)


@pytest.mark.parametrize(
    ("config", "lora", "said"),
    [
        ({}, {}, "DS410 --fp8 emulate needs bf16, but this run computes in fp32"),
        ({"bf16": {"enabled": True}}, {"use_peft": True, "load_in_4bit": True}, "--fp8 and --load_in_4bit exclude"),
    ],
)
def test_what_fp8_excludes_is_told_before_a_run_starts(config: dict[str, Any], lora: dict[str, Any], said: str) -> None:
    args = TrainingArguments(deepspeed_config={"train_batch_size": 2, **config}, fp8="emulate")
    with pytest.raises(UserError, match=said):
        check_inputs(ScriptArguments(model_name_or_path="tiny-llama"), args, LaunchEnv(), LoraArguments(**lora))


def test_a_dry_run_on_a_cpu_has_no_kernel_of_fp8(capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--rank", "0", "--world_size", "1", "--device", "cpu", "--bf16", "--fp8", "rowwise"]
    assert main(["dry-run", *words, "--model_name_or_path", "tiny-llama", "--block_size", "16"]) == 1
    assert "--fp8 rowwise needs an NVIDIA GPU" in capfd.readouterr().err
