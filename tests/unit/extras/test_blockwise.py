"""Optimizers of bitsandbytes: its own numbers to the bit, however ZeRO and tensor parallelism cut a parameter."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial, partialmethod
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.deepspeed.flat_tensors import FlatPartition, UpdatedTensor, WholeParameter
from harness.deepspeed.optimizer_states import counters_of, make_state, template
from harness.errors import UserError
from harness.extras.blockwise import optimizer as blockwise
from harness.extras.blockwise.optimizer import BlockwiseOptimizer
from harness.optimizers import FLAGS, OPTIMIZERS
from harness.parallel.tensor.shard import mark, share_of
from harness.preflight import require_package
from tests.support.threads import run_threads

bitsandbytes = pytest.importorskip("bitsandbytes")

KINDS = [name for name, record in OPTIMIZERS.items() if record.package == "bitsandbytes"]
OPTIONS = {"lr": 0.01, "betas": [0.8, 0.9], "weight_decay": 0.1, "min_8bit_size": 500}
OTHERS: dict[str, dict[str, object]] = {
    "AdEMAMix": {"betas": [0.8, 0.9, 0.95], "alpha": 2.0},
    "RMSprop": {"alpha": 0.8},
}
"""Options of the optimizers whose names contain these, instead of betas."""
SHAPES = {"wide": (24, 48), "small": (7,), "tall": (60, 28), "square": (16, 32)}
"""Blocks have parts of rows, and two matrices end within a block. Sizes are multiples of 16: torch rounds the elements
after the last 16 of a tensor otherwise."""
CPU = torch.device("cpu")
STEPS, SAVED_AT = 4, 2


@pytest.fixture(autouse=True)
def _one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ranks are threads here, but bitsandbytes is not thread-safe on a CPU: one of 100 calls rounds otherwise.

    It compiles its steps, too, and while a thread compiles, others run eagerly, which rounds otherwise.
    """
    lock = threading.RLock()

    def alone(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with lock:
            return function(*args, **kwargs)

    for owner, name in ((BlockwiseOptimizer, "_by_library"), (BlockwiseOptimizer, "_update_cut")):
        monkeypatch.setattr(owner, name, partialmethod(partial(alone, getattr(owner, name))))
    monkeypatch.setattr(blockwise, "quantize_blockwise", partial(alone, blockwise.quantize_blockwise))
    with torch.compiler.set_stance("force_eager"):
        yield


def options_of(kind: str) -> dict[str, object]:
    changes = next((changes for name, changes in OTHERS.items() if name in kind), None)
    return OPTIONS if changes is None else {k: v for k, v in OPTIONS.items() if k != "betas"} | changes


def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)  # ranks are threads, which share torch's own
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def gradients(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step + 1)
    return {
        name: torch.randn(shape, generator=generator) * torch.rand(shape, generator=generator) ** 4
        for name, shape in SHAPES.items()
    }


class Whole:
    """One process."""

    tensor_group = None

    def __init__(self) -> None:
        self.names = {nn.Parameter(value): name for name, value in weights().items()}
        self.updated: list[UpdatedTensor] = [WholeParameter(parameter) for parameter in self.names]

    def set(self, values: dict[str, Tensor]) -> None:
        for parameter, name in self.names.items():
            parameter.grad = values[name]

    def parts(self, values: dict[str, Tensor]) -> list[Tensor]:
        """Those elements of whole tensors that this rank has, for each tensor that is updated."""
        return [values[name] for name in self.names.values()]


class Split(Whole):
    """A tensor-parallel rank: the first matrix is cut in its columns, the others in rows, the vector not at all."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        self.shards = {
            name: share_of(shape, int(name == "wide"), rank, ranks) for name, shape in SHAPES.items() if len(shape) > 1
        }
        self.names = {}
        for name, value in weights().items():
            shard = self.shards.get(name)
            local = nn.Parameter(value if shard is None else shard.take(value))
            self.names[mark(local, shard)] = name
        self.updated = [WholeParameter(parameter) for parameter in self.names]
        self.tensor_group = dist.group.WORLD

    def set(self, values: dict[str, Tensor]) -> None:
        for parameter, part in zip(self.names, self.parts(values), strict=True):
            parameter.grad = part

    def parts(self, values: dict[str, Tensor]) -> list[Tensor]:
        return [self.shards[n].take(values[n]) if n in self.shards else values[n] for n in self.names.values()]


class Flat(Whole):
    """A data-parallel rank with its part of one flat tensor, which begins and ends anywhere in a parameter."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        self.rank, self.ranks = rank, ranks
        offsets = [sum(p.numel() for p in list(self.names)[:at]) for at in range(len(self.names))]
        (part,) = self.parts(weights())
        assert dist.group.WORLD is not None
        self.updated = [FlatPartition(part.clone(), list(self.names), offsets, dist.group.WORLD)]

    def set(self, values: dict[str, Tensor]) -> None:
        (part,) = self.parts(values)
        self.updated[0].tensor.grad = part

    def parts(self, values: dict[str, Tensor]) -> list[Tensor]:
        flat = torch.cat([values[name].reshape(-1) for name in self.names.values()])
        size = -(-len(flat) // self.ranks)
        return [nn.functional.pad(flat, (0, size * self.ranks - len(flat)))[self.rank * size :][:size].clone()]


LAYOUTS = {"one process": lambda _rank, _ranks: Whole(), "tensor": Split, "data": Flat}


def trained(
    kind: str, layout: str, saved: dict[str, dict[str, Tensor]] | None, wanted: dict[str, Tensor], ranks: int, rank: int
) -> Any:
    """Train, or go on from what a run has saved, in whole tensors; return how far this rank's weights are off."""
    of_rank = LAYOUTS[layout](rank, ranks)
    make: Callable[..., BlockwiseOptimizer] = resolve_name(OPTIMIZERS[kind].made_by)
    optimizer = make([{"params": [each.tensor for each in of_rank.updated]}], options_of(kind), of_rank.names)
    optimizer.find_blocks(of_rank.updated, of_rank.tensor_group, CPU)
    begin = 0
    if saved is not None:
        begin = SAVED_AT
        for each, part in zip(of_rank.updated, of_rank.parts(saved["weights"]), strict=True):
            with torch.no_grad():
                each.tensor.copy_(part)
            make_state(optimizer, each, template(optimizer, each), {"step": SAVED_AT})
        for name in template(optimizer, of_rank.updated[0]).elements:
            for each, part in zip(of_rank.updated, of_rank.parts(saved[name]), strict=True):
                optimizer.state[each.tensor][name].copy_(part)
    kept: dict[str, dict[str, Tensor]] = {}
    for step in range(begin, STEPS):
        of_rank.set(gradients(step))
        optimizer.step()
        if step + 1 == SAVED_AT and layout == "one process":
            assert counters_of(optimizer, of_rank.updated[0], template(optimizer, of_rank.updated[0])) == {"step": 2}
            kept = {name: {} for name in ("weights", *template(optimizer, of_rank.updated[0]).elements)}
            for each, name in zip(of_rank.updated, of_rank.names.values(), strict=True):
                kept["weights"][name] = each.tensor.detach().clone()
                for state in kept.keys() - {"weights"}:
                    kept[state][name] = optimizer.state[each.tensor][state]
    parts = zip(of_rank.updated, of_rank.parts(wanted), strict=True)
    off = [not torch.equal(each.tensor, part) for each, part in parts]
    return kept, any(off)


@pytest.mark.parametrize("kind", KINDS)
def test_every_layout_has_bitsandbytes_own_numbers_and_goes_on_from_another_to_the_bit(kind: str) -> None:
    parameters = {name: nn.Parameter(value) for name, value in weights().items()}
    theirs = getattr(bitsandbytes.optim, kind)(list(parameters.values()), **options_of(kind))
    for step in range(STEPS):
        for name, gradient in gradients(step).items():
            parameters[name].grad = gradient
        theirs.step()
    wanted = {name: parameter.detach() for name, parameter in parameters.items()}
    ((saved, off),) = run_threads(1, partial(trained, kind, "one process", None, wanted, 1))
    assert not off
    for layout, ranks in (("one process", 1), ("tensor", 2), ("data", 5)):
        for begun in (None, saved) if ranks > 1 else (saved,):
            found = run_threads(ranks, partial(trained, kind, layout, begun, wanted, ranks))
            assert [off for _, off in found] == [False] * ranks, (layout, begun is None)


def test_a_device_or_an_option_that_bitsandbytes_does_not_have_is_one_line() -> None:
    make = resolve_name(OPTIMIZERS["AdamW8bit"].made_by)
    with pytest.raises(UserError, match=r"^optimizer AdamW8bit: bitsandbytes has none on meta: use another optimizer$"):
        make([{"params": [nn.Parameter(torch.zeros(2, device="meta"))]}], {}, {})
    with pytest.raises(UserError, match=r"^optimizer AdamW8bit: AdamW8bit does not support amsgrad=True$"):
        make([{"params": [nn.Parameter(torch.zeros(2))]}], {"amsgrad": True}, {})


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("RMSprop8bit", {"momentum": 0.9}, "bitsandbytes has no momentum, and would ignore it: remove it"),
        ("RMSprop8bit", {"centered": True}, "Centered RMSprop is not supported!"),
        ("AdEMAMix8bit", {"t_beta3": 10}, "t_beta3 is not supported: remove it"),
        ("AdEMAMix8bit", {"betas": [0.9]}, "betas are two or three numbers, not 1"),
    ],
)
def test_what_these_optimizers_lack_is_one_line(kind: str, options: dict[str, object], said: str) -> None:
    make = resolve_name(OPTIMIZERS[kind].made_by)
    with pytest.raises(UserError, match=f"^optimizer {kind}: {said}$"):
        make([{"params": [nn.Parameter(torch.zeros(2))]}], options, {})


def test_the_third_beta_of_ademamix_is_that_of_huggingfaces_trainer() -> None:
    make = resolve_name(OPTIMIZERS["AdEMAMix"].made_by)
    optimizer = make([{"params": [nn.Parameter(torch.zeros(2))]}], {"betas": [0.8, 0.95]}, {})
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.95, 0.9999)


def test_a_run_without_bitsandbytes_is_refused_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    require_package("AdamW8bit")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    require_package("AdamW")
    with pytest.raises(UserError, match=r"^optimizer AdamW8bit needs bitsandbytes, which is not installed: pip"):
        require_package("AdamW8bit")


def test_huggingfaces_names_mean_these_optimizers() -> None:
    named = {flag: record.name for flag, record in FLAGS.items() if record.package == "bitsandbytes"}
    assert named == {
        "adamw_8bit": "AdamW8bit",
        "adamw_bnb_8bit": "AdamW8bit",
        "ademamix": "AdEMAMix",
        "ademamix_8bit": "AdEMAMix8bit",
        "lion_8bit": "Lion8bit",
        "paged_adamw_32bit": "PagedAdamW32bit",
        "paged_adamw_8bit": "PagedAdamW8bit",
        "paged_ademamix_32bit": "PagedAdEMAMix",
        "paged_ademamix_8bit": "PagedAdEMAMix8bit",
        "paged_lion_32bit": "PagedLion32bit",
        "paged_lion_8bit": "PagedLion8bit",
        "rmsprop_bnb": "RMSprop32bit",
        "rmsprop_bnb_32bit": "RMSprop32bit",
        "rmsprop_bnb_8bit": "RMSprop8bit",
    }
