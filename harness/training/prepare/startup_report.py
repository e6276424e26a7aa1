"""What a run reports before the first step: the layout, the stages, and what will be slow."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

import torch

from harness.arguments import TrainingArguments
from harness.config import Resolved
from harness.config.schema.support import version_warning
from harness.config.values.batch import bubble, idle, micro_batches_wanted
from harness.config.values.layout_keys import DEEPSPEED_1F1B
from harness.console import Console
from harness.data.inputs.datasets import Datasets
from harness.data.preview import BEGIN, END, shown
from harness.hf.locate import presets
from harness.hf.lora import Adaptation
from harness.hf.skeleton import ModelSource
from harness.resilience.process.signals import Stopped
from harness.topology.layout import Layout
from harness.topology.placement import Hosts, advise, hosts_of_launch
from harness.training.prepare.stages import StageLine
from harness.training.prepare.trainable import TrainableModel
from harness.wording import counted


def placement(console: Console, layout: Layout, hosts: Hosts) -> None:
    """Warn if tensor-parallel groups cross hosts, with the remedy."""
    advice = advise(layout, hosts_of_launch(hosts), hosts.numbers)
    if advice:
        console.warn(advice)


def version(console: Console) -> None:
    """Warn if another DeepSpeed is installed than the config rules speak of."""
    warning = version_warning()
    if warning:
        console.warn(warning)


def beginning(console: Console, args: TrainingArguments, resume_from: Path | None, left_out: Sequence[str]) -> None:
    """Say which checkpoints cannot be gone on from, and that a run which might have gone on begins at step 0."""
    for line in left_out:
        console.warn(f"{line}: ignored")
    if args.resume_from_checkpoint == "auto" and resume_from is None:
        console.say(f"no {'whole ' if left_out else ''}checkpoint in {args.output_dir}: starting from scratch")


def stopped(console: Console, number: int, step: int, saved: int | None, *, model_only: bool) -> Stopped:
    """Say that a signal ended the run, and where it can go on: at step `saved`, that of the newest checkpoint; return
    what ends the process.

    Args:
        model_only: no run can go on from the checkpoints.
    """
    name, resumes = signal.Signals(number).name, 'resume_from_checkpoint "auto" resumes'
    if model_only:
        kept = "no model was saved" if saved is None else f"the model of step {saved} is saved"
        console.say(f"{name}: stopped after step {step}; {kept}, but no run can go on from it (--save_only_model)")
    elif saved == step:
        console.say(f"{name}: saved and stopped after step {step}; {resumes}")
    else:
        rest = "there is no checkpoint" if saved is None else f"{resumes} at step {saved}"
        console.warn(f"{name}: stopped after step {step}, which could not be saved; {rest}")
    return Stopped(number)


def origin(console: Console, source: ModelSource, seed: int) -> None:
    """Say that a model begins anew where its directory, which might have held weights, holds none."""
    if source.weights is None and source.name not in presets() and Path(source.name).is_dir():
        console.say(
            f"no weights found (safetensors or pytorch_model.bin) in {source.name}: initialising from seed {seed}"
        )


def compilation(console: Console, resolved: Resolved, device: torch.device) -> None:
    """Announce the one wait that DeepSpeed may add: its own optimizers are compiled on first use."""
    name = resolved.config.get("optimizer", {}).get("type")
    if name is not None and device.type != "cpu":
        console.say(
            f"optimizer {name} is DeepSpeed's own: the first use on a machine compiles it, which can take minutes"
        )


def stages(console: Console, layout: Layout, resolved: Resolved, steps: int, lines: Sequence[StageLine]) -> None:
    """Report the layout, the batch, and which layers and how many parameters each rank holds."""
    named = layout.pp_size > 1 and resolved.schedule != DEEPSPEED_1F1B
    schedule = f", {resolved.schedule}" if named else ""
    console.say(
        f"{layout}{schedule}, ZeRO-{resolved.zero_stage}, {resolved.precision}: {counted(steps, 'step')} "
        f"of {counted(resolved.train_batch, 'sample')} "
        f"({resolved.accumulation} x {resolved.micro_batch} a data rank)"
    )
    for line in lines:
        console.say(f"  {line}")
    order = resolved.schedule, resolved.chunks.each
    warning = batch_warning(layout.pp_size, resolved.micro_batch, resolved.accumulation, *order)
    if warning is not None:
        console.warn(warning)


def batch_warning(
    stages: int, micro: int, accumulation: int, schedule: str = DEEPSPEED_1F1B, parts_per_stage: int | None = None
) -> str | None:
    """How much of a step a pipeline idles, and what to set; None up to a fifth."""
    order = schedule, parts_per_stage
    wanted = micro_batches_wanted(stages, *order)
    if accumulation >= wanted:
        return None
    flag = "--gradient_accumulation_steps"
    remedy = f"{flag} {wanted} leaves {bubble(stages, wanted, *order):.0%}"
    share = micro * accumulation
    finer = next((size for size in range(micro - 1, 0, -1) if share % size == 0 and share // size >= wanted), None)
    if finer is not None:
        remedy += f"; with the same batch --per_device_train_batch_size {finer} {flag} {share // finer}"
    return f"{idle(stages, accumulation, *order)}: {remedy}"


def adapters(console: Console, adaptation: Adaptation | None, trainable: TrainableModel) -> None:
    """How much of the model is trained, where that is not all of it."""
    if adaptation is not None:
        console.say(
            f"  adapters of rank {adaptation.config.r}: {trainable.size(trained=True):,} of {trainable.size():,} "
            "parameters are trained"
        )


def padding(console: Console, share: float, *, packed: bool) -> None:
    """Point out packing where most of what the first batches compute is padding."""
    if share > 0.5 and not packed:
        console.say(f"{share:.0%} of the tokens of a batch are padding: --packing joins short conversations instead")


def learnt(console: Console, data: Datasets) -> None:
    """Show a sample of the training data, what is learnt of it between brackets: a wrong mask is seen there."""
    for text in shown(data.train, data.tokenizer):
        console.say(f"a sample, what is learnt of it between {BEGIN} and {END}: {text}")
