"""No rank builds more than it keeps: its peak while it builds is its share of the model, not the model.

While it writes the model, it takes next to nothing: each rank copies its own part to its place in the files.
"""

from __future__ import annotations

import filecmp
from pathlib import Path

import pytest
import torch.distributed as dist
from safetensors import safe_open
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from harness.checkpoint.exporting.weights import export_weights
from harness.checkpoint.tensors.tensor_writer import BLOCK_BYTES
from harness.hf.skeleton import ModelSource, read_source
from harness.hf.weights.initialization import PIECE_BYTES
from harness.parallel.comm import TensorParallel
from harness.parallel.pipeline.staged_module import build_layers
from harness.topology.groups import build_groups
from harness.topology.layout import Layout
from tests.support.layers import prepare
from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.thorough]

MARGIN = 1.3  # over the share: what is read or drawn at once, and the interpreter's own growth
ONE_MORE = 24 << 20  # beside the block that is copied: what torch and Python allocate for themselves


def resident_bytes(which: str) -> int:
    """`VmHWM`, the most this process has held since the last reset, or `VmRSS`, what it holds."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(which):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {which}")


def build(model_dir: str | None, out: str | None = None) -> tuple[int, int, int, int]:
    """Peak bytes above the start while building, bytes kept, bytes of the whole model, peak bytes while writing it."""
    groups = build_groups(Layout(pp_size=2, tp_size=2))
    source = read_source(model_dir) if model_dir else ModelSource(name="llama", config=config(), weights=None)
    causal = prepare(source, TensorParallel.of(groups.tp_group))
    middle = len(causal.layers) // 2
    start, stop = (0, middle) if groups.is_first_stage else (middle, len(causal.layers))
    dist.barrier()
    before = forget_peak()
    built = build_layers(causal.layers, start, stop, seed=0)
    peak = resident_bytes("VmHWM") - before
    kept = sum(p.numel() * 4 for module in built.modules.values() for p in module.parameters())
    before = forget_peak()
    if out is not None:
        module = nn.ModuleDict({str(index): layer for index, layer in built.modules.items()})
        export_weights(module, groups, Path(out), rename=lambda name: name.partition(".")[2], form=causal.form)
    return peak, kept, 4 * sum(causal.parameter_counts()), resident_bytes("VmHWM") - before


def forget_peak() -> int:
    """Let the most that this process has held begin anew; what it holds now."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident_bytes("VmRSS")


def config() -> object:
    return CONFIG_MAPPING["llama"](
        vocab_size=8000,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=6,
        num_attention_heads=16,
        num_key_value_heads=8,
        max_position_embeddings=128,
    )


def test_a_rank_that_initialises_holds_its_share_and_one_piece() -> None:
    for peak, kept, whole, _ in run_ranks(4, build, None):
        assert kept < 0.35 * whole
        assert peak < MARGIN * kept + PIECE_BYTES < 0.5 * whole


def test_a_rank_that_reads_holds_its_share_and_one_that_writes_no_more(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    AutoModelForCausalLM.from_config(config()).save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert len(list(file.keys())) > 50
    for peak, kept, whole, writing in run_ranks(4, build, str(tmp_path), str(out)):
        assert kept < 0.35 * whole
        assert peak < MARGIN * kept
        assert writing < BLOCK_BYTES + ONE_MORE
    assert filecmp.cmp(tmp_path / "model.safetensors", out / "model.safetensors", shallow=False)
