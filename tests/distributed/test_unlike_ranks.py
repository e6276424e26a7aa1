"""Ranks that differ, as their hosts do: what must be equal is refused on all of them, before any waits for another."""

from __future__ import annotations

import io
import re
import time
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import transformers
from deepspeed.pipe import LayerSpec
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from harness import Trainer, TrainingArguments
from harness.checkpoint import resumption
from harness.console import Console
from harness.device.process_group import shared_store
from harness.report.profile import clocks
from harness.topology.env import LaunchEnv
from harness.topology.rendezvous import require_one_kind
from harness.verify import sharding
from tests.support.ranks import run_ranks
from tests.support.training import Job, arguments_of, rows, tiny_model
from tests.support.workers import refusal_of

pytestmark = pytest.mark.ranks


class Unlike(nn.Linear):
    """A layer of random numbers of its own."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        super().__init__(4, 4)


def own_layers(folder: str) -> tuple[list[float], list[str], bool]:
    """Losses of layers that each rank made for itself; what is said of a factory that differs between ranks, and of a
    layer that one rank made and the other did not; and whether all ranks are known to be on one host."""
    rank = dist.get_rank()
    config = {"train_batch_size": 8, "zero_optimization": {"stage": 1}}
    data = [(torch.full((4,), float(i)), torch.ones(4)) for i in range(8)]

    def begin(layers: list[Any], config: dict[str, Any]) -> Trainer:
        settings = TrainingArguments(deepspeed_config=config, output_dir=folder, max_steps=2, save_steps=0)
        return Trainer(layers, settings, data, loss_fn=nn.functional.mse_loss)

    losses, one_host = [], True
    for layout in ({"pipeline": {"stages": 2}}, {"tensor_parallel": {"autotp_size": 2}}, {}):
        trainer = begin([Unlike(rank), torch.tanh, Unlike(rank + 2)], {**config, **layout})
        losses.append(trainer.training_step().loss)
        one_host &= trainer.run.engine_state.one_host
        trainer.close()
    tensor = {**config, "tensor_parallel": {"autotp_size": 2}}
    refused = [refusal_of(lambda: begin([LayerSpec(Unlike, rank), nn.Linear(4, 4)], tensor))]
    refused.append(refusal_of(lambda: begin([LayerSpec(Unlike, 0) if rank else Unlike(0)], tensor)))
    return losses, refused, one_host


def refusals(models: list[str], folder: str) -> dict[str, str]:
    """What a Trainer says where rank 1 has something else than rank 0, by what that is."""
    whole, empty, other = models
    is_first = dist.get_rank() == 0
    config = AutoConfig.from_pretrained(whole)
    edited, deeper = (
        AutoConfig.from_pretrained(whole, **new) for new in ({"rms_norm_eps": 0.1}, {"num_hidden_layers": 3})
    )

    def said(model: Any, layout: str = "dp2z1", **arguments: Any) -> str:
        words = io.StringIO()
        settings = arguments_of(Job("", layout), f"{folder}/{layout}", **arguments)
        console = Console(out=words, error=words, speaks=True)
        return refusal_of(lambda: Trainer(model, settings, rows(), console=console).close()) or words.getvalue()

    found = {
        "missing, stages": said(whole if is_first else empty, "pp2z1"),
        "missing, shards": said(whole if is_first else empty, "dp2z3"),
        "weights": said(whole if is_first else other),
        "config": said(config if is_first else edited),
        "depth": said(config if is_first else deeper, "pp2z1"),
        "memory": said(AutoModelForCausalLM.from_config(config) if is_first else config),
    }
    with patch.object(transformers, "__version__", transformers.__version__ if is_first else "5.0.0"):
        found["versions"] = said(config)
    with patch.object(sharding, "is_tested", lambda *_, **__: is_first):
        found["matrix"] = re.sub(r"[\d.]+ s\)", ")", said(config, verify_plan="auto"))  # each rank's own seconds
    denied = PermissionError(1, "Operation not permitted", "checkpoint-9")
    with patch.object(resumption, "set_aside_foreign", side_effect=denied if is_first else None, return_value=[]):
        found["checkpoint"] = said(config, resume_from_checkpoint="auto")
    env, store = LaunchEnv(rank=dist.get_rank(), world_size=2), shared_store()
    found["one kind"] = refusal_of(lambda: require_one_kind(dist.PrefixStore("one", store), env, "cpu"))
    kind = "cuda" if is_first else "cpu"
    found["two kinds"] = refusal_of(lambda: require_one_kind(dist.PrefixStore("two", store), env, kind))
    return found


def offsets() -> list[float]:
    """How far apart the clocks of two hosts are, asked twice; the first host is slow to answer."""
    answer = clocks.answer

    def slowly(*asked: Any) -> None:
        time.sleep(0.2)
        answer(*asked)
        time.sleep(0.2)

    with (
        patch.object(clocks, "host_id", lambda: f"host {dist.get_rank()}"),
        patch.object(clocks, "answer", slowly),
    ):
        return [clocks.offset_to_first().seconds for _ in range(2)]


def tour(models: list[str], folder: str) -> tuple[Any, dict[str, str], list[float]]:
    return own_layers(folder), refusals(models, folder), offsets()


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, dict[str, str], list[float]]]:
    folder = tmp_path_factory.mktemp("unlike")
    models = [tiny_model(folder / name, "llama", False) for name in ("whole", "empty", "other")]
    (folder / "empty" / "model.safetensors").unlink()
    file = folder / "other" / "model.safetensors"
    content = bytearray((folder / "whole" / file.name).read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    return run_ranks(2, tour, models, str(folder / "runs"))


def test_layers_made_without_a_seed_are_one_model_and_a_factory_that_differs_is_told(seen: Any) -> None:
    (first, _, _), (second, _, _) = seen
    assert first == second
    losses, (message, made_by_one), one_host = first
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)
    assert "rank 1 has different values of 0.weight than rank 0" in message or "0.bias" in message
    assert "rank 1 has another model in memory (names, shapes, what is trained) than rank 0" in made_by_one
    assert one_host


def test_what_differs_between_ranks_is_told_on_all_of_them(seen: Any) -> None:
    (_, first, _), (_, second, _) = seen
    assert first == second
    mend = ": give every host the same files and arguments"
    origin = "rank 1 has another origin of the weights (files, memory or seed) than rank 0"
    files = "rank 1 has another set of weight files than rank 0"
    assert first["missing, stages"] == first["missing, shards"] == f"{origin}; {files}{mend}"
    assert first["weights"] == files + mend
    assert first["memory"] == origin + mend
    assert first["config"] == first["depth"] == f"rank 1 has another model config than rank 0{mend}"
    versions = "rank 1 has another set of versions (torch, transformers, DeepSpeed) than rank 0"
    assert first["versions"] == versions + mend
    assert "verified: the sharded model matches the whole one" in first["matrix"]
    assert first["checkpoint"] == "checkpoint-9: Operation not permitted"
    assert first["one kind"] == ""
    assert "of different kinds, cpu on rank 1 (host " in first["two kinds"] and "cuda on rank 0" in first["two kinds"]


def test_clocks_are_compared_anew_each_time(seen: Any) -> None:
    assert [offset for *_, found in seen for offset in found] == pytest.approx([0.0] * 4, abs=0.1)
