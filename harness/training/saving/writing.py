"""What checkpoints hold besides tensors, and what `save_model` writes: a HuggingFace model, or peft's adapters.

Adapters name the model that they stand on. One that lies in a directory is named by its path; one that began from the
seed, or in memory, is written beside them, so that peft and `from_pretrained` find it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from harness.checkpoint.background_save import BackgroundSave, Target, Writer
from harness.checkpoint.directories import TrainingProgress, finished_name, optimizer_name
from harness.checkpoint.exporting.weights import export_adapter_config, export_adapters, export_config, export_weights
from harness.config.values.json_object import JsonObject
from harness.data.streaming.source import Streamed
from harness.errors import UserError
from harness.hf.lora import plain_name, saved_name, sorted_config
from harness.topology.agreement import all_or_none
from harness.training.best_model import best_as_saved
from harness.training.callbacks import TrainerState
from harness.training.run import Run

if TYPE_CHECKING:
    from peft import LoraConfig

BASE = "base_model"


def begin_checkpoint(run: Run, state: TrainerState, writer: Writer, *, copy: bool) -> BackgroundSave:
    """Begin to write the state of a run, or a copy of it, to `output_dir/checkpoint-STEP`; all ranks call it.

    HuggingFace's `from_pretrained` reads its weights, and peft's its adapters.
    """
    target = Target(
        output_dir=run.output_dir,
        keep=run.args.save_total_limit,
        best=_best(run, state),
        model_only=run.args.save_only_model,
        write_others=lambda folder: _write_configs(run, folder),
    )
    return BackgroundSave(run.engine_state, target, progress_of(run, state), writer, copy=copy)


def _best(run: Run, state: TrainerState) -> Path | None:
    """Return the checkpoint of the best evaluation: the one that is now written, or the last that was."""
    if state.best_global_step == state.global_step:
        return run.output_dir / finished_name(state.global_step)
    return None if state.best_model_checkpoint is None else Path(state.best_model_checkpoint)


def progress_of(run: Run, state: TrainerState) -> TrainingProgress:
    """Return where a run stands, but for what its engine counts."""
    return TrainingProgress(
        step=state.global_step,
        consumed_samples=state.consumed_samples,
        layout=str(run.layout),
        zero_stage=run.resolved.zero_stage,
        precision=run.resolved.precision,
        seed=run.args.seed,
        data=run.digest,
        adapters=run.adapters,
        base=run.base,
        model=run.trainable.summary,
        model_config=run.trainable.shaping_config,
        optimizer=optimizer_name(run.resolved),
        hyperparameters=run.hyperparameters,
        skipped_samples=list(state.skipped_samples),
        run_id=run.run_id,
        best=best_as_saved(run.args, state),
        stream=stream_position(run, state.consumed_samples),
    )


def stream_position(run: Run, consumed: int) -> JsonObject:
    """Return where streamed training data stands; rank 0, which reads it and writes the state, knows it."""
    data = run.data.train
    return data.position(consumed) if isinstance(data, Streamed) and run.groups.rank == 0 else {}


def _write_configs(run: Run, folder: Path) -> None:
    """Write what HuggingFace needs beside the weights; called by one rank."""
    causal, adaptation = run.trainable.causal, run.adaptation
    if causal is None:
        return
    if adaptation is not None:
        base = causal.source.weights
        export_adapter_config(sorted_config(adaptation.config), str(base) if isinstance(base, Path) else "", folder)
        return
    export_config(causal.source, next(run.module.parameters()).dtype, folder)
    if run.data.tokenizer is not None:
        run.data.tokenizer.save_pretrained(folder)


def write_model(run: Run, directory: Path) -> None:
    """Write what `run` has trained into `directory`; all ranks call it."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"the model cannot be written to {directory}: {error.strerror or error}") from error
    if run.adaptation is None:
        _write_whole(run, directory)
    else:
        _write_adapters(run, run.adaptation.config, directory)
    tokenizer = run.data.tokenizer
    _on_first_rank(run, lambda: tokenizer.save_pretrained(directory) if tokenizer is not None else None)


def _on_first_rank(run: Run, write: Callable[[], object]) -> None:
    """Let rank 0 write; all ranks call it, and get a UserError if that fails, as on a full disk."""
    all_or_none(lambda: write() if run.groups.rank == 0 else None)


def _write_adapters(run: Run, config: LoraConfig, directory: Path) -> None:
    causal = run.trainable.causal
    assert causal is not None  # adapters stand on a HuggingFace model
    name = run.trainable.saved_name
    base = causal.source.weights
    if not isinstance(base, Path):
        base = directory / BASE
        base.mkdir(exist_ok=True)
        _write_whole(run, base)
    module = run.module
    export_adapters(module, run.groups, directory, rename=lambda key: saved_name(name(key)))
    _on_first_rank(run, lambda: export_adapter_config(sorted_config(config), str(base.resolve()), directory))


def _write_whole(run: Run, directory: Path) -> None:
    """Write the model without its adapters."""
    causal, name = run.trainable.causal, run.trainable.saved_name
    module = run.module
    export_weights(
        module,
        run.groups,
        directory,
        rename=lambda key: plain_name(name(key)),
        form=causal.form if causal else None,
    )
    if causal is not None:
        source, dtype = causal.source, next(module.parameters()).dtype
        _on_first_rank(run, lambda: export_config(source, dtype, directory))
