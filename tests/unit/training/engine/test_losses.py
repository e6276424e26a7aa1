"""Losses of micro-batches, weighted, are the mean over all that counts in the global batch, however it is spread."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss

from harness import UserError
from harness.training.engine.losses import (
    CausalLoss,
    GuardedLoss,
    LogitsLoss,
    Loss,
    MeanLoss,
    RouterLoss,
    logits_loss,
    losses_by_source,
    reporting_sources,
    targets,
)

VOCABULARY, LENGTH = 7, 5


def batch() -> tuple[Tensor, Tensor]:
    """Logits and labels of six samples, some of whose labels do not count, of one sample none."""
    torch.manual_seed(0)
    logits, labels = torch.randn(6, LENGTH, VOCABULARY), torch.randint(VOCABULARY, (6, LENGTH))
    labels[0, :3] = labels[2, 4] = -100
    labels[3] = -100
    return logits, labels


def whole(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean over all labels that are predicted and valid."""
    return cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1))


def spread(loss: Loss, outputs: Any, labels: Tensor, sizes: list[int]) -> Tensor:
    """The sum over micro-batches of these sizes, weighted by what counts in all of them."""
    total = sum(loss.count(part, len(part)) for part in labels.split(sizes))
    parts = zip(outputs.split(sizes), labels.split(sizes), strict=True)
    # each has outputs of its own, over which a backward writes their gradient
    return torch.stack([loss(out.clone(), targets(part, 1 / total, len(part))) for out, part in parts]).sum()


@pytest.mark.parametrize("sizes", [[6], [2, 2, 2], [1, 5], [3, 1, 2]])
def test_a_causal_loss_is_the_mean_over_valid_labels_in_any_micro_batches(sizes: list[int]) -> None:
    logits, labels = batch()
    given, plain = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    found, wanted = spread(CausalLoss(VOCABULARY, None), given, labels, sizes), whole(plain, labels)
    assert found.item() == pytest.approx(wanted.item(), rel=1e-6)
    found.backward()
    wanted.backward()
    torch.testing.assert_close(given.grad, plain.grad, rtol=1e-5, atol=1e-7)


def test_labels_count_that_are_predicted_and_valid_in_rows_that_count() -> None:
    _, labels = batch()
    loss = CausalLoss(VOCABULARY, None)
    assert loss.count(labels, 6) == 6 * (LENGTH - 1) - 2 - 1 - (LENGTH - 1)
    assert loss.count(labels, 1) == LENGTH - 1 - 2
    assert loss.units(labels) == loss.units((labels, labels)) == 6 * LENGTH
    assert loss.parts(None) == {}


def test_a_router_loss_is_added_by_the_share_of_its_micro_batch() -> None:
    logits, labels = batch()
    causal, router = CausalLoss(VOCABULARY, None), torch.tensor(3.0, dtype=torch.bfloat16)
    loss = RouterLoss(causal, 0.5)
    given = targets(labels, 0.25, 6, 0.5)
    assert loss((logits.clone(), router), given).item() == pytest.approx(
        causal(logits.clone(), given).item() + 0.5 * 3.0 * 0.5, rel=1e-6
    )
    assert loss.count(labels, 6) == causal.count(labels, 6) and loss.units(labels) == causal.units(labels)
    (reported,) = loss.parts((logits, router)).items()
    assert reported[0] == loss.reports[0] == "aux_loss"
    assert reported[1].dtype == torch.float32 and reported[1].item() == 3.0


@pytest.mark.parametrize("sizes", [[6], [2, 4], [1, 1, 4]])
def test_a_mean_of_samples_is_the_same_in_any_micro_batches(sizes: list[int]) -> None:
    torch.manual_seed(0)
    outputs, labels = torch.randn(6, 3, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)
    found = spread(MeanLoss(mse_loss), outputs, labels, sizes)
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(mse_loss(outputs, labels).item(), rel=1e-6)


def test_rows_that_fill_the_shape_of_an_evaluation_do_not_count() -> None:
    outputs, labels = torch.tensor([[1.0], [2.0], [99.0]]), torch.zeros(3, 1)
    loss = MeanLoss(mse_loss)
    with torch.no_grad():
        assert loss(outputs, targets(labels, 0.5, 2)).item() == (1.0 + 4.0) / 2 * 2 * 0.5
        assert loss(outputs, targets(labels, 0.5, 0)).item() == 0.0
    assert loss.count(labels, 2) == 2 and loss.units((outputs, labels)) == 3


def test_a_loss_of_several_outputs_and_labels_gets_tuples() -> None:
    def both(outputs: tuple[Tensor, Tensor], labels: tuple[Tensor, Tensor]) -> Tensor:
        return sum((mse_loss(a, b) for a, b in zip(outputs, labels, strict=True)), torch.zeros(()))

    outputs = (torch.ones(2, 1), torch.ones(2, 4) * 3)
    labels = (torch.zeros(2, 1), torch.ones(2, 4))
    assert MeanLoss(both)(outputs, targets(labels, 0.5, 2)).item() == 1.0 + 4.0


def summed(logits: Tensor, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
    flat = logits[:, :-1].reshape(-1, VOCABULARY)
    return cross_entropy(flat, labels[:, 1:].reshape(-1), reduction="sum") / num_items_in_batch


@pytest.mark.parametrize("sizes", [[6], [2, 4], [3, 3]])
def test_a_users_sum_over_labels_is_divided_by_all_of_the_global_batch(sizes: list[int]) -> None:
    logits, labels = batch()
    loss = LogitsLoss(summed)
    assert loss.per_label and loss.count(labels, 6) == CausalLoss(VOCABULARY, None).count(labels, 6)
    assert spread(loss, logits, labels, sizes).item() == pytest.approx(whole(logits, labels).item(), rel=1e-6)


@pytest.mark.parametrize("sizes", [[6], [2, 4], [3, 3]])
def test_the_loss_of_a_source_is_the_mean_over_its_labels_however_they_are_spread(sizes: list[int]) -> None:
    logits, labels = batch()
    loss, sources = reporting_sources(CausalLoss(VOCABULARY, None), ["a", "none", "b"]), [0, 2, 2, 0, 0, 2]
    guarded = GuardedLoss(loss, spoils=False)
    assert set(guarded.reported.values()) == {None}
    means: dict[str, float] = {}
    for logits_part, labels_part, of_rows in zip(
        logits.split(sizes), labels.split(sizes), torch.tensor(sources).split(sizes), strict=True
    ):
        guarded(logits_part, targets(labels_part, 1.0, len(labels_part), sources=of_rows.tolist()))
        for name, value in guarded.reported.items():
            assert value is not None
            means[name] = means.get(name, 0.0) + value.item() / len(sizes)
    by_source = losses_by_source(loss)
    assert by_source is not None
    found = by_source.means(means)
    assert found.keys() == {"a", "b"}
    for name, rows in (("a", [0, 3, 4]), ("b", [1, 2, 5])):
        assert found[name] == pytest.approx(whole(logits[rows], labels[rows]).item(), rel=1e-6)
    guarded(logits, targets(labels, 1.0, 6))  # as in an evaluation
    assert [value.item() for value in guarded.reported.values() if value is not None] == [0.0] * 6


def test_a_users_mean_over_samples_counts_samples() -> None:
    logits, labels = batch()
    loss = LogitsLoss(lambda logits, labels: logits.mean() + 0 * labels.sum())
    assert not loss.per_label and loss.count(labels, 6) == 6 and loss.units(labels) == 6 * LENGTH
    assert spread(loss, logits, labels, [2, 2, 2]).item() == pytest.approx(logits.mean().item(), rel=1e-5)


def test_huggingfaces_name_gets_an_output_object() -> None:
    logits, labels = batch()
    loss = logits_loss(
        None, lambda outputs, labels, num_items_in_batch: summed(outputs.logits, labels, num_items_in_batch)
    )
    assert loss is not None
    assert spread(loss, logits, labels, [6]).item() == pytest.approx(whole(logits, labels).item(), rel=1e-6)
    assert logits_loss(None, None) is None
    with pytest.raises(UserError, match="both given"):
        logits_loss(mse_loss, mse_loss)


@pytest.mark.parametrize(("value", "kind"), [(torch.ones(2), r"a tensor of shape \(2,\)"), (1.0, "float")])
def test_a_loss_that_is_not_one_number_is_refused(value: Any, kind: str) -> None:
    logits, labels = batch()
    with pytest.raises(UserError, match=f"loss_fn returned {kind}"):
        LogitsLoss(lambda logits, labels, num_items_in_batch: value)(logits, targets(labels, 1.0, 6))


def test_smoothed_labels_are_those_of_huggingface() -> None:
    smoother = pytest.importorskip("transformers.trainer_pt_utils").LabelSmoother(epsilon=0.3)
    logits = torch.randn(3, 5, 11, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(15).reshape(3, 5) % 11
    labels[0, 3:] = -100
    loss = logits_loss(None, None, 0.3)
    assert loss is not None
    count = loss.count(labels, 3)
    assert count == 10
    assert float(loss(logits, targets(labels, 1 / count, 3))) == pytest.approx(
        float(smoother({"logits": logits}, labels, shift_labels=True))
    )


def test_a_loss_of_ones_own_is_not_smoothed_in_silence() -> None:
    with pytest.raises(UserError, match="--label_smoothing_factor has no effect on a loss of your own"):
        logits_loss(mse_loss, None, 0.1)
