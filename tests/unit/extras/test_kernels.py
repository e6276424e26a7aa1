"""The kernels in Triton against torch's own operations: on a GPU, or in Triton's interpreter.

Without a GPU: install triton, and set TRITON_INTERPRET=1.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2FN
from transformers.models.llama import modeling_llama

from harness.device import kernels as of_loss
from harness.extras.fp8 import e4m3
from harness.extras.fp8 import kernels as of_fp8
from harness.extras.fusing import kernels
from harness.extras.fusing.activations import KNOWN, plain_activation
from harness.extras.fusing.fused import ROTATION, fuse, reads_globals
from harness.extras.fusing.gates import gate_plainly
from harness.extras.fusing.kernels import Activation, Gate, RowNorm, Turn
from harness.extras.fusing.rotations import turned
from harness.parallel.tensor.cross_entropy import vocab_parallel_cross_entropy
from tests.support.models import model_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BITS = {torch.bfloat16: 2**-7, torch.float16: 2**-9, torch.float32: 1e-5}
"""Two units in the last place of each dtype: exponentials of torch and of Triton may round to neighbours."""
pytestmark = pytest.mark.skipif(not kernels.usable(DEVICE), reason="needs triton, and a GPU or TRITON_INTERPRET=1")
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16
"""Triton's interpreter cuts bf16 off where a GPU rounds."""
dtypes = pytest.mark.parametrize("dtype", [HALF, torch.float32], ids=str)


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_they_are_tried_with_gradients_by_whoever_asks_first(mode: type[torch.no_grad]) -> None:
    for each in (kernels, of_loss, of_fp8):
        each.usable.cache_clear()
        with mode():
            assert each.usable(DEVICE)


@dtypes
@pytest.mark.parametrize(
    ("batch", "heads", "of_keys", "tokens", "width"), [(2, 4, 2, 5, 16), (1, 3, 3, 7, 12), (2, 40, 1, 2, 64)]
)
def test_queries_and_keys_are_rotated_to_the_bit(
    dtype: torch.dtype, batch: int, heads: int, of_keys: int, tokens: int, width: int
) -> None:
    q, k = (drawn(batch, tokens, each, width, dtype=dtype, seed=each).transpose(1, 2) for each in (heads, of_keys))
    for angles in (drawn(batch, tokens, width, dtype=dtype), drawn(1, tokens, width, dtype=dtype)):
        cos, sin = angles, angles.flip(-1).contiguous()
        inputs = [each.detach().requires_grad_() for each in (q, k)]
        expected = modeling_llama.apply_rotary_pos_emb(*inputs, cos, sin)
        found = kernels.rotate([q, k], cos, sin)
        grads = [drawn(*each.shape, dtype=dtype, seed=1) for each in expected]
        back = kernels.rotate(grads, cos, sin, backward=True)
        wanted = torch.autograd.grad(expected, inputs, grads)
        for ours, theirs in zip((*found, *back), (*expected, *wanted), strict=True):
            if dtype == torch.float32:  # a fused multiply-add rounds once
                torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
            else:
                assert torch.equal(ours, theirs)
        if of_keys > 1:  # a single head has any stride
            assert [each.stride() for each in found] == [each.stride() for each in expected]


@pytest.mark.parametrize(
    "turn",
    [
        Turn(),
        Turn("pairs", pairs=True, into_pairs=True, wide=True),
        Turn("first half", pairs=True, last=True),
        Turn("each", into_pairs=True, tokens=1),
        Turn("pairs", opposite=True, last=True, tokens=1),
    ],
    ids=str,
)
def test_every_way_of_rotating_is_that_of_torch_to_the_bit(turn: Turn) -> None:
    heads = [drawn(2, 3, count, 16, dtype=HALF, seed=count) for count in (3, 2)]
    heads = [(each if turn.tokens == 1 else each.transpose(1, 2)).requires_grad_() for each in heads]
    angles = [drawn(2, 3, 4 if turn.angles == "each" else 8, dtype=HALF, seed=seed) for seed in (4, 5)]
    wanted = [turned(each, *angles, turn) for each in heads]
    grads = [drawn(*each.shape, dtype=HALF, seed=6) for each in wanted]
    found = kernels.rotate([each.detach() for each in heads], *angles, turn)
    back = kernels.rotate(grads, *angles, turn, backward=True)
    for ours, theirs in zip((*found, *back), (*wanted, *torch.autograd.grad(wanted, heads, grads)), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("family", ["qwen3_5_text", "phi3", "glm4_moe", "nemotron", "gpt_neox", "minimax_m2"])
def test_a_part_of_each_head_is_rotated_to_the_bit(family: str) -> None:
    attention = next(
        module
        for module in model_of(family, num_hidden_layers=4).modules()
        if reads_globals(type(module).forward, [ROTATION])
    )
    plain = type(attention).forward.__globals__[ROTATION]
    fuse(attention.to(DEVICE), DEVICE)
    fused = attention.forward.__func__.__globals__[ROTATION]
    inputs = [drawn(2, 5, heads, 16, dtype=HALF, seed=heads).transpose(1, 2).requires_grad_() for heads in (4, 2)]
    for batch in (1, 2):
        cos, sin = (drawn(batch, 5, 8, dtype=HALF, seed=seed) for seed in (1, 2))
        pairs = [
            [*each, *torch.autograd.grad(each, inputs, inputs)]
            for each in (f(*inputs, cos, sin) for f in (fused, plain))
        ]
        assert all(map(torch.equal, *pairs))


@dtypes
@pytest.mark.parametrize("activation", KNOWN, ids=lambda activation: activation.name)
@pytest.mark.parametrize("shape", [(3, 40), (2, 3, 1030)], ids=str)
def test_a_gate_is_an_activation_and_a_product(
    dtype: torch.dtype, activation: Activation, shape: tuple[int, ...]
) -> None:
    whole = 3 * drawn(*shape[:-1], 2 * shape[-1], dtype=dtype)
    inputs = [each.detach().requires_grad_() for each in whole.chunk(2, -1)]  # rows that are not neighbours in memory
    grad = drawn(*shape, dtype=dtype, seed=1)
    expected = plain_activation(activation, inputs[0]) * inputs[1]
    # in float32, because torch's gradient of a sigmoid is computed from its rounded value
    precise = [each.detach().float().requires_grad_() for each in inputs]
    wanted = torch.autograd.grad(plain_activation(activation, precise[0]) * precise[1], precise, grad.float())
    gates, ups = (each.detach() for each in inputs)
    found = kernels.gate(gates, ups, Gate(activation)), *kernels.gate_backward(grad, gates, ups, Gate(activation))
    for ours, theirs in zip(found, (expected, *wanted), strict=True):
        near = theirs.detach().to(dtype)
        torch.testing.assert_close(ours, near, rtol=2 * BITS[dtype], atol=max(BITS[dtype] / 4, 1e-5))
        assert ours.is_contiguous()


@dtypes
@pytest.mark.parametrize(
    "how",
    [
        Gate(Activation("silu")),
        Gate(Activation("swish", 1.702), limit=2.0, offset=1.0, neighbours=True),
        Gate(Activation("silu"), limit=1.5, clamps_after=True, gate_last=True),
        Gate(Activation("gelu_tanh"), limit=1.0, wide=True),
        Gate(Activation("sigmoid"), wide=True, neighbours=True, gate_last=True),
    ],
    ids=str,
)
def test_gates_of_one_tensor_are_those_of_torch(dtype: torch.dtype, how: Gate) -> None:
    both = (3 * drawn(2, 3, 2060, dtype=dtype)).requires_grad_()
    grad = drawn(2, 3, 1030, dtype=dtype, seed=1)
    expected = gate_plainly(how, *how.parts(both))
    (wanted,) = torch.autograd.grad(expected, [both], grad)
    found = kernels.gate_halves(both.detach(), how)
    torch.testing.assert_close(found, expected.detach(), rtol=BITS[dtype], atol=max(BITS[dtype] / 8, 1e-5))
    back = kernels.gate_halves_backward(grad, both.detach(), how)
    torch.testing.assert_close(back, wanted, rtol=2 * BITS[dtype], atol=max(BITS[dtype], 1e-5))


@dtypes
@pytest.mark.parametrize("activation", KNOWN, ids=lambda activation: activation.name)
def test_an_activation_alone_is_that_of_torch(dtype: torch.dtype, activation: Activation) -> None:
    x = (3 * drawn(2, 3, 700, dtype=dtype)).requires_grad_()
    grad = drawn(2, 3, 700, dtype=dtype, seed=1)
    expected = plain_activation(activation, x)
    (wanted,) = torch.autograd.grad(expected, [x], grad)
    found = kernels.activate(x.detach(), activation)
    torch.testing.assert_close(found, expected.detach(), rtol=BITS[dtype], atol=max(BITS[dtype] / 8, 1e-5))
    back = kernels.activate_backward(grad, x.detach(), activation)
    torch.testing.assert_close(back, wanted, rtol=2 * BITS[dtype], atol=max(BITS[dtype] / 2, 1e-5))


@dtypes
@pytest.mark.parametrize("shape", [(2, 3, 24), (7, 4100), (1300, 40)], ids=str)
@pytest.mark.parametrize("sums", [False, True], ids=["one", "sum"])
@pytest.mark.parametrize("how", [RowNorm(1e-5, offset=1.0), RowNorm(1e-5, centred=True)], ids=["rms", "layer"])
def test_a_norm_of_a_tensor_or_of_a_sum_is_that_of_torch(
    dtype: torch.dtype, shape: tuple[int, ...], sums: bool, how: RowNorm
) -> None:
    width = shape[-1]
    x = 3 * drawn(*shape[:-1], 2 * width, dtype=dtype)[..., :width]  # rows that are not neighbours in memory
    plus, grad, of_total = (drawn(*shape, dtype=dtype, seed=seed) for seed in (1, 2, 3))
    weight, bias = (drawn(width, dtype=dtype, seed=seed) for seed in (4, 5))
    total = x + plus if sums else x
    inputs = [each.float().requires_grad_() for each in (total, weight, bias)]
    factor = inputs[1] + how.offset
    if how.centred:
        expected = functional.layer_norm(inputs[0], (width,), factor, inputs[2], how.epsilon)
    else:
        expected = functional.rms_norm(inputs[0], (width,), factor, how.epsilon)
    outputs, grads = ([expected, inputs[0].clone()], [grad, of_total]) if sums else ([expected], [grad])
    trained = inputs if how.centred else inputs[:2]
    wanted = torch.autograd.grad(outputs, trained, [each.float() for each in grads])

    found, scales, of_sum = kernels.norm(x, weight, bias if how.centred else None, how, plus=plus if sums else None)
    back = kernels.norm_backward(
        grad, of_sum, weight, scales, how, has_bias=how.centred, of_total=of_total if sums else None
    )
    assert torch.equal(of_sum, total)
    for ours, theirs in zip((found, *back), (expected, *wanted), strict=False):
        assert ours is not None
        near = theirs.detach().to(dtype)
        torch.testing.assert_close(ours, near, rtol=BITS[dtype], atol=BITS[dtype] / 4 * float(near.abs().max()))
        assert ours.is_contiguous()
    assert (back[2] is None) != how.centred


def test_nan_passes_a_clamped_gate() -> None:
    both = torch.full((1, 4), float("nan"), device=DEVICE)
    for how in (Gate(Activation("silu"), limit=1.0), Gate(Activation("silu"), limit=1.0, clamps_after=True)):
        assert kernels.gate_halves(both, how).isnan().all()


@dtypes
def test_the_loss_is_that_of_torch(dtype: torch.dtype) -> None:
    logits = (4 * drawn(2, 5, 4100, dtype=dtype)).requires_grad_()
    labels = torch.tensor([[1, 4099, -100, 7, 0], [-100, 3, 2, 1, 4000]], device=DEVICE)
    expected = functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="none").view(2, 5)
    found = vocab_parallel_cross_entropy(logits, labels, None, 4100)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-5)
    weights = drawn(2, 5, dtype=torch.float32, seed=2)
    ours, theirs = (torch.autograd.grad((each * weights).sum(), logits)[0] for each in (found, expected))
    torch.testing.assert_close(ours, theirs, rtol=BITS[dtype], atol=1e-6)


def test_rows_of_minus_infinity_and_of_large_logits_have_a_sum() -> None:
    logits = torch.full((3, 5000), float("-inf"), device=DEVICE)
    logits[1, 4999], logits[2] = 30000.0, 30000.0
    largest, sums = of_loss.exponentials(logits)
    assert largest.tolist() == [float("-inf"), 30000.0, 30000.0]
    assert sums.tolist() == [0.0, 1.0, 5000.0]


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "gemma2", "gemma3_text", "olmo2", "glm4", "mixtral"])
def test_a_family_in_16_bits_computes_as_before(family: str) -> None:
    torch.manual_seed(0)
    plain = model_of(family).to(DEVICE, HALF)
    ids = torch.randint(0, plain.config.vocab_size, (2, 12), device=DEVICE)
    trained = list(plain.parameters())

    def step() -> list[Tensor]:
        loss = plain(input_ids=ids, labels=ids).loss
        return [
            loss.detach(),
            *(each for each in torch.autograd.grad(loss, trained, allow_unused=True) if each is not None),
        ]

    expected = step()
    fuse(plain, DEVICE)
    changed = [type(module).__name__ for module in plain.modules() if "forward" in vars(module)]
    assert any("MLP" in name or "Attention" in name for name in changed), changed
    for ours, theirs in zip(step(), expected, strict=True):
        scale = theirs.float().abs().max()
        torch.testing.assert_close(ours.float() / scale, theirs.float() / scale, rtol=0, atol=0.03)


def test_a_gate_is_found_by_what_its_code_computes() -> None:
    class Reversed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.activation, self.other = ACT2FN["silu"], nn.Tanh()

        def forward(self, x: Tensor, y: Tensor, *, twice: bool = False) -> Tensor:
            """Return a product, whichever side the activation is on."""
            product = y * self.activation(x) * self.other(x)
            return product + self.activation(y) * x if twice else product

    module = Reversed().to(DEVICE)
    x, y = (drawn(3, 8, dtype=HALF, seed=seed) for seed in (1, 2))
    expected = module(x, y, twice=True)
    fuse(module, DEVICE)
    assert "forward" in vars(module)
    torch.testing.assert_close(module(x, y, twice=True), expected, rtol=2**-7, atol=2**-7)
    with pytest.raises(TypeError) as raised:
        module(x, None)  # type: ignore[arg-type]
    lines = [entry.lineno for entry in raised.traceback]
    assert any(str(entry.path) == __file__ for entry in raised.traceback[1:]), lines
    assert all(a != b for a, b in pairwise(lines))


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("widths", [[48], [16, 1040], [32, 16, 64]], ids=str)
@pytest.mark.parametrize("form", ["rows", "transposed", "parts of rows", "given"])
def test_codes_in_fp8_are_those_of_torch_to_the_bit(form: str, widths: list[int], columns: bool) -> None:
    whole = drawn(37, 2 * sum(widths), dtype=torch.bfloat16) * torch.logspace(-30, 25, 37, device=DEVICE)[:, None]
    whole[5], whole[:, 3], whole[7, 11] = 0.0, 0.0, 1.75 * 2.0**60  # the largest that a power of two takes to 448
    matrices = list(whole.bfloat16()[:, : sum(widths)].split(widths, dim=1))
    if form == "rows":
        matrices = [matrix.contiguous() for matrix in matrices]
    if form == "transposed":
        matrices = [matrix.t().contiguous().t() for matrix in matrices]
    largest = 3 * e4m3.largest_of(matrices) if form == "given" else None
    found = e4m3.empty(matrices, columns)
    of_fp8.write_codes(matrices, largest, found)
    for ours, theirs in zip(found, e4m3.rounded(matrices, largest, columns), strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
    out = torch.empty_like(found[1])
    of_fp8.write_largest(matrices, out)
    assert torch.equal(out, e4m3.largest_of(matrices))


def test_rows_that_are_not_finite_have_no_scale_in_fp8() -> None:
    x = torch.ones(4, 16, device=DEVICE, dtype=torch.bfloat16)
    x[1, 3], x[2, 5] = float("inf"), float("nan")
    found = e4m3.empty([x], columns=True)
    of_fp8.write_codes([x], None, found)
    assert found[1].isnan().flatten().tolist() == [False, True, True, False]
    assert found[3].isnan().flatten().nonzero().flatten().tolist() == [3, 5]
