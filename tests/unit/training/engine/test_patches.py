"""The changes of a DeepSpeed engine stand in an order that fits what each of them needs."""

from __future__ import annotations

from harness.training.engine.patches import BUILD_PATCHES, PATCHES


def test_each_patch_has_a_name_of_its_own_and_a_reason() -> None:
    patches = [*BUILD_PATCHES, *PATCHES]
    assert len({patch.name for patch in patches}) == len(patches) > 10
    assert all(len(patch.why) > 30 for patch in patches)


def test_each_patch_stands_behind_those_that_it_needs() -> None:
    seen: set[str] = set()
    for patch in PATCHES:
        assert set(patch.after) <= seen, f"{patch.name} needs {set(patch.after) - seen} before it"
        seen.add(patch.name)
