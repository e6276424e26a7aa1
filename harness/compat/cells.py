"""One family's row of the matrix, run by two ranks on a tiny random model.

    python -m harness.compat.cells RESULTS FAMILY...     # RANK and so on as a launcher sets them

Every cell trains three steps through the Trainer, in its layout, and compares losses and gradient norms with the same
training of the HuggingFace model in one process. What rounding may change is measured: that training is done again
with weights moved by rounding errors. A row is written as soon as it is known, so that nothing is lost when a family
hangs.
"""

from __future__ import annotations

import io
import json
import logging
import shutil
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig

from harness.arguments import TrainingArguments
from harness.compat.family_case import CPU, FamilyCase, NotTried, build_case, cut_family, needs_is_decoder
from harness.compat.reference import BATCH, MICRO, STEPS, Curve, allowance, samples, worst
from harness.compat.stored import stored_difference
from harness.config.model.shape import experts_of
from harness.config.values.json_object import JsonObject
from harness.console import Console
from harness.errors import UserError
from harness.hf.locate import PLANS
from harness.hf.matrix import CELLS, IS_DECODER, NEEDED, NO_EXPERTS, PLAN, YES, plan_digest
from harness.hf.skeleton import read_source
from harness.hf.verify.comparison import find_difference
from harness.parallel.comm import TensorParallel
from harness.training.trainer import Trainer


class Wrong(Exception):
    """A cell was not refused and is not right."""


def run_family(family: str, work: Path) -> dict[str, str]:
    """Return the row of a family; both ranks call it, and get the same."""
    row: dict[str, str] = {}
    if (digest := plan_digest(CONFIG_MAPPING[family])) is not None:
        row[PLAN] = digest
    try:
        trial = build_case(family, work)
        if needs_is_decoder(trial.config):
            row[IS_DECODER] = NEEDED
    except UserError as error:
        return {**row, **dict.fromkeys(CELLS, f"refused: {_short(error)}")}
    except Exception as error:  # a family that transformers itself cannot run, for whatever reason
        return {**row, **dict.fromkeys(CELLS, f"not tried: {_short(error)}")}
    exported = work / "exported"
    row["pipeline"] = _verdict(partial(_pipeline, trial, exported))
    row["tensor"] = _verdict(partial(_tensor, trial))
    row["experts"] = _verdict(partial(_experts, trial)) if _has_experts(trial) else NO_EXPERTS
    row["zero3"] = _verdict(partial(_zero3, trial, None if exported.exists() else exported))
    row["import"] = _verdict(partial(_same_tensors, trial, exported)) if exported.exists() else row["zero3"]
    row["export"] = _verdict(partial(_loads, trial, exported)) if exported.exists() else row["zero3"]
    return {name: row[name] for name in (*CELLS, PLAN, IS_DECODER) if name in row}


def _verdict(cell: Callable[[], None]) -> str:
    """Return what a cell says on these ranks: the worst of both."""
    try:
        cell()
        own = YES
    except UserError as error:
        own = f"refused: {_short(error)}"
    except Exception as error:  # whatever a family's code raises under a cut is a wrong cut
        traceback.print_exc()  # into the log: if the other rank goes on, nothing else will show it
        own = f"wrong: {_short(error)}"
    said = [""] * dist.get_world_size()
    dist.all_gather_object(said, own)
    return max(said, key=lambda text: ("yes", "refused", "wrong").index(text.split(":")[0]))


def _short(error: Exception) -> str:
    text = " ".join(str(error).split()).replace(f"{PLANS.parents[1]}/", "").replace(f"{tempfile.gettempdir()}/", "")
    kind = "" if isinstance(error, (UserError, Wrong, NotTried)) else f"{type(error).__name__}: "
    return (kind + text)[:300]


# -- cells -------------------------------------------------------------------------------------------------


def _pipeline(trial: FamilyCase, exported: Path) -> None:
    _compare_cut(trial, TensorParallel())
    _steps(trial, "pipeline", {"pipeline": {"stages": 2}}, exported)


def _tensor(trial: FamilyCase) -> None:
    _compare_cut(trial, TensorParallel.of(dist.group.WORLD))
    _steps(trial, "tensor", {"tensor_parallel": {"autotp_size": 2}})


def _experts(trial: FamilyCase) -> None:
    _steps(trial, "experts", {"expert_parallel": {"enabled": True, "autoep_size": 2}})


def _has_experts(trial: FamilyCase) -> bool:
    """Whether the family is a mixture of experts, as its config or its plan says."""
    text = _trained(trial)
    declared = getattr(text, "base_model_ep_plan", None) or {}
    return bool(declared) or experts_of(text.to_dict())[0] > 1


def _zero3(trial: FamilyCase, exported: Path | None) -> None:
    _steps(trial, "zero3", {"zero_optimization": {"stage": 3}}, exported)


def _trained(trial: FamilyCase) -> PretrainedConfig:
    """Return the config of what is trained: of a model of several parts, its text decoder."""
    return read_source(str(trial.directory)).config


def _compare_cut(trial: FamilyCase, place: TensorParallel) -> None:
    found = find_difference(_trained(trial), cut_family, place, CPU)
    if found is not None:
        raise Wrong(str(found))


def _steps(trial: FamilyCase, name: str, layout: JsonObject, exported: Path | None = None) -> None:
    """Write the model to `exported`, untrained; train in a layout, and hold the curve to that of one process."""
    trainer = _trainer(trial, name, layout)
    curve: Curve = []
    try:
        if exported is not None:
            trainer.save_model(exported)
        for _ in range(STEPS):
            record = trainer.training_step()
            curve.append((record.loss, record.grad_norm or 0.0))
    finally:
        trainer.close()
    apart = worst(curve, trial.curve)
    # one trial of rounding nearly always decides; where a rare choice flips (of experts, of keys), it takes several
    if not any(_within(apart, allowance(trial.directory, trial.curve, seeds)) for seeds in (range(1), range(1, 12))):
        loss, first, later = apart
        raise Wrong(f"losses are off by {loss:.0e}, the first gradient norm by {first:.0e}, later ones by {later:.0e}")


def _within(apart: Iterable[float], allowed: Iterable[float]) -> bool:
    return all(off <= limit for off, limit in zip(apart, allowed, strict=True))


def _same_tensors(trial: FamilyCase, exported: Path) -> None:
    if _trained(trial).model_type != trial.config.model_type:
        return  # a part is written alone, under its own names: its logits show whether it is right
    if (difference := stored_difference(trial.directory, exported)) is not None:
        raise Wrong(difference)


def _loads(trial: FamilyCase, exported: Path) -> None:
    """Check that transformers loads what was written, with the logits of the model that was read."""
    ids = torch.tensor([sample["input_ids"] for sample in samples()])
    logits = []
    for directory in (trial.directory, exported):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, local_files_only=True, output_loading_info=True
        )
        model, info = loaded
        if directory == exported and (info["missing_keys"] or info["unexpected_keys"]):
            raise Wrong(f"from_pretrained misses or does not know {sorted(map(str, info['missing_keys']))[:2]}")
        with torch.no_grad():
            logits.append(model.eval()(input_ids=ids, use_cache=False).logits)
    before, after = logits
    if not torch.allclose(after, before, rtol=1e-5, atol=1e-5):
        raise Wrong("from_pretrained of the export gives different logits")


def _trainer(trial: FamilyCase, name: str, layout: JsonObject) -> Trainer:
    config = {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": BATCH // MICRO // (1 if layout.keys() & {"pipeline", "tensor_parallel"} else 2),
        "zero_optimization": {"stage": 0},
        **layout,
    }
    arguments = TrainingArguments(
        deepspeed_config=config,
        output_dir=str(trial.directory.parent / name),
        max_steps=STEPS,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        save_steps=0,
        verify_plan="off",
    )
    nowhere = io.StringIO()
    console = Console(out=nowhere, error=nowhere, speaks=False)
    return Trainer(str(trial.directory), arguments, train_dataset=samples(), console=console)


def main(argv: Sequence[str]) -> int:
    """Write a row for each family, as a line of JSON, by rank 0."""
    results, families = Path(argv[0]), argv[1:]
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for family in families:
        folder = [tempfile.mkdtemp(prefix="family_") if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(folder)
        row = run_family(family, Path(folder[0]))
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder[0], ignore_errors=True)
            with results.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"family": family, **row}) + "\n")
    dist.barrier()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
