"""Evaluate, or predict, over a data set in chunks, so that memory does not grow with the number of samples."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch.distributed as dist

from harness.arguments.themes.training import ROUTER_BATCH
from harness.config.values.json_object import JsonObject
from harness.data.batches.collate import AnyDataset, Collator, MapDataset, collate
from harness.data.batches.evaluation import evaluation_batches, evaluation_steps
from harness.data.batches.padding import at_longest
from harness.data.batches.same_data import require_same_data
from harness.data.batches.stream import data_digest, dataset_length
from harness.data.inputs.datasets import later_dataset
from harness.data.inputs.given import as_dataset, require_dataset
from harness.data.mixing import parts_of
from harness.data.streaming.rows import read_all
from harness.errors import UserError
from harness.resilience.process import signals
from harness.resilience.process.activity import Phase, beat, inside
from harness.topology.agreement import any_rank, host_group, require_alike
from harness.training.engine.engine import Engine
from harness.training.engine.losses import Labels, Loss, Outputs, RouterLoss
from harness.training.engine.outputs import KeptOutputs
from harness.training.prepare.run import Run

if TYPE_CHECKING:
    from transformers.trainer_utils import EvalPrediction, PredictionOutput

CHUNK = 16  # micro-batches that are read, then evaluated; signals are checked between two chunks


def default_batch(loss: Loss, micro_batch: int) -> int:
    """Return the default size of an evaluation micro-batch; `micro_batch` is the size in training.

    A router loss depends on which samples share a micro-batch, so its size must not depend on the layout.
    """
    return ROUTER_BATCH if isinstance(loss, RouterLoss) else micro_batch


def evaluation_metrics(run: Run, dataset: AnyDataset, prefix: str = "eval", *, is_new: bool) -> JsonObject:
    """Return eval_loss, perplexity, eval_samples, eval_seconds and the user's own metrics; all ranks call it.

    Args:
        prefix: replaces `eval` in the names.
        is_new: whether the data set must still be checked, as it was given after the run began.

    Raises:
        UserError: a new data set cannot be used, or differs between ranks.
    """
    kept = None if run.compute_metrics is None else KeptOutputs(run.engine, run.preprocess_logits_for_metrics)
    data = tokens_of_new(run, dataset, "eval_dataset") if is_new else read_all(dataset, "eval_dataset")
    return _evaluated(run, data, prefix, kept, is_new=is_new)


def predict(run: Run, dataset: AnyDataset, prefix: str) -> PredictionOutput:
    """Return predictions, labels and metrics of all samples, on all ranks; all ranks call it. UserError as above."""
    from transformers.trainer_utils import PredictionOutput

    kept = KeptOutputs(run.engine, run.preprocess_logits_for_metrics, everywhere=True)
    metrics = _evaluated(run, tokens_of_new(run, dataset, "test_dataset"), prefix, kept, is_new=True)
    predictions, labels = kept.joined()
    return PredictionOutput(predictions=predictions, label_ids=labels, metrics=metrics)


def computed_metrics(
    compute: Callable[[EvalPrediction], Mapping[str, object]], predictions: Outputs, labels: Labels, prefix: str
) -> JsonObject:
    """Compute the user's metrics on rank 0 and return them on all ranks, with the prefix before their names.

    All ranks call it. An exception on rank 0 is raised there, and a UserError on the others.
    """
    from transformers.trainer_utils import EvalPrediction, denumpify_detensorize

    sent: list[JsonObject | None] = [None]
    try:
        with inside("compute_metrics"):  # on all ranks, so that the watchdog lets the others wait for rank 0
            if dist.get_rank() == 0:
                found: object = compute(EvalPrediction(predictions=predictions, label_ids=labels))
                if not isinstance(found, Mapping):
                    kind = type(found).__name__
                    raise UserError(f"compute_metrics returned {kind}: it must return a dict of numbers by name")
                named = {str(name): value for name, value in denumpify_detensorize(dict(found)).items()}
                start = f"{prefix}_"
                sent = [{name if name.startswith(start) else start + name: value for name, value in named.items()}]
    finally:  # also after an exception: the others are waiting
        dist.broadcast_object_list(sent, src=0, group=host_group())
    if sent[0] is None:
        raise UserError("compute_metrics failed on rank 0")
    return sent[0]


def tokens_of_new(run: Run, dataset: AnyDataset, name: str) -> MapDataset:
    """Check and tokenise a data set that the run did not begin with. UserError if it cannot be used."""
    source = run.source if run.data_collator is collate else None
    require_dataset(name, dataset)
    data = read_all(as_dataset(dataset), name)
    return later_dataset(data, name, run.data.tokenizer, source, run.args, run.env, run.console)


def _evaluated(run: Run, dataset: MapDataset, prefix: str, kept: KeptOutputs | None, *, is_new: bool) -> JsonObject:
    micro_batch = run.args.per_device_eval_batch_size or default_batch(run.trainable.loss, run.resolved.micro_batch)
    if is_new:
        require_alike({"evaluation data": data_digest(dataset)})
        run.data_check.first_batch(dataset, micro_batch)
    start_time = time.perf_counter()
    with kept or nullcontext():
        loss, of_parts = _losses(run, dataset, micro_batch, kept)
    found = {}
    if kept is not None and run.compute_metrics is not None:
        found = computed_metrics(run.compute_metrics, *kept.joined(), prefix)
    count, seconds = dataset_length(dataset), time.perf_counter() - start_time
    perplexity = "perplexity" if prefix == "eval" else f"{prefix}_perplexity"
    return {
        f"{prefix}_loss": loss,
        **{f"{prefix}_{name}_loss": value for name, value in of_parts.items()},
        **({perplexity: math.exp(min(loss, 700.0))} if run.trainable.reads_tokens else {}),
        **found,
        f"{prefix}_samples": count,
        f"{prefix}_seconds": seconds,
        f"{prefix}_runtime": seconds,  # HuggingFace's names of the same
        f"{prefix}_samples_per_second": count / seconds,
        f"{prefix}_steps_per_second": evaluation_steps(count, micro_batch, run.groups.layout.dp_size) / seconds,
    }


def _losses(
    run: Run, dataset: MapDataset, micro_batch: int, kept: KeptOutputs | None
) -> tuple[float, dict[str, float]]:
    """Return the mean loss, and the mean loss of each source if there are several; each sample counts once."""
    engine, collator = run.engine, run.data_check.collator
    # Evaluating source by source would change the micro-batches, and so a router loss, and the order of the outputs.
    parts = {} if engine.has_router_loss or kept is not None else parts_of(dataset)
    if not parts:
        return mean_loss(engine, dataset, micro_batch, collator, kept), {}
    sums = {name: _totals(engine, part, micro_batch, collator, None) for name, part in parts.items()}
    total, counted = (sum(pair[i] for pair in sums.values()) for i in (0, 1))
    return _mean(total, counted), {name: _mean(*pair) for name, pair in sums.items()}


def _mean(total: float, counted: float) -> float:
    return total / counted if counted else float("nan")


def mean_loss(
    engine: Engine, dataset: MapDataset, micro_batch: int, collator: Collator, kept: KeptOutputs | None = None
) -> float:
    """Return the mean loss over all valid labels (or samples), the same on all ranks; all ranks call it.

    Every rank runs the same number of micro-batches of one shape, so that all enter the same collectives.

    Args:
        kept: collects the outputs in the order of the samples.

    Raises:
        signals.Interrupted: on all ranks: a signal on any of them asks for the end of training.
        UserError: the data set is empty.
    """
    return _mean(*_totals(engine, dataset, micro_batch, collator, kept))


def _totals(
    engine: Engine, dataset: MapDataset, micro_batch: int, collator: Collator, kept: KeptOutputs | None
) -> tuple[float, float]:
    """Return the sum of the losses of all samples, and the number of valid labels (or samples)."""
    n = dataset_length(dataset)
    if not n:
        raise UserError("the data set to evaluate is empty: give at least one sample")
    whole = n - n % micro_batch
    if engine.has_router_loss:  # it counts padding, so the padded length must not depend on the layout
        dataset = at_longest(dataset)
    total = counted = 0.0
    # The last samples form a smaller micro-batch: if it were filled up, a router loss would count the repeated samples.
    for rows, size in ((range(whole), micro_batch), (range(whole, n), n - whole)):
        if rows:
            losses, valid = _sums(engine, dataset, rows, size, collator, kept)
            total, counted = total + losses, counted + valid
    return total, counted


def _sums(
    engine: Engine, dataset: MapDataset, rows: range, micro_batch: int, collator: Collator, kept: KeptOutputs | None
) -> tuple[float, float]:
    """Return the sum of the losses of these samples, and the number of valid labels (or samples)."""
    place, size = engine.groups.coordinate.reader, engine.groups.layout.readers
    steps = evaluation_steps(len(rows), micro_batch, size)
    alike = 0 if engine.has_router_loss else CHUNK if engine.groups.layout.pp_size > 1 else 1
    batches = evaluation_batches(dataset, micro_batch, place, size, rows=rows, alike=alike, data_collator=collator)
    total = counted = 0.0
    for first in range(0, steps, CHUNK):
        if any_rank(signals.received() != 0):
            raise signals.Interrupted
        count = min(CHUNK, steps - first)
        beat("reading data to evaluate")
        chunk = [next(batches) for _ in range(count)] if engine.reads_data else []
        if first == 0:
            require_same_data([(batch.inputs, batch.labels) for batch in chunk], engine.groups)
        with inside("evaluating", Phase.STEP):
            losses, valid = engine.evaluate(chunk, count)
        total, counted = total + losses, counted + valid
        if kept is not None:
            kept.gather()
    return total, counted
