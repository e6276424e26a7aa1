"""The CSV tables of a run: its own rows, and nothing of what others have in the folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.extras.monitors import Monitors

HEADER = "step,loss\n"


def monitors(folder: Path, first_step: int = 1) -> Monitors:
    return Monitors({"csv_monitor": {"output_path": str(folder), "job_name": "csv"}}, "run", first_step)


def text(path: Path) -> str:
    return path.read_text().replace("\r\n", "\n")


def test_tensorboard_gets_no_secret_of_a_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghij")
    ours = Monitors({"tensorboard": {"output_path": str(tmp_path), "job_name": "events"}}, "run", 1)
    ours.write_text("samples/1", "the token is hf_abcdefghij", 1)
    ours.close()
    (events,) = (tmp_path / "events").iterdir()
    assert b"the token is ***" in events.read_bytes()


def test_a_table_is_not_written_where_a_link_leads(tmp_path: Path) -> None:
    (tmp_path / "csv").mkdir()
    (tmp_path / "csv" / "train_loss.csv").symlink_to(tmp_path / "theirs")
    with pytest.warns(UserWarning, match=r"train_loss\.csv is a link: remove it; training continues"):
        monitors(tmp_path).write({"train/loss": 5.0}, 1)
    assert not (tmp_path / "theirs").exists()


def test_a_fresh_start_leaves_the_tables_of_others_alone(tmp_path: Path) -> None:
    folder = tmp_path / "csv"
    folder.mkdir()
    others = {"prices.csv": "year,price\n2024,3\n", "train_other.csv": "1,2\n", "eval_loss.csv": HEADER + "1,9\n"}
    for name, content in {**others, "train_loss.csv": HEADER + "1,7\n2,6\n"}.items():
        (folder / name).write_text(content)
    ours = monitors(tmp_path)
    ours.write({"train/loss": 5.0}, 1)
    ours.write({"train/loss": 4.0}, 2)
    assert {name: text(folder / name) for name in others} == others
    assert text(folder / "train_loss.csv") == HEADER + "1,5.0\n2,4.0\n"
    assert text(folder / "train_loss.1.csv") == HEADER + "1,7\n2,6\n"  # of an earlier run


def test_a_resumed_run_drops_the_rows_that_it_makes_again(tmp_path: Path) -> None:
    folder = tmp_path / "csv"
    folder.mkdir()
    (folder / "train_loss.csv").write_text(HEADER + "1,7\n2,6\n3,5\n")
    (folder / "eval_loss.csv").write_text("my own\n5,5\n")
    (folder / "train_grad_norm.csv").write_bytes(b"\xff\xfe")
    ours = monitors(tmp_path, first_step=3)
    ours.write({"train/loss": 4.0, "eval/loss": 1.0, "train/grad_norm": 2.0}, 3)
    assert text(folder / "train_loss.csv") == HEADER + "1,7\n2,6\n3,4.0\n"
    assert text(folder / "eval_loss.csv") == HEADER + "3,1.0\n"
    assert text(folder / "eval_loss.1.csv") == "my own\n5,5\n" and (folder / "train_grad_norm.1.csv").exists()
    ours.rewind(1)
    assert text(folder / "train_loss.csv") == HEADER + "1,7\n" and text(folder / "eval_loss.csv") == HEADER
    ours.write({"train/loss": 3.0}, 2)
    assert text(folder / "train_loss.csv") == HEADER + "1,7\n2,3.0\n"


def test_a_monitor_that_fails_in_its_own_way_ends_no_run(tmp_path: Path) -> None:
    class Broken:
        def log(self, *_: object, **__: object) -> None:
            raise ConnectionError("the service is down")

        def finish(self) -> None:
            raise RuntimeError("its process has died")

    ours = monitors(tmp_path)
    ours._wandb = Broken()  # type: ignore[assignment]
    with pytest.warns(UserWarning, match="W&B's run cannot be written: ConnectionError: the service is down; training"):
        ours.write({"train/loss": 5.0}, 1)
    assert text(tmp_path / "csv" / "train_loss.csv") == HEADER + "1,5.0\n"
    with pytest.warns(UserWarning, match="W&B's run cannot be written: RuntimeError: its process has died"):
        ours.close()
