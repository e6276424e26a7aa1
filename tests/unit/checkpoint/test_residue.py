"""What rounding has taken from gradients goes on in the same layout alone, and a damaged file of it is one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from harness.checkpoint.training_state import describe, load_residue, residue_file, write_residue
from harness.errors import UserError
from harness.extras.compression.quantization import BLOCK
from harness.extras.compression.reduction import ALIGNED, EXACT, PACKED, CompressedReduction
from tests.unit.training.full_disk import full_disk

pytestmark = pytest.mark.usefixtures("groups")
LAYOUT = "pp1 x dp1 x tp1"


def reduction(bits: int = 4, sizes: tuple[int, ...] = (5, BLOCK + 1, 3)) -> CompressedReduction:
    world = dist.group.WORLD
    assert world is not None
    return CompressedReduction(
        bits=bits, group=world, device=torch.device("cpu"), sizes=sizes, kinds=(PACKED, ALIGNED, EXACT)
    )


def gradients(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator) for size in (5, BLOCK + 1, 3)]


def averaged(by: CompressedReduction, seeds: range, scale: float = 1.0) -> list[list[torch.Tensor]]:
    found = []
    for seed in seeds:
        by.average(values := gradients(seed), scale)
        found.append(values)
    return found


def saved(folder: Path, of: CompressedReduction, layout: str = LAYOUT) -> None:
    write_residue(folder, of.state(), describe(of, layout))


def loaded(reduction: CompressedReduction | None, folder: Path) -> bool:
    """Go on from all files of a folder."""
    return load_residue(reduction, folder, LAYOUT, [path.name for path in folder.iterdir()])


@pytest.mark.parametrize("bits", [4, 8])
def test_a_run_goes_on_with_what_was_lost_to_the_bit(bits: int, tmp_path: Path) -> None:
    old, new = reduction(bits), reduction(bits)
    averaged(old, range(3), scale=8.0)
    saved(tmp_path, old)
    assert loaded(new, tmp_path)
    for ours, theirs in zip(averaged(new, range(3, 5), scale=2.0), averaged(old, range(3, 5), scale=2.0), strict=True):
        assert all(map(torch.equal, ours, theirs))
    fresh = averaged(reduction(bits), range(3, 5))
    assert not torch.equal(fresh[0][0], averaged(old, range(3, 4))[0][0])  # what was lost does make a difference


@pytest.mark.parametrize(
    ("of", "layout"),
    [
        pytest.param(lambda: reduction(8), LAYOUT, id="other bits"),
        pytest.param(lambda: reduction(sizes=(6, BLOCK, 3)), LAYOUT, id="other gradients"),
        pytest.param(reduction, "pp2 x dp1 x tp1", id="another layout"),
    ],
)
def test_what_belongs_to_others_is_left_out_and_told(
    of: Callable[[], CompressedReduction], layout: str, tmp_path: Path
) -> None:
    saved(tmp_path, of(), layout)
    ours = reduction()
    averaged(ours, range(2))
    assert not loaded(ours, tmp_path)
    assert all(map(torch.equal, averaged(ours, range(1))[0], averaged(reduction(), range(1))[0]))  # it begins anew


def test_without_a_file_there_is_nothing_to_go_on_from(tmp_path: Path) -> None:
    assert not loaded(reduction(), tmp_path)
    assert loaded(None, tmp_path)  # a run that compresses nothing misses nothing
    saved(tmp_path, reduction())
    assert loaded(None, tmp_path)


def test_a_file_that_is_not_listed_is_not_read(tmp_path: Path) -> None:
    saved(tmp_path, reduction())
    assert not load_residue(reduction(), tmp_path, LAYOUT, ["state.json"])


def test_a_file_of_somebody_else_is_left_out(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(1)}, residue_file(tmp_path))  # without a word of what it is
    assert not loaded(reduction(), tmp_path)


@pytest.mark.parametrize("content", [b"", b"x" * 100, b"\xff" * 8], ids=["empty", "no header", "an endless header"])
def test_a_damaged_file_is_one_line(content: bytes, tmp_path: Path) -> None:
    residue_file(tmp_path).write_bytes(content)
    with pytest.raises(UserError, match=rf"{residue_file(tmp_path)}: cannot be read: ") as told:
        loaded(reduction(), tmp_path)
    assert "\n" not in str(told.value)


def test_a_folder_in_its_place_is_one_line(tmp_path: Path) -> None:
    residue_file(tmp_path).mkdir()
    with pytest.raises(UserError, match=r"safetensors: cannot be read: "):
        loaded(reduction(), tmp_path)


def test_what_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"missing/gradient_residue-00000\.safetensors: cannot be written: "):
        saved(tmp_path / "missing", reduction())
    with full_disk(200), pytest.raises(UserError, match=r"cannot be written: .*File too large"):
        saved(tmp_path, reduction())
