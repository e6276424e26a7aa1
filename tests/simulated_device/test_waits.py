"""A steady step waits once for the device for its own purposes, and for DeepSpeed no more often than is said here."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ranks import run_ranks
from tests.support.simulated_device.waiting import is_own, waits_beside_steps, waits_of_all
from tests.support.training import Job, tiny_model

pytestmark = pytest.mark.ranks

# in a step, on the rank that waits most often. ZeRO-2: the norm, before the update. ZeRO-3 besides: the end of each
# backward pass, the mark of a norm that is not finite for each group of parameters, the small parameters that all keep
OF_DEEPSPEED = {"pp2z0": 0, "tp2z0": 0, "tp2z1": 0, "tp2z2": 2, "dp2z2": 1, "dp2z3": 6}
IN_BF16 = {"pp2z1": 0, "dp2z1": 0}


FIRST = ("dp2z3", "pp2z1")
OTHERS = tuple(layout for layout in (*OF_DEEPSPEED, *IN_BF16) if layout not in FIRST)


@pytest.mark.thorough
@pytest.mark.parametrize("layouts", [FIRST, OTHERS], ids=["first", "others"])
def test_a_step_waits_once_for_the_device(layouts: tuple[str, ...], tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "llama", "llama", False)
    bf16 = {"bf16": {"enabled": True}}
    jobs = [Job(model, layout, bf16 if layout in IN_BF16 else {}) for layout in layouts]
    found = run_ranks(2, waits_of_all, jobs, str(tmp_path), timeout_s=400)
    for rank in found:
        for job, waits in zip(jobs, rank, strict=True):
            own = sum(count for place, count in waits.items() if is_own(place))
            assert own == 1, (job.layout, waits)
            most = (IN_BF16 if job.config else OF_DEEPSPEED)[job.layout]
            assert sum(waits.values()) - own <= most, (job.layout, waits)


def beside_steps(models: list[str], folder: str) -> list[dict[str, dict[str, int]]]:
    return [waits_beside_steps(Job(model, "pp1z1"), folder) for model in models]


def test_loading_and_saving_wait_no_more_often_for_more_parameters(tmp_path: Path) -> None:
    models = [tiny_model(tmp_path / f"{n}", "llama", False, num_hidden_layers=n) for n in (2, 4)]
    ((small, large),) = run_ranks(1, beside_steps, models, str(tmp_path))
    for what in ("train", "save", "export"):
        assert sum(small[what].values()) == sum(large[what].values()), (what, small[what], large[what])
    unpinned = [place for waits in large.values() for place in waits if "pageable" in place or "tensor_files" in place]
    assert unpinned == []
    assert sum(large["export"].values()) == 2, large["export"]
    assert sum(large["save"].values()) < 15, large["save"]
