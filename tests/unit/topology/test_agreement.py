"""Who is told to differ, and what moves a digest; the collective itself is tested on real ranks."""

from pathlib import Path

import pytest

from harness.topology.agreement import check_agreement, code_version, disagreement, json_digest, tree_digest
from harness.topology.layout import Layout


@pytest.mark.parametrize(
    ("held", "told"),
    [
        ("aaaa", None),
        ("a", None),
        ("aaba", "rank 2 has another config than the other 3 ranks (rank 0, ...)"),
        ("baaa", "rank 0 has another config than the other 3 ranks (rank 1, ...)"),
        ("abbaaab", "ranks 1-2, 6 have another config than the other 4 ranks (rank 0, ...)"),
        ("ab", "rank 1 has another config than rank 0"),
        ("abba", "ranks 1-2 have another config than the other 2 ranks (rank 0, ...)"),
        ("abc", "ranks 1-2 have another config than rank 0"),
        ("abbcc", "ranks 0, 3-4 have another config than the other 2 ranks (rank 1, ...)"),
    ],
)
def test_the_majority_is_right_and_ties_go_to_rank_0(held: str, told: str | None) -> None:
    assert disagreement("config", held) == told


def test_a_digest_depends_on_content_and_not_on_the_order_of_keys() -> None:
    assert json_digest({"a": 1, "b": {"c": [1, 2], "d": None}}) == json_digest({"b": {"d": None, "c": [1, 2]}, "a": 1})
    assert json_digest({"a": 1}) != json_digest({"a": 2})
    assert json_digest({"a": [1, 2]}) != json_digest({"a": [2, 1]})
    with pytest.raises(TypeError):
        json_digest({"a": Path()})


def test_code_its_tables_and_plans_move_the_code_digest_and_nothing_else_does(tmp_path: Path) -> None:
    root, models = tmp_path / "package", tmp_path / "models"
    (models / "plans").mkdir(parents=True)
    root.mkdir()
    (root / "models").symlink_to(models)
    (root / "part").mkdir()
    (root / "part" / "__init__.py").touch()
    seen = {tree_digest(root)}
    for path in (root / "a.py", models / "b.py", models / "plans" / "c.json", root / "part" / "table.json"):
        for text in ("one", "two"):
            path.write_text(text)
            assert tree_digest(root) not in seen
            seen.add(tree_digest(root))
    before = tree_digest(root)
    (root / "notes.md").write_text("no code")
    (models / "preset.json").write_text("{}")
    (root / "__pycache__").mkdir()
    (root / "__pycache__" / "a.pyc").write_bytes(b"\0")
    assert tree_digest(root) == before
    (root / "a.py").rename(root / "z.py")
    assert tree_digest(root) != before


def test_the_same_code_has_the_same_digest_in_whatever_order_it_was_written(tmp_path: Path) -> None:
    names = ["b", "a", "c", "e", "d"]
    for root, order in (("first", names), ("second", names[::-1])):
        for name in order:
            (tmp_path / root / name).mkdir(parents=True)
            (tmp_path / root / name / "code.py").write_text(name)
    assert tree_digest(tmp_path / "first") == tree_digest(tmp_path / "second")


def test_the_code_version_names_the_release_and_a_digest() -> None:
    release, tree = code_version().rsplit(" ", 1)
    assert release[0].isdigit() and len(bytes.fromhex(tree)) == 32


def test_one_process_agrees_with_itself() -> None:
    check_agreement({"train_batch_size": 8}, Layout())
