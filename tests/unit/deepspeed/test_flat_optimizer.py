"""Flat sums of gradients: written over once a step, in float32, on one rank unrounded, each parameter counted once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harness.deepspeed.flat_optimizer import FlatOptimizer
from harness.deepspeed.update import StagedEngine
from harness.schedules import ModelChunks
from tests.unit.deepspeed.pipelines import batches, pipeline, scheduled, weights

pytestmark = pytest.mark.usefixtures("one_rank")
ONE = ModelChunks(1)


def flat(engine: StagedEngine) -> FlatOptimizer:
    assert isinstance(engine.optimizer, FlatOptimizer)
    return engine.optimizer


def passes(engine: StagedEngine, gradients: list[Tensor]) -> nn.Parameter:
    """Have autograd compute gradients of a weight, one after the other, as in the micro-batches of a step."""
    weight = flat(engine).bf16_groups[0][0]
    flat(engine).forget_sums()
    for gradient in gradients:
        engine._running_engine_backward = True
        (weight.float() * gradient).sum().backward()
    return weight


@pytest.mark.parametrize("bf16", [True, False], ids=["bf16", "float32"])
def test_gradients_are_summed_in_float32_and_freed(bf16: bool) -> None:
    engine = scheduled("1f1b", ONE, 2, bf16=bf16, zero_stage=1)
    for step in range(2):  # the second begins anew, though nothing was set to zero
        gradients = [torch.full((3, 3), value) for value in (1.0 + step, 2**-10)]  # bf16 would lose the second
        weight = passes(engine, gradients)
        total = engine.gradients.found(weight)
        assert weight.grad is None and total is not None and total.dtype is torch.float32
        assert torch.equal(total, torch.full((3, 3), 1.0 + step + 2**-10))


class Operations(TorchDispatchMode):
    """Notes the operations that read or write as many elements as a weight has, without views of tensors."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.elements = elements
        self.noted: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id(x): x for x in tree_leaves(args) if isinstance(x, Tensor) and x.numel() == self.elements}
        result = func(*args, **(kwargs or {}))
        made = [x for x in tree_leaves(result) if isinstance(x, Tensor) and id(x) not in given]
        if given and not func.is_view:
            written = [x for x in tree_leaves(args[:1]) if func.overloadpacket.__name__.endswith("_")]
            bytes_ = sum(x.element_size() for x in (*given.values(), *made, *written))
            self.noted.append((func.overloadpacket.__name__, bytes_))
        return result


def test_a_later_gradient_costs_one_mixed_add() -> None:
    engine = scheduled("1f1b", ONE, 2, bf16=True)
    weight = passes(engine, [torch.ones(3, 3)])
    weight.grad = torch.ones(3, 3, dtype=torch.bfloat16)
    with Operations(weight.numel()) as operations:
        flat(engine)._add(0, 0, weight)
    assert operations.noted == [("add_", 2 + 4 + 4)]  # bytes an element: the gradient, and the sum twice
    flat(engine).forget_sums()
    weight.grad = torch.ones(3, 3, dtype=torch.bfloat16)
    with Operations(weight.numel()) as operations:
        flat(engine)._add(0, 0, weight)
    assert [name for name, _ in operations.noted] == ["copy_"]  # and nothing is set to zero


def test_nothing_is_rounded_or_reduced_on_one_rank() -> None:
    engine = scheduled("1f1b", ONE, 2, bf16=True)
    weight = passes(engine, [torch.full((3, 3), value) for value in (1.0, 2**-10)])
    engine.gradients.fill(engine.trained)
    engine._exec_reduce_grads()
    assert torch.equal(engine.gradients.of(weight), torch.full((3, 3), 1.0 + 2**-10))


def test_a_missing_gradient_is_zero_not_what_an_earlier_step_has_left() -> None:
    engine = scheduled("1f1b", ONE, 2, bf16=True)
    weight = passes(engine, [torch.ones(3, 3)])
    flat(engine).forget_sums()
    assert engine.gradients.found(weight) is None
    engine.gradients.fill(engine.trained)
    assert all(not engine.gradients.of(parameter).any() for parameter in engine.trained)


def test_float32_weights_of_zero_1_are_updated_where_they_lie() -> None:
    engine = scheduled("1f1b", ONE, 2, zero_stage=1)
    (masters,) = flat(engine).fp32_groups_flat_partition
    assert masters.data_ptr() == flat(engine).bf16_groups_flat[0].data_ptr() == engine.trained[0].data_ptr()
    plain = pipeline(2)
    for seed in range(2):
        assert torch.equal(engine.train_batch(batches(seed)), plain.train_batch(batches(seed)))
    assert all(map(torch.equal, weights(engine), weights(plain)))


def test_slices_that_count_in_the_norm_are_joined_and_others_left_out() -> None:
    engine = scheduled("1f1b", ONE, 2, bf16=True)
    everything, none = flat(engine).gradients_in_norm(0)
    elements = sum(parameter.numel() for parameter in engine.trained)
    assert [part.numel() for part in everything] == [elements] and none == []
    engine.trained[2].ds_pipe_replicated = True  # type: ignore[attr-defined]  # DeepSpeed's mark of a tied weight
    parts = [part.numel() for part in flat(engine).gradients_in_norm(0)[0]]
    assert len(parts) == 2 and sum(parts) == elements - engine.trained[2].numel()
    engine.trained[5].tensor_model_parallel = True  # type: ignore[attr-defined]  # a shard
    assert [part.numel() for part in flat(engine).gradients_in_norm(1)[0]] == [engine.trained[5].numel()]


def test_a_gradient_after_its_reduction_is_an_error_and_not_a_wrong_number() -> None:
    engine = scheduled("1f1b", ONE, 2, bf16=True)
    passes(engine, [torch.ones(3, 3)])
    flat(engine).start_mean(0)()
    with pytest.raises(RuntimeError, match="overlap_comm to false"):
        (flat(engine).bf16_groups[0][0].float()).sum().backward()


def test_a_gradient_that_is_not_finite_changes_no_weight() -> None:
    engine = scheduled("1f1b", ONE, 2, bf16=True)
    before = weights(engine)
    broken = ((inputs * float("nan"), labels) for inputs, labels in batches(0, torch.bfloat16))
    engine.train_batch(broken)
    assert all(map(torch.equal, weights(engine), before)) and not engine.was_step_applied()
    engine.train_batch(batches(0, torch.bfloat16))
    assert not all(map(torch.equal, weights(engine), before)) and engine.was_step_applied()
