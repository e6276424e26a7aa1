"""Products in fp8: the codes and scales of torch's own kernel, scales that ranks share, and what is refused."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig

from harness.arguments import TrainingArguments
from harness.arguments.themes.lora import LoraArguments
from harness.arguments.themes.script import ScriptArguments
from harness.cli import main
from harness.errors import UserError
from harness.extras.fp8 import e4m3
from harness.extras.fp8 import product as of_product
from harness.extras.fp8.e4m3 import E4M3
from harness.extras.fp8.layers import fp8_layers
from harness.extras.fp8.operations import round_rows
from harness.extras.fp8.product import Fp8Product, emulated, on_device
from harness.hf.causal import assemble
from harness.hf.skeleton import ModelSource
from harness.parallel.comm import TensorParallel
from harness.parallel.weight_gradients import DeferredGradients
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
    a, b = round_rows([random(32, 64)]), round_rows([random(48, 64, seed=1)])
    try:
        wanted = on_device(a, b, torch.bfloat16)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        pytest.skip(f"this torch has no such product on a CPU: {str(error).splitlines()[0]}")
    torch.testing.assert_close(emulated(a, b, torch.bfloat16), wanted, rtol=1e-2, atol=0)


def test_rows_of_zeros_have_a_scale_and_rows_that_are_not_finite_have_none() -> None:
    x = random(4, 16)
    x[1], x[2, 3], x[3, 5] = 0.0, float("inf"), float("nan")
    codes, factors = round_rows([x])
    assert factors[:2].isfinite().all() and factors[2:].isnan().all()
    assert codes.float()[1].abs().max() == 0 and codes.float()[0].abs().max() > 224


class Counted(TorchDispatchMode):
    """Counts the matrices that are rounded by rows, and by rows and columns."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[tuple[int, bool]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.harness.fp8_codes.default:
            self.found[len(args[0]), (*args, *(kwargs or {}).values())[2]] += 1
        return func(*args, **(kwargs or {}))


def three_layers(
    joins: bool, keeps: bool = False, later: DeferredGradients | None = None
) -> tuple[list[Tensor], Counter[tuple[int, bool]]]:
    """Outputs and gradients of layers that read one input, by two micro-batches, and what was rounded."""
    layer = nn.Identity()
    layer.weight_gradients = later  # type: ignore[assignment]  # as `attach` sets it
    weights = [random(width, 32, seed=width).requires_grad_() for width in (16, 48, 32, 64)]
    products = [Fp8Product(multiply=emulated, joins=joins, keeps_weights=keeps) for _ in weights]
    found: list[Tensor] = []
    with Counted() as counted:
        for seed in (5, 6):
            leaf = random(12, 32, seed=seed).requires_grad_()
            x = leaf * 1
            outputs = [own(layer, x, weight, None) for own, weight in zip(products, weights, strict=True)]
            with nullcontext() if later is None else later.defer():
                torch.autograd.backward(outputs, [random(*y.shape, seed=seed) for y in outputs])
            assert leaf.grad is not None
            found += [*(y.detach() for y in outputs), leaf.grad]
        if later is not None:
            assert all(weight.grad is None for weight in weights)
            later.compute()
            later.compute()
    return found + [weight.grad for weight in weights if weight.grad is not None], counted.found


def test_layers_with_one_input_compute_backward_together() -> None:
    apart, of_apart = three_layers(joins=False)
    joined, of_joined = three_layers(joins=True)
    for ours, theirs in zip(joined, apart, strict=True):  # one scale for the gradients of several outputs
        assert (ours - theirs).norm() < 0.05 * theirs.norm()
    for place in (*range(4), *range(5, 9), *range(10, 14)):  # outputs, and gradients of weights
        torch.testing.assert_close(joined[place], apart[place], rtol=1e-6, atol=1e-6)
    # of two micro-batches: their inputs, four gradients; four weights by rows, and by columns
    assert of_apart == {(1, True): 2 * (1 + 4), (1, False): 2 * (4 + 4)}
    # three gradients at once, and the fourth; so are weights by columns
    assert of_joined == {(1, True): 2 * 2, (3, True): 2, (1, False): 2 * (4 + 1), (3, False): 2}


@pytest.mark.parametrize("joins", [False, True])
def test_weight_gradients_that_a_schedule_defers_are_the_same_to_the_last_bit(joins: bool) -> None:
    at_once, rounded_at_once = three_layers(joins)
    deferred, rounded_before = three_layers(joins, later=DeferredGradients())
    assert len(at_once) == len(deferred) == 2 * 5 + 4 and all(map(torch.equal, at_once, deferred))
    assert rounded_before == rounded_at_once


def test_weights_are_rounded_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_product.ACTIVITY, "steps", 1)
    wanted, _ = three_layers(joins=True)
    found, counted = three_layers(joins=True, keeps=True)
    assert all(map(torch.equal, found, wanted))
    assert counted == {(1, True): 2 * 2, (3, True): 2, (1, False): 4 + 1, (3, False): 1}


def test_a_new_step_and_another_value_have_new_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_product.ACTIVITY, "steps", 1)
    own, weight, x = Fp8Product(multiply=emulated, keeps_weights=True), random(16, 32), random(4, 32, seed=1)
    first = own(nn.Identity(), x, weight, None)
    weight.data.mul_(2)  # unseen, as `data` has a version of its own
    monkeypatch.setattr(of_product.ACTIVITY, "steps", 2)
    torch.testing.assert_close(own(nn.Identity(), x, weight, None), 2 * first)
    weight.mul_(2)
    torch.testing.assert_close(own(nn.Identity(), x, weight, None), 4 * first)
    weight.data.mul_(2)
    torch.testing.assert_close(own(nn.Identity().eval(), x, weight, None), 8 * first)


def test_ranks_that_share_a_sum_have_the_codes_of_the_whole_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = random(8, 64), random(16, 64, seed=1)
    x[:, :32] *= 100  # the halves of a row differ in size
    largest = {len(each): e4m3.largest_of([each]) for each in (x, weight)}
    monkeypatch.setattr(of_product, "group_size", lambda group: 2)
    monkeypatch.setattr(of_product, "all_reduce_max", lambda own, group: largest[len(own)])
    shared: Any = Fp8Product(multiply=emulated, group=SimpleNamespace(), cut_inputs=True)
    halves = [shared(nn.Identity(), x[:, part], weight[:, part], None) for part in (slice(32), slice(32, 64))]
    torch.testing.assert_close(sum(halves), OWN(nn.Identity(), x, weight, None), rtol=1e-5, atol=1e-2)


def spec(**changes: Any) -> Any:
    found = {"fp8": "emulate", "precision": "bf16", **changes}
    return SimpleNamespace(
        args=SimpleNamespace(fp8=found["fp8"]),
        resolved=SimpleNamespace(
            precision=found["precision"], accumulation=2, activation_checkpoint_interval=0, zero_stage=1
        ),
        is_pipeline=True,
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
