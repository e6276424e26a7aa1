"""What a stranger adds is one file: a copy of the package with one more optimizer, loss,
schedule or data format trains with it, those of the contributing pages among them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.core import ROOT

pytestmark = pytest.mark.ranks

OPTIMIZER = '''
"""Plain gradient descent, without momentum."""

from harness.optimizers.optimizer import OptimizerClass, OptimizerType


def plain(groups, options, names):
    import torch

    class Plain(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.add_(parameter.grad, alpha=-group["lr"])

    return Plain(groups, dict(options))


PLAIN = OptimizerType(
    name="Plain",
    device=OptimizerClass(path=f"{__name__}.plain", options=("lr", "damping")),
    made_by=f"{__name__}:plain",
    ranges={"damping": "share"},
    flags={"plain": ("lr",)},
    states=0,
    more_states=(),
)
'''
LOSS_FILE = '''
"""The hinge of SLiC (Zhao et al. 2023, arXiv 2305.10425), with the model before training."""

from harness.preference_losses.preference_loss import PreferenceLossType, margin


def losses(scores, settings):
    return (1 - settings.preference_beta * margin(scores.ratios)).relu()


LOSS = PreferenceLossType(name="hinge", paper="arXiv 2305.10425", of_pairs=losses, needs_reference=True)
'''
USES_OF_LOSS = """
import os, sys
os.environ["HF_DATASETS_CACHE"] = f"{sys.argv[1]}/cache"
from harness import PreferenceArguments, Preferences, Trainer, TrainingArguments
from harness.data.tokenizer import ByteTokenizer

pairs = [{"prompt": f"{row} and 1 is ", "chosen": f"{row + 1}", "rejected": f"{row}..."} for row in range(8)]
steps = {}
for name in ("dpo", "hinge"):
    args = TrainingArguments(f"{sys.argv[1]}/{name}", max_steps=2, save_steps=0, logging_steps=1, learning_rate=1e-3)
    args.deepspeed_config = {"train_batch_size": 4}
    objective = Preferences(PreferenceArguments(preference=name))
    trainer = Trainer("tiny-llama", args, pairs, processing_class=ByteTokenizer(), objective=objective)
    trainer.train()
    steps[name] = [logs for logs in trainer.state.log_history if "loss" in logs]
    trainer.close()
first, dpo = steps["hinge"][0], steps["dpo"][0]
assert len(steps["hinge"]) == 2 and "rewards/margins" in first
assert abs(first["loss"] - 1) < 1e-4, first  # the model is the model before training: margins of 0
assert abs(first["grad_norm"] / dpo["grad_norm"] - 2) < 1e-3, (first, dpo)  # slopes: 1, and 1/2 for DPO
"""
USES_OF_SCHEDULE = """
import sys
from harness import Trainer, TrainingArguments
from harness.checking import check
from harness.config.text.document import from_values
from harness.planner.estimate import of_config
from harness.checking import resolve
from harness.config import AutoValues
from harness.planner.model_config import read_decoder
from harness.schedules import DEFAULT

def config(name):
    return {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "pipeline": {"stages": 2, "schedule": name}}

assert DEFAULT == "1f1b"
assert [each.code for each in check(from_values(config("eager-1f1b")), world_size=2) if each.code == "DS608"] == []
shape = read_decoder("tiny-llama")
resolved = resolve(from_values(config("eager-1f1b")), AutoValues(hidden_size=shape.hidden, world_size=2))
assert of_config(resolved, shape, 16, on_cpu=True)[1].schedule == "eager-1f1b"

rows = [{"input_ids": [(5 * row + place) % 250 for place in range(16)]} for row in range(16)]
losses = {}
for name in ("1f1b", "eager-1f1b"):
    args = TrainingArguments(f"{sys.argv[1]}/{name}", max_steps=2, save_steps=0, logging_steps=1, learning_rate=1e-2)
    args.deepspeed_config = config(name)
    trainer = Trainer("tiny-llama", args, rows)
    trainer.train()
    losses[name] = [logs["loss"] for logs in trainer.state.log_history if "loss" in logs]
    trainer.close()
assert len(losses["1f1b"]) == 2 and losses["1f1b"] == losses["eager-1f1b"], losses
"""
USES = """
import sys
from harness import Trainer, TrainingArguments
from harness.checking import check, resolve
from harness.config import AutoValues
from harness.config.text.document import from_values
from harness.planner.estimate import of_config
from harness.planner.model_config import read_decoder

def config(name, **params):
    return {"train_batch_size": 4, "zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True,
            "optimizer": {"type": name, "params": params}}

def said(target, **params):
    return [each.code for each in check(from_values(config("Plain", **params)), target=target)]

assert said("harness", lr=0.1) == [], said("harness", lr=0.1)
assert "DS207" in said("harness", lr=0.1, damping=2.0) and "DS803" in said("harness", lr=0.1, momentum=0.9)
assert said("deepspeed", lr=0.1) == ["DS801"]

shape = read_decoder("tiny-llama")
values = AutoValues(hidden_size=shape.hidden)
workload, _ = of_config(resolve(from_values(config("Plain", lr=0.1)), values), shape, 16, on_cpu=True)
assert workload.states == workload.other_states == 0

rows = [{"input_ids": [(5 * row + place) % 250 for place in range(16)]} for row in range(16)]
losses = {}
for name in ("SGD", "Plain"):
    args = TrainingArguments(f"{sys.argv[1]}/{name}", max_steps=3, save_steps=0, logging_steps=1, learning_rate=0.5)
    args.deepspeed_config = config(name, lr=0.5)
    if name == "Plain":
        del args.deepspeed_config["optimizer"]
        args.optim = "plain"
    trainer = Trainer("tiny-llama", args, rows)
    trainer.train()
    losses[name] = [logs["loss"] for logs in trainer.state.log_history if "loss" in logs]
    trainer.close()
assert len(losses["SGD"]) == 3 and losses["SGD"] == losses["Plain"], losses
"""


USES_OF_FORMAT = """
import csv, json, os, sys
from pathlib import Path
here = Path(sys.argv[1])
os.environ["HF_DATASETS_CACHE"] = str(here / "cache")
from harness.train import main

rows = [{"text": f"row {row} has\\ttabs and {row * row}"} for row in range(60)]
with (here / "a.tsv").open("w", encoding="utf-8", newline="") as stream:
    writer = csv.DictWriter(stream, ["text"], dialect="excel-tab")
    writer.writeheader()
    writer.writerows(rows)
(here / "a.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))

def losses(name, *more):
    out = here / "runs" / (name + "".join(more))
    flags = {"model_name_or_path": "tiny-llama", "train_file": here / name, "output_dir": out, "block_size": 32,
             "max_steps": 2, "logging_steps": 1, "save_steps": 0, "per_device_train_batch_size": 2}
    assert main([word for flag, value in flags.items() for word in (f"--{flag}", str(value))] + list(more)) == 0
    logged = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [logs["loss"] for logs in logged if "loss" in logs]

for more in ((), ("--streaming",)):
    found = losses("a.tsv", *more)
    assert len(found) == 2 and found == losses("a.jsonl", *more), found
"""


(FORMAT, _) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/contributing/format.md").read_text(), re.S)
(SCHEDULE,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/contributing/schedule.md").read_text(), re.S)
TWO_RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("file", "content", "uses", "launcher"),
    [
        ("optimizers/plain.py", OPTIMIZER, USES, ()),
        ("preference_losses/hinge.py", LOSS_FILE, USES_OF_LOSS, ()),
        ("schedules/eager.py", SCHEDULE, USES_OF_SCHEDULE, TWO_RANKS),
        ("data/formats/tsv_format.py", FORMAT, USES_OF_FORMAT, ()),
    ],
    ids=["optimizer", "loss", "schedule", "data-format"],
)
def test_what_lies_in_a_file_of_its_own_is_checked_planned_and_trained_with(
    file: str, content: str, uses: str, launcher: tuple[str, ...], tmp_path: Path
) -> None:
    shutil.copytree(ROOT / "harness", tmp_path / "harness", copy_function=os.symlink, symlinks=True)
    for name in ("models", "ds_configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "harness" / file).write_text(content)
    (tmp_path / "uses.py").write_text(uses)
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, "uses.py", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
