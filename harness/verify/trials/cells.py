"""Fill one family's row of the matrix with two ranks and a tiny random model.

Every cell trains three steps in its layout and compares them with plain torch and transformers in one process.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig

from harness.atomic import replace_text
from harness.config.model.facts import experts_of
from harness.config.model.plans import spreads_experts
from harness.errors import UserError, text_of
from harness.hf.locate import PLANS
from harness.hf.skeleton import read_source
from harness.parallel.comm import TensorParallel
from harness.topology.agreement import all_gather_object
from harness.verify.comparison import find_difference
from harness.verify.matrix import CELLS, IS_DECODER, NEEDED, NO_EXPERTS, PLAN, YES, plan_digest
from harness.verify.trials.compare import other_than_values
from harness.verify.trials.composition import Execution
from harness.verify.trials.execute import new_trainer, outcome_of, run_composition, silence_this_process
from harness.verify.trials.family_case import CPU, FamilyCase, NotTried, build_case, cut_family, needs_is_decoder
from harness.verify.trials.launch import LINES
from harness.verify.trials.reference import read_weights
from harness.verify.trials.trial import RIGHT

LAYOUTS = {
    "pipeline": Execution(pp=2),
    "tensor": Execution(tp=2),
    "experts": Execution(dp=2, ep=2),
    "zero3": Execution(dp=2, zero=3),
}
"""The layouts of the cells that train."""


class Wrong(Exception):
    """A cell ran, and its result is not that of one process."""


def run_family(family: str, work: Path, only: str = "") -> dict[str, str]:
    """Return the row of a family, or its cell `only`; both ranks must call it, and get the same."""
    row: dict[str, str] = {}
    if only == "experts" and not _has_experts(CONFIG_MAPPING[family]()):
        return {only: NO_EXPERTS}
    if (digest := plan_digest(CONFIG_MAPPING[family])) is not None:
        row[PLAN] = digest
    try:
        trial = build_case(family, work)
        if needs_is_decoder(trial.config):
            row[IS_DECODER] = NEEDED
    except UserError as error:
        return {**row, **dict.fromkeys([only] if only else CELLS, f"refused: {_short(error)}")}
    except Exception as error:  # transformers itself cannot run the family, for whatever reason
        return {**row, **dict.fromkeys([only] if only else CELLS, f"not tried: {_short(error)}")}
    exported = work / "exported"
    if only:
        return {only: _verdict(partial(_train, trial, only, None))}
    for cell in LAYOUTS:
        if cell == "experts" and not _has_experts(trial.config):
            row[cell] = NO_EXPERTS
            continue
        exports = cell in ("pipeline", "zero3") and not exported.exists()
        row[cell] = _verdict(partial(_train, trial, cell, exported if exports else None))
    row["import"] = _verdict(partial(_same_tensors, trial, exported)) if exported.exists() else row["zero3"]
    row["export"] = _verdict(partial(_loads, trial, exported)) if exported.exists() else row["zero3"]
    return row


def _verdict(cell: Callable[[], None]) -> str:
    """Run a cell and return its result, the worse one of both ranks: `yes`, `refused: ...` or `wrong: ...`."""
    try:
        cell()
        own = YES
    except UserError as error:
        own = f"refused: {_short(error)}"
    except Exception as error:  # any error after the cut means that the cut is wrong
        traceback.print_exc()  # if the other rank hangs now, this log is all that shows why
        own = f"wrong: {_short(error)}"
    return max(all_gather_object(own), key=lambda text: ("yes", "refused", "wrong").index(text.split(":")[0]))


def _short(error: Exception) -> str:
    text = text_of(error).replace(f"{PLANS.parents[1]}/", "").replace(f"{tempfile.gettempdir()}/", "")
    kind = "" if isinstance(error, (UserError, Wrong, NotTried)) else f"{type(error).__name__}: "
    return (kind + text)[:300]


# -- cells -------------------------------------------------------------------------------------------------


def _has_experts(config: PretrainedConfig) -> bool:
    """Return whether a family is a mixture of experts, by its plan or its config."""
    text = config.get_text_config(decoder=True).to_dict()
    return spreads_experts(text) or experts_of(text)[0] > 1


def _trained(trial: FamilyCase) -> PretrainedConfig:
    """Return the config of the model that is trained; of a multimodal model, that of its text decoder."""
    return read_source(str(trial.directory)).config


def _train(trial: FamilyCase, cell: str, exported: Path | None) -> None:
    """Train in the layout of a cell, and compare the result with one process. Raises Wrong on rank 0 if they differ.

    Before, compare the cut model with the whole one, and write the untrained model to `exported`, if given.
    """
    execution = LAYOUTS[cell]
    if cell in ("pipeline", "tensor"):  # the others cut no layer
        tensor = TensorParallel.of(dist.group.WORLD) if execution.tp > 1 else TensorParallel()
        difference = find_difference(_trained(trial), cut_family, tensor, CPU)
        if difference is not None:
            raise Wrong(str(difference))
    composition = replace(trial.composition, executions=(execution,))
    run_folder = trial.directory.parent / str(execution).replace(" ", "_")
    if exported is not None:
        untrained = new_trainer(composition, execution, trial.subject, run_folder, verify_plan="off")
        untrained.save_model(exported)
        untrained.close()
    # with verify_plan on, a wrong plan would be refused before training, and the cell would not show that it is wrong
    run_composition(composition, trial.subject, run_folder, verify_plan="off")
    if dist.get_rank() == 0:
        verdict = trial.judge.verdict(composition, trial.subject, outcome_of([""], run_folder), run_folder)
        if verdict.kind != RIGHT:
            raise Wrong(verdict.reason)


def _same_tensors(trial: FamilyCase, exported: Path) -> None:
    if _trained(trial).model_type != trial.config.model_type:
        return  # only the text decoder is written, under its own names; `_loads` compares its logits instead
    if (difference := stored_difference(trial.directory, exported)) is not None:
        raise Wrong(difference)


def _loads(trial: FamilyCase, exported: Path) -> None:
    """Check that transformers loads the exported model and gets the logits of the original; raises Wrong if not."""
    ids = torch.tensor([sample["input_ids"] for sample in trial.subject.trained()[:2]])
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


def stored_difference(wanted: Path, found: Path) -> str | None:
    """Return the first difference between the safetensors of `found` and of `wanted`; None if they are equal."""
    before = read_weights(wanted)
    after = read_weights(found)
    if (difference := other_than_values(after, before)) is not None:
        return difference
    changed = (name for name, tensor in before.items() if not torch.equal(tensor, after[name]))
    return next((f"{name} has other values" for name in changed), None)


def run_rows(folder: Path, first: int) -> None:
    """Fill the rows of the families listed in a folder, from number `first` on; a worker of `run_on_ranks`.

    Each row is written to `NUMBER.json` in that folder as soon as it is known, so that a later crash does not lose it.
    """
    silence_this_process()
    for number, line in enumerate((folder / LINES).read_text().splitlines()):
        if number >= first:
            family, _, only = line.partition(" ")
            row = run_family(family, folder / family, only)
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(folder / family, ignore_errors=True)
                replace_text(folder / f"{number}.json", json.dumps(row))
