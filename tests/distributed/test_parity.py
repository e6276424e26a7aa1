"""The layout never changes the numbers: every layout against plain torch in one process, from the same weights."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from harness import UserError
from harness.hf.verify.tiny_copy import tiny_config
from harness.hf.verify.tiny_copy import tiny_model as tiny_copy
from tests.distributed.ranks import run_ranks
from tests.distributed.training import Job, reference, tiny_model, train, train_all, worst

pytestmark = pytest.mark.ranks

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "olmo2", "gemma2", "gpt2", "bloom")
LOSS, NORM = 2e-6, 2e-5  # fp32 sums in another order: 5e-7 and 3e-7 were measured


def interval(stages: int, layers: int, schedule: str = "1f1b") -> dict[str, Any]:
    """A config that stores activations every `layers` layers; 0: recomputes nothing."""
    return {"pipeline": {"stages": stages, "activation_checkpoint_interval": layers, "schedule": schedule}}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], str]:
    folder = tmp_path_factory.mktemp("models")
    return {
        (family, tied): tiny_model(folder / f"{family}-{tied}", family, tied)
        for family in FAMILIES
        for tied in (False, True)
    }


def check(jobs: list[Job], ranks: int, folder: Path) -> None:
    curves = run_ranks(ranks, train_all, jobs, str(folder), timeout_s=400)[0]
    wrong = []
    for job, curve in zip(jobs, curves, strict=True):
        loss, norm = worst(curve, reference(job.model, masked=job.masked))
        if loss > LOSS or norm > NORM:
            wrong.append(f"{Path(job.model).name} {job.layout} {job.config}: loss {loss:.1e}, norm {norm:.1e}")
    assert not wrong


def test_every_family_tied_and_untied_on_four_ranks(models: dict[tuple[str, bool], str], tmp_path: Path) -> None:
    # pairs of family, layout, tying and recomputation are all covered, not every combination of the four
    # (zero-bubble computes as 1F1B does, and more; 1F1B has the other tests)
    jobs = []
    for index, family in enumerate(FAMILIES):
        tied, recomputed = bool(index % 2), index // 2 % 2
        jobs.append(Job(models[family, tied], "pp2tp2z1", interval(2, recomputed, "zero-bubble")))
        jobs.append(Job(models[family, not tied], "tp2dp2z3", interval(1, 1 - recomputed)))
    check(jobs, 4, tmp_path)


def shared_keys(path: Path) -> str:
    """Save a model whose last two layers take the keys and values of this rank's heads from the first two, which have
    left them in a mapping; it has four query heads and two key/value heads."""
    config = tiny_config("gemma4_text").to_dict()
    del config["per_layer_config"]
    layers = ["sliding_attention", "full_attention"] * 2
    config |= {"global_head_dim": 16, "num_kv_shared_layers": 2, "layer_types": layers}
    tiny_copy(CONFIG_MAPPING["gemma4_text"](**config)).save_pretrained(path)
    return str(path)


def test_the_other_layouts_on_two_ranks(models: dict[tuple[str, bool], str], tmp_path: Path) -> None:
    # each layout with tied and with untied weights; what a family has of its own is cut on four ranks
    layouts = ("pp2z0", "pp2z1", "tp2z0", "tp2z2", "dp2z1", "dp2z2", "dp2z3")
    jobs = [Job(models[family, True], layout) for family, layout in zip(cycle(("llama", "gemma2", "gpt2")), layouts)]
    jobs += [Job(models["qwen3", False], layout) for layout in layouts]
    plain = tiny_model(tmp_path / "plain", "olmo2", False, num_hidden_layers=4)
    jobs += [
        Job(plain, "pp2z1", interval(2, 0)),
        Job(plain, "tp2z1", interval(1, 0)),
        Job(plain, "pp2z1", {"pipeline": {"stages": 2, "activation_checkpoint_interval": 2, "partition": "uniform"}}),
        Job(plain, "pp2z1", {"pipeline": {"stages": 2, "partition": "measured"}}),
        Job(plain, "pp2z1", {"pipeline": {"stages": 2, "partition": "type:DecoderLayer"}}),
        Job(plain, "dp2z3", interval(1, 0)),
        # small parameters stay with every rank unless this says otherwise: here none does
        Job(plain, "dp2z3", {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}),
        Job(plain, "tp2z1", {"activation_checkpointing": {"partition_activations": True}}),
        Job(
            plain,
            "tp2z1",
            {"activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": True}},
        ),
        Job(
            plain,
            "dp2z3",
            {
                "zero_optimization": {
                    "stage": 3,
                    "offload_optimizer": {"device": "cpu"},
                    "offload_param": {"device": "cpu"},
                }
            },
        ),
    ]
    shared = shared_keys(tmp_path / "shared")
    jobs += [Job(shared, layout, arguments={"verify_plan": "off"}) for layout in ("tp2z0", "tp2z3")]
    check(jobs, 2, tmp_path)


def test_masked_labels_weigh_the_same_in_every_layout(models: dict[tuple[str, bool], str], tmp_path: Path) -> None:
    model = models["llama", False]
    jobs = [Job(model, layout, masked=True) for layout in ("pp2dp2z1", "pp2tp2z1", "tp2dp2z2")]
    measured = {"pipeline": {"stages": 2, "partition": "measured", "activation_checkpoint_interval": 1}}
    check([*jobs, Job(model, "pp2tp2z1", measured, masked=True)], 4, tmp_path)


def test_a_model_that_starts_from_the_seed_starts_alike_in_every_layout(tmp_path: Path) -> None:
    jobs = [Job("tiny-qwen3", layout) for layout in ("pp2tp2z1", "tp4z0", "pp2dp2z1", "tp2dp2z3")]
    first, *others = run_ranks(4, train_all, jobs, str(tmp_path), timeout_s=300)[0]
    assert first[0][0] > 5  # nothing learnt yet: the logarithm of 258 ids
    for job, curve in zip(jobs[1:], others, strict=True):
        loss, norm = worst(curve, first)
        assert loss < LOSS and norm < NORM, job.layout


def test_all_three_axes_on_eight_ranks(models: dict[tuple[str, bool], str], tmp_path: Path) -> None:
    schedules = {"llama": "gpipe", "gemma2": "zero-bubble"}
    jobs = [Job(models[family, True], "pp2tp2dp2z1", interval(2, 0, name)) for family, name in schedules.items()]
    check([*jobs, Job(models["bloom", True], "pp2tp2dp2z0")], 8, tmp_path)


def test_key_value_heads_fewer_than_ranks_and_a_vocabulary_that_does_not_divide(tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "m", "llama", True, vocab_size=319, num_key_value_heads=2)
    taken = Job(shared_keys(tmp_path / "shared"), "tp4z0", arguments={"verify_plan": "off"})
    check([Job(path, "tp4z1"), Job(path, "tp4z3"), Job(path, "pp2tp2z1"), taken], 4, tmp_path)


def test_bf16_follows_one_process_within_a_percent(tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "m", "llama", True)
    section = {"bf16": {"enabled": True}}
    jobs = [Job(path, layout, section) for layout in ("pp2z1", "tp2z1", "dp2z3", "pp2z0")]
    curves = run_ranks(2, train_all, jobs, str(tmp_path), timeout_s=300)[0]
    wanted = reference(path, dtype=torch.bfloat16)
    for job, curve in zip(jobs, curves, strict=True):
        loss, norm = worst(curve, wanted)
        assert loss < 0.01 and norm < 0.05, (job.layout, loss, norm)


def precisions(model: str, folder: str) -> list[str]:
    """What the Trainer says to fp16; on a CPU, DeepSpeed has none."""
    try:
        curve = train(Job(model, "dp1z1", {"fp16": {"enabled": True, "initial_scale_power": 8}}), folder)
    except UserError as error:
        return [str(error)]
    return [str(loss) for loss, _ in curve]


def test_fp16_trains_or_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "m", "llama", False)
    (said,) = run_ranks(1, precisions, path, str(tmp_path))
    assert len(said) == 3 or said == ["fp16 is not supported on this cpu: use bf16 or fp32"]
