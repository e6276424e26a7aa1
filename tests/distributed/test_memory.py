"""No rank builds more than it keeps: its peak while it builds is its share of the model, not the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from harness.models.causal import assemble
from harness.models.skeleton import ModelSource, read_source
from harness.parallel.comm import TensorParallel
from harness.parallel.staged import build_layers
from harness.topology.groups import build_groups
from harness.topology.layout import Layout
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.ranks

MARGIN = 1.3  # over the share: what is read or drawn at once, and the interpreter's own growth
ONE_LAYER = 12_600_000 * 4  # bytes of one decoder layer below, which is drawn whole before it is cut


def resident_bytes(which: str) -> int:
    """`VmHWM`, the most this process has held since the last reset, or `VmRSS`, what it holds."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(which):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {which}")


def build(model_dir: str | None) -> tuple[int, int, int]:
    """Peak bytes above the start, bytes kept, bytes of the whole model."""
    groups = build_groups(Layout(pipeline=2, tensor=2))
    source = read_source(model_dir) if model_dir else ModelSource(name="llama", config=config(), weights=None)
    causal = assemble(
        source,
        tensor=TensorParallel.of(groups.tensor),
        device=torch.device("cpu"),
        dtype=torch.float32,
        seed=0,
        finish=lambda layer: None,
    )
    middle = len(causal.layers) // 2
    start, stop = (0, middle) if groups.is_first_stage else (middle, len(causal.layers))
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = resident_bytes("VmRSS")
    built = build_layers(causal.layers, start, stop, seed=0)
    peak = resident_bytes("VmHWM") - before
    kept = sum(p.numel() * 4 for module in built.modules.values() for p in module.parameters())
    return peak, kept, 4 * sum(causal.parameter_counts())


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


def test_a_rank_that_initialises_holds_its_share_and_one_layer() -> None:
    for peak, kept, whole in run_ranks(4, build, None):
        assert kept < 0.35 * whole
        assert peak < MARGIN * kept + ONE_LAYER < 0.6 * whole


def test_a_rank_that_reads_holds_its_share(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(config()).save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert len(list(file.keys())) > 50
    for peak, kept, whole in run_ranks(4, build, str(tmp_path)):
        assert kept < 0.35 * whole
        assert peak < MARGIN * kept
