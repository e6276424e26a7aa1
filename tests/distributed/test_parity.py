"""What no line of `compositions.txt` says: a start from a seed, a precision that a CPU lacks, a model of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING

from harness import UserError
from harness.verify.tiny_copy import tiny_config
from harness.verify.tiny_copy import tiny_model as tiny_copy
from tests.support.ranks import run_ranks
from tests.support.training import Job, reference, tiny_model, train, train_all, worst

pytestmark = pytest.mark.ranks

LOSS, NORM = 2e-6, 2e-5  # fp32 sums in another order: 5e-7 and 3e-7 were measured


@pytest.mark.parametrize(
    ("ranks", "layouts"),
    [
        (2, ("pp2z1", "tp2z0", "dp2z3")),
        pytest.param(4, ("pp2tp2z1", "tp4z0", "pp2dp2z1", "tp2dp2z3"), marks=pytest.mark.thorough),
    ],
    ids=["two", "four"],
)
def test_a_model_that_starts_from_the_seed_starts_alike_in_every_layout(
    ranks: int, layouts: tuple[str, ...], tmp_path: Path
) -> None:
    jobs = [Job("tiny-qwen3", layout) for layout in layouts]
    first, *others = run_ranks(ranks, train_all, jobs, str(tmp_path), timeout_s=300)[0]
    assert first[0][0] > 5  # nothing learnt yet: the logarithm of 258 ids
    for job, curve in zip(jobs[1:], others, strict=True):
        loss, norm = worst(curve, first)
        assert loss < LOSS and norm < NORM, job.layout


def shared_keys(path: Path) -> str:
    """Save a model whose last two layers take the keys and values of this rank's heads from the first two, which have
    left them in a mapping; it has four query heads and two key/value heads, fewer than ranks."""
    config = tiny_config("gemma4_text").to_dict()
    del config["per_layer_config"]
    layers = ["sliding_attention", "full_attention"] * 2
    config |= {"global_head_dim": 16, "num_kv_shared_layers": 2, "layer_types": layers}
    tiny_copy(CONFIG_MAPPING["gemma4_text"](**config)).save_pretrained(path)
    return str(path)


@pytest.mark.thorough
def test_layers_may_take_the_keys_of_others(tmp_path: Path) -> None:
    model = shared_keys(tmp_path / "m")
    jobs = [Job(model, layout) for layout in ("tp4z0", "tp2dp2z0", "tp2dp2z3")]
    curves = run_ranks(4, train_all, jobs, str(tmp_path), timeout_s=300)[0]
    wanted = reference(model)
    for job, curve in zip(jobs, curves, strict=True):
        loss, norm = worst(curve, wanted)
        assert loss < LOSS and norm < NORM, job.layout


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
