"""Log-probabilities of the model before training: an evaluation pass, kept with the prepared data.

With adapters the model before training is the one without them. The values are kept under a key of all that decides
them: the weights' files, the model's config, the number format, and the tokens of all samples.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import transformers
from torch import nn

from harness.batches.collate import Collator
from harness.batches.stream import fingerprint
from harness.console import Console
from harness.data.on_disk.cache import cache_error, prepared_folder
from harness.data.on_disk.shards import is_whole, write_whole
from harness.errors import UserError
from harness.hf.adapters import Adapters
from harness.hf.layers.wrappers import is_wrapper
from harness.hf.skeleton import ModelSource
from harness.hf.weights.tensor_files import sampled
from harness.preferences.samples import PreferenceSamples
from harness.resilience.process.activity import inside
from harness.topology.agreement import all_or_none, broadcast_object
from harness.training.engine.engine import Engine
from harness.training.engine.outputs import KeptOutputs
from harness.training.evaluate import mean_loss
from harness.training.prepare.trainable import shaping
from harness.wording import counted

# Part of the cache key. Increase it when a code change gives other log-probabilities.
_FORMAT = 1
_FILE = "values.npy"


def with_reference(
    samples: PreferenceSamples,
    engine: Engine,
    collator: Collator,
    source: ModelSource,
    adapters: Adapters | None,
    console: Console,
) -> PreferenceSamples:
    """Return the samples with the log-probabilities of the model before training; all ranks call it.

    The engine must hold the initial weights. Raises UserError for adapters whose `modules_to_save` were trained before.
    """
    if adapters is not None and adapters.replaced:
        raise UserError(
            f"modules_to_save: {min(adapters.replaced)} was trained before, but its base model's values, which "
            "preferences are compared with, are not loaded: merge the adapters into the base model "
            "(merge_and_unload), and train new ones"
        )
    folder = all_or_none(lambda: _folder(samples, engine, source) if dist.get_rank() == 0 else None)
    values = broadcast_object(None if folder is None or not is_whole(folder) else np.load(folder / _FILE))
    number = counted(2 * len(samples), "sequence")
    if values is not None:
        console.say(f"log-probabilities of {number} before training: read from {folder}")
        return samples.with_reference(values)
    started = time.perf_counter()
    values = _computed(samples, engine, collator, adapters)
    console.say(f"log-probabilities of {number} before training: computed in {time.perf_counter() - started:.1f} s")
    if folder is not None and (problem := _kept(folder, values)):
        console.warn(f"{problem}; the next run computes the log-probabilities again")
    return samples.with_reference(values)


def _computed(
    samples: PreferenceSamples, engine: Engine, collator: Collator, adapters: Adapters | None
) -> npt.NDArray[np.float32]:
    """Return the log-probabilities [samples, 2] that the engine gives now, without adapters."""
    kept = KeptOutputs(engine, everywhere=True, labels=False)
    micro_batch = engine.spec.args.per_device_eval_batch_size or engine.spec.resolved.micro_batch
    module: nn.Module = engine.deepspeed.module
    with inside("evaluating"), kept, without_adapters(module) if adapters is not None else _unchanged():
        mean_loss(engine, samples, micro_batch, collator, kept)
    values, _ = kept.joined()
    return broadcast_object(np.asarray(values, dtype=np.float32))


@contextmanager
def without_adapters(module: nn.Module) -> Iterator[None]:
    """Switch off the adapters of all layers in `module`."""
    wrappers = [layer for layer in module.modules() if is_wrapper(layer)]
    # peft's own `enable_adapters(False)` also sets requires_grad, which the engine has read already
    for wrapper in wrappers:
        vars(wrapper)["_disable_adapters"] = True
    try:
        yield
    finally:
        for wrapper in wrappers:
            vars(wrapper)["_disable_adapters"] = False


@contextmanager
def _unchanged() -> Iterator[None]:
    yield


def _folder(samples: PreferenceSamples, engine: Engine, source: ModelSource) -> Path | None:
    """Return the folder of the values; None for a model in memory, which has no files to be recognised by."""
    if source.weights is not None and not isinstance(source.weights, Path):
        return None
    args = engine.spec.args
    return prepared_folder(None) / fingerprint(
        "reference",
        _FORMAT,
        f"seed {args.seed}" if source.weights is None else _files(source.weights),
        sorted(shaping(source.config).items()),
        engine.dtype,
        args.attn_implementation,
        (torch.__version__, transformers.__version__),
        samples.digest(),
    )


def _files(directory: Path) -> list[tuple[object, ...]]:
    """Return what identifies the files of weights: sizes, checksums of samples, and the times of their last change."""
    found: list[tuple[object, ...]] = []
    for name, (size, checksum) in sorted(sampled(directory).items()):
        stat = (directory / name).stat()
        found.append((name, size, checksum, stat.st_mtime_ns, stat.st_ctime_ns))
    return found


def _kept(folder: Path, values: npt.NDArray[np.float32]) -> str | None:
    """Write the values for the next run; return why that failed, None if it did not."""

    def write(place: Path) -> None:
        np.save(place / _FILE, values)

    try:
        write_whole(folder, write)
    except OSError as error:
        return str(cache_error(error, None))
    return None
