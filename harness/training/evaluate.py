"""Evaluate, or predict, over a data set in chunks, so that memory does not grow with the number of samples."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch.distributed as dist

from harness.arguments.themes.training import ROUTER_BATCH
from harness.batches.collate import AnyDataset, Collator, MapDataset
from harness.batches.evaluation import (
    EvaluationData,
    by_prefix,
    evaluation_batches,
    evaluation_digest,
    evaluation_steps,
)
from harness.batches.given import as_dataset, read_all, require_dataset
from harness.batches.order import SeveralSources
from harness.batches.padding import at_longest
from harness.batches.same_data import require_same_data
from harness.batches.stream import dataset_length
from harness.config.values.json_object import JsonObject
from harness.errors import UserError
from harness.resilience.process import signals
from harness.resilience.process.activity import Phase, beat, inside
from harness.topology.agreement import any_rank, broadcast_object, host_group, require_alike
from harness.training.engine.engine import Engine, EvaluationTotals
from harness.training.engine.losses import Labels, Outputs, RouterLoss
from harness.training.engine.outputs import KeptOutputs
from harness.training.parts.data import require_samples_of
from harness.training.prepare.run import Run

if TYPE_CHECKING:
    from transformers.trainer_utils import EvalPrediction, PredictionOutput

# Micro-batches read and evaluated at a time. Signals are checked between chunks, and outputs gathered.
CHUNK = 16


def batch_size(run: Run) -> int:
    """Return the number of samples in an evaluation's micro-batch."""
    # A router loss depends on which samples share a micro-batch, so its default must not depend on the layout.
    usual = ROUTER_BATCH if isinstance(run.trainable.loss, RouterLoss) else run.spec.resolved.micro_batch
    return run.spec.args.per_device_eval_batch_size or usual


def evaluation_data(run: Run, given: AnyDataset | Mapping[str, AnyDataset] | None = None) -> EvaluationData:
    """Return the data to evaluate: `given`, or the run's own; all ranks call it.

    New data, given here or set as `trainer.eval_dataset`, is tokenised and checked first.

    Raises:
        UserError: new data cannot be used, or differs between ranks.
    """
    # Asked of all ranks: on some of them a callback may have set new data, which all then check together.
    if given is None and not any_rank(run.evaluation_is_new):
        return run.data.evaluation
    data: EvaluationData
    if isinstance(new := run.data.evaluation if given is None else given, Mapping):
        data = {name: tokens_of_new(run, each, "eval_dataset") for name, each in new.items()}
    else:
        data = None if new is None else tokens_of_new(run, new, "eval_dataset")
    _check(run, data)
    if given is None:
        run.set_evaluation(data, is_new=False)
    return data


def _check(run: Run, data: EvaluationData) -> None:
    require_alike({"evaluation data": evaluation_digest(data)})
    for each in by_prefix(data).values():
        run.data_check.first_batch(each, batch_size(run))


def evaluation_metrics(run: Run, dataset: AnyDataset, prefix: str = "eval") -> JsonObject:
    """Return eval_loss, perplexity, eval_samples, eval_seconds and the user's metrics; all ranks call it.

    Args:
        dataset: a data set of `evaluation_data`.
        prefix: replaces `eval` in the names.
    """
    inputs = run.spec.inputs
    kept = None if inputs.compute_metrics is None else KeptOutputs(run.engine, inputs.preprocess_logits_for_metrics)
    return _evaluated(run, read_all(dataset, "eval_dataset"), prefix, kept)


def predict(run: Run, dataset: AnyDataset, prefix: str) -> PredictionOutput:
    """Return predictions, labels and metrics of all samples, on all ranks; all ranks call it.

    Raises UserError if the data cannot be used, or differs between ranks.
    """
    from transformers.trainer_utils import PredictionOutput

    kept = KeptOutputs(run.engine, run.spec.inputs.preprocess_logits_for_metrics, everywhere=True)
    data = tokens_of_new(run, dataset, "test_dataset")
    _check(run, data)
    metrics = _evaluated(run, data, prefix, kept)
    predictions, labels = kept.joined()
    return PredictionOutput(predictions=predictions, label_ids=labels, metrics=metrics)


def computed_metrics(
    compute: Callable[[EvalPrediction], Mapping[str, object]], predictions: Outputs, labels: Labels, prefix: str
) -> JsonObject:
    """Compute the user's metrics on rank 0 and return them on all ranks, with prefixed names.

    All ranks call it. An exception on rank 0 is raised there; the others raise UserError.
    """
    from transformers.trainer_utils import EvalPrediction, denumpify_detensorize

    sent: list[JsonObject | None] = [None]
    try:
        # On all ranks, so that the watchdog does not take the ranks that wait for rank 0 as hanging.
        with inside("compute_metrics"):
            if dist.get_rank() == 0:
                found: object = compute(EvalPrediction(predictions=predictions, label_ids=labels))
                if not isinstance(found, Mapping):
                    kind = type(found).__name__
                    raise UserError(f"compute_metrics returned {kind}: it must return a dict of numbers by name")
                named = {str(name): value for name, value in denumpify_detensorize(dict(found)).items()}
                start = f"{prefix}_"
                sent = [{name if name.startswith(start) else start + name: value for name, value in named.items()}]
    # Even after an exception, as the other ranks wait in this broadcast.
    finally:
        dist.broadcast_object_list(sent, src=0, group=host_group())
    if sent[0] is None:
        raise UserError("compute_metrics failed on rank 0")
    return sent[0]


def tokens_of_new(run: Run, dataset: AnyDataset, name: str) -> MapDataset:
    """Check and tokenise a new data set. Raises UserError if it cannot be used."""
    spec = run.spec
    request = spec.inputs.data_request(spec.args, spec.config, spec.source)
    require_dataset(name, dataset)
    data = read_all(as_dataset(dataset), name)
    if spec.parts.data is None:
        return require_samples_of(data, name, request.source)
    return spec.parts.data.later_dataset(data, name, run.data.tokenizer, request)


def _evaluated(run: Run, dataset: MapDataset, prefix: str, kept: KeptOutputs | None) -> JsonObject:
    micro_batch = batch_size(run)
    start_time = time.perf_counter()
    with kept or nullcontext():
        totals, of_sources = _losses(run, dataset, micro_batch, kept)
    found = {}
    if kept is not None and run.spec.inputs.compute_metrics is not None:
        found = computed_metrics(run.spec.inputs.compute_metrics, *kept.joined(), prefix)
    count = dataset_length(dataset)
    seconds = time.perf_counter() - start_time
    layout = run.groups.layout
    perplexity = "perplexity" if prefix == "eval" else f"{prefix}_perplexity"
    of_run = run.engine.loss.loss
    loss = _mean(run.engine, totals)
    has_perplexity = run.trainable.reads_tokens and of_run.is_cross_entropy
    metrics = {
        f"{prefix}_loss": loss,
        **{f"{prefix}_{name}_loss": value for name, value in of_sources.items()},
        # exp() overflows above 709: an evaluation of a diverged model must not raise.
        **({perplexity: math.exp(min(loss, 700.0))} if has_perplexity else {}),
        **{f"{prefix}_{name}": value for name, value in of_run.metrics(totals.parts).items()},
        **found,
        f"{prefix}_samples": count,
        f"{prefix}_seconds": seconds,
        # HuggingFace's name for it.
        f"{prefix}_runtime": seconds,
        f"{prefix}_samples_per_second": count / seconds,
        f"{prefix}_steps_per_second": evaluation_steps(count, micro_batch, layout.batch_ranks) / seconds,
    }
    # Sums over different groups may differ in the last bit, and ranks must agree on which evaluation is the best.
    return broadcast_object(metrics)


def _losses(
    run: Run, dataset: MapDataset, micro_batch: int, kept: KeptOutputs | None
) -> tuple[EvaluationTotals, dict[str, float]]:
    """Return the sums over all samples, and the mean loss of each source if there are several."""
    engine = run.engine
    collator = run.data_check.collator
    # Evaluating source by source would change the micro-batches, hence a router loss, and the order of the outputs.
    together = engine.has_router_loss or kept is not None
    parts = dataset.by_source() if isinstance(dataset, SeveralSources) and not together else {}
    if not parts:
        return _totals(engine, dataset, micro_batch, collator, kept), {}
    sums = {name: _totals(engine, part, micro_batch, collator, None) for name, part in parts.items()}
    return sum(sums.values(), EvaluationTotals()), {name: _mean(engine, each) for name, each in sums.items()}


def _mean(engine: Engine, totals: EvaluationTotals) -> float:
    return engine.loss.loss.mean(totals.loss, totals.counted, totals.parts)


def mean_loss(
    engine: Engine, dataset: MapDataset, micro_batch: int, collator: Collator, kept: KeptOutputs | None = None
) -> float:
    """Return the mean loss over all valid labels (or samples), the same on all ranks; all ranks call it.

    Every rank runs the same number of micro-batches of one shape, so that all enter the same collectives.

    Args:
        kept: collects the outputs in the order of the samples.

    Raises:
        signals.Interrupted: on all ranks, if a signal asks any of them to end training.
        UserError: the data set is empty.
    """
    return _mean(engine, _totals(engine, dataset, micro_batch, collator, kept))


def _totals(
    engine: Engine, dataset: MapDataset, micro_batch: int, collator: Collator, kept: KeptOutputs | None
) -> EvaluationTotals:
    n = dataset_length(dataset)
    if not n:
        raise UserError("the data set to evaluate is empty: give at least one sample")
    whole = n - n % micro_batch
    # A router loss counts padding, so the padded length must not depend on the layout.
    if engine.has_router_loss:
        dataset = at_longest(dataset)
    totals = EvaluationTotals()
    # The last samples form a smaller micro-batch: if it were filled up, a router loss would count the repeated samples.
    for rows, size in ((range(whole), micro_batch), (range(whole, n), n - whole)):
        if rows:
            totals += _sums(engine, dataset, rows, size, collator, kept)
    return totals


def _sums(
    engine: Engine, dataset: MapDataset, rows: range, micro_batch: int, collator: Collator, kept: KeptOutputs | None
) -> EvaluationTotals:
    place = engine.groups.coordinate.batch_rank
    size = engine.groups.layout.batch_ranks
    steps = evaluation_steps(len(rows), micro_batch, size)
    # Stages exchange the shape of activations once per call of the engine, so its micro-batches must be padded alike.
    alike = CHUNK if engine.groups.layout.pp_size > 1 else 1
    # `_totals` has already set one length for the whole data set.
    if engine.has_router_loss:
        alike = 0
    batches = evaluation_batches(dataset, micro_batch, place, size, rows=rows, alike=alike, data_collator=collator)
    totals = EvaluationTotals()
    for first in range(0, steps, CHUNK):
        # Asked of all ranks: one that left alone would let the others wait in the next forward pass.
        if any_rank(signals.received() != 0):
            raise signals.Interrupted
        count = min(CHUNK, steps - first)
        beat("reading data to evaluate")
        chunk = [next(batches) for _ in range(count)] if engine.reads_data else []
        if first == 0:
            require_same_data([(batch.inputs, batch.labels) for batch in chunk], engine.groups)
        with inside("evaluating", Phase.STEP):
            totals += engine.evaluate(chunk, count)
        if kept is not None:
            kept.gather()
    return totals
