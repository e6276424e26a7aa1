"""Single operations of a decoder layer at real shapes, in several programs: device time, and time of the host.

Each is timed by events around it, after a write that empties the device's cache; the median counts. The host's time is
how long Python takes to launch it while the device is not waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from harness.extras.fp8.operations import round_rows, round_rows_and_columns
from harness.extras.fp8.product import on_device
from harness.extras.fusing.fused import fuse
from harness.parallel.tensor.cross_entropy import vocab_parallel_cross_entropy

CACHE_BYTES = 1 << 28
"""Written before each measurement: more than any device's cache."""
HEADS = {"head 64": (32, 8, 64), "head 128": (32, 8, 128)}
"""Heads of queries, heads of keys, and their width."""
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
}


class Watch:
    """Times operations on a device; without a GPU by the host's clock."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device, self.repeats = device, repeats
        size = CACHE_BYTES if device.type == "cuda" else 1
        self._cache = torch.empty(size, dtype=torch.uint8, device=device)

    def microseconds(self, operation: Callable[[], object]) -> float:
        """Return the median device time of an operation."""
        for _ in range(3):
            operation()
        if self.device.type != "cuda":
            return median(self._host(operation) for _ in range(self.repeats))
        pairs = []
        for _ in range(self.repeats):
            self._cache.zero_()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            operation()
            end.record()
            pairs.append((begin, end))
        torch.cuda.synchronize()
        return median(1000 * begin.elapsed_time(end) for begin, end in pairs)

    def host_microseconds(self, operation: Callable[[], object]) -> float:
        """Return the median time that the host takes to launch an operation."""
        found = []
        for _ in range(self.repeats):
            found.append(self._host(operation))
            torch.accelerator.synchronize() if self.device.type != "cpu" else None
        return median(found)

    @staticmethod
    def _host(operation: Callable[[], object]) -> float:
        begun = time.perf_counter()
        operation()
        return 1e6 * (time.perf_counter() - begun)

    def both_ways(self, forward: Callable[..., Tensor], *inputs: Tensor) -> dict[str, float | str]:
        """Return the device time of a function of tensors, and of its backward pass; or its error."""
        leaves = [each.detach().requires_grad_(each.is_floating_point()) for each in inputs]
        try:
            out = forward(*leaves)
            grad = torch.randn_like(out)
            wanted = [each for each in leaves if each.requires_grad]
            backward = partial(torch.autograd.grad, out, wanted, grad, retain_graph=True)
            return {"forward": self.microseconds(partial(forward, *leaves)), "backward": self.microseconds(backward)}
        except Exception as error:
            return {"failed": f"{type(error).__name__}: {error}".splitlines()[0]}


def operations(work: Any, *, small: bool) -> dict[str, Any]:
    """Return microseconds of the operations of `work`'s shapes, by kind and program."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    watch = Watch(device, 3 if small else 15)
    found: dict[str, Any] = {}
    for kind, measure in (
        ("products", products),
        ("attention", attention),
        ("update", update),
        ("layer", layer),
        ("loss", loss),
    ):
        try:
            found[kind] = measure(watch, work)
        except Exception as error:
            found[kind] = f"failed: {type(error).__name__}: {error}".splitlines()[0]
    return found


def products(watch: Watch, work: Any) -> dict[str, Any]:
    """Time the linear layers forward, in bf16 and in fp8 by rows, and their two products backward."""
    shape, tokens = work.shape, work.samples * work.length
    hidden, wide = shape["hidden_size"], shape["intermediate_size"]
    keys = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]
    found = {}
    for name, (inner, outer) in {
        "query": (hidden, hidden),
        "key": (hidden, keys),
        "up": (hidden, wide),
        "down": (wide, hidden),
        "head": (hidden, shape["vocab_size"]),
    }.items():
        x, weight = _drawn(watch, tokens, inner), _drawn(watch, outer, inner)
        row = watch.both_ways(functional.linear, x, weight)
        row["teraflop"] = 2 * tokens * inner * outer / 1e12
        if watch.device.type == "cuda" and torch.cuda.get_device_capability() >= (8, 9):
            a, b = round_rows([x]), round_rows([weight])
            row["fp8 product"] = watch.microseconds(partial(on_device, a, b, torch.bfloat16))
            row["fp8 rounding by rows and columns"] = watch.microseconds(partial(round_rows_and_columns, [x]))
        found[name] = row
    return found


def attention(watch: Watch, work: Any) -> dict[str, Any]:
    """Time causal attention with grouped heads, by backend."""
    found: dict[str, Any] = {}
    for name, (queries, keys, width) in HEADS.items():
        sizes = [(work.samples, heads, work.length, width) for heads in (queries, keys, keys)]
        inputs = [_drawn(watch, *size) for size in sizes]
        for backend, kind in BACKENDS.items():

            def attend(q: Tensor, k: Tensor, v: Tensor, kind: SDPBackend = kind) -> Tensor:
                with sdpa_kernel(kind):
                    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

            found[f"{name}, {backend}"] = watch.both_ways(attend, *inputs)
            found[f"{name}, {backend}"] |= first_calls(watch, attend, inputs)
    return found


def first_calls(watch: Watch, attend: Callable[..., Tensor], inputs: Sequence[Tensor]) -> dict[str, float]:
    """Return how long forward and backward take with a length that is new, and with the same again."""

    def both(length: int) -> None:
        leaves = [each[:, :, :length].detach().requires_grad_() for each in inputs]
        attend(*leaves).sum().backward()
        if watch.device.type != "cpu":
            torch.accelerator.synchronize()

    longest, found = inputs[0].shape[2], {}
    with suppress(RuntimeError):
        both(longest // 2)
        for which in ("new length", "known length"):
            begun = time.perf_counter()
            both(longest - 8)
            found[which] = 1e6 * (time.perf_counter() - begun)
    return found


def update(watch: Watch, _work: Any) -> dict[str, Any]:
    """Time what is done with gradients, on 2^27 of them in 128 tensors."""
    each = 1 << (20 if watch.device.type == "cuda" else 10)
    sums = [torch.randn(each, device=watch.device) for _ in range(128)]
    grads = [one.bfloat16() for one in sums]
    optimizer = torch.optim.AdamW(sums, fused=watch.device.type == "cuda")
    for one in sums:
        one.grad = torch.randn_like(one)
    return {
        "parameters": 128 * each,
        "float32 += bf16": watch.microseconds(lambda: [a.add_(b) for a, b in zip(sums, grads, strict=True)]),
        "cast, then +=": watch.microseconds(lambda: [a.add_(b.float()) for a, b in zip(sums, grads, strict=True)]),
        "norm of all": watch.microseconds(lambda: torch.stack(torch._foreach_norm(sums)).norm()),  # noqa: SLF001
        "AdamW": watch.microseconds(optimizer.step),
    }


def layer(watch: Watch, work: Any) -> dict[str, Any]:
    """Time a whole decoder layer, and how long the host takes to launch it, as the harness can run it."""
    config = LlamaConfig(**{**work.shape, "num_hidden_layers": 1})
    config._attn_implementation = "sdpa"  # noqa: SLF001  # as from_config sets it
    places = torch.arange(work.length, device=watch.device)[None]
    x = _drawn(watch, work.samples, work.length, config.hidden_size)
    angles = LlamaRotaryEmbedding(config).to(watch.device)(x, places)
    found: dict[str, Any] = {}
    for name, change in _programs(watch.device):
        one = LlamaDecoderLayer(config, 0).to(watch.device, torch.bfloat16)
        change(one)
        inside = x.detach().requires_grad_()

        def forward(one: nn.Module = one, inside: Tensor = inside) -> Tensor:
            return one(inside, position_ids=places, position_embeddings=angles)

        def backward(forward: Callable[[], Tensor] = forward) -> None:
            forward().backward(x)

        both, ahead = watch.microseconds(backward), watch.microseconds(forward)
        found[name] = {
            "forward": ahead,
            "forward and backward": both,
            "forward, host": watch.host_microseconds(forward),
            "both, host": watch.host_microseconds(backward),
        }
    return found


def _programs(device: torch.device) -> Iterator[tuple[str, Callable[[nn.Module], object]]]:
    yield "transformers", lambda _module: None
    yield "fused", partial(fuse, device=device)
    if device.type == "cuda":
        yield "compiled", lambda module: module.compile()


def loss(watch: Watch, work: Any) -> Mapping[str, Any]:
    """Time the loss over the vocabulary: torch's in float32, and the harness's."""
    words, tokens = work.shape["vocab_size"], work.samples * work.length
    logits = _drawn(watch, tokens, words)
    labels = torch.randint(words, (tokens,), device=watch.device)

    def of_torch(x: Tensor) -> Tensor:
        return functional.cross_entropy(x.float(), labels)

    def ours(x: Tensor) -> Tensor:
        return vocab_parallel_cross_entropy(x.clone(), labels, None, words).mean()

    return {"torch": watch.both_ways(of_torch, logits), "harness, with a copy": watch.both_ways(ours, logits)}


def _drawn(watch: Watch, *shape: int) -> Tensor:
    return torch.randn(shape, device=watch.device, dtype=torch.bfloat16) * 0.02
