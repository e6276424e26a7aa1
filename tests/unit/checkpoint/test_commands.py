"""`ds-harness checkpoint`: what it prints of a whole checkpoint, and of a damaged one."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.checkpoint.directories import TrainingProgress, contents, finish, partial_name
from harness.cli import main


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    partial = tmp_path / partial_name(20)
    partial.mkdir()
    (partial / "model.safetensors").write_bytes(b"weights")
    stated = dict(layout="pp2 x dp1 x tp1", zero_stage=1, precision="bf16", seed=1, data="", optimizer="AdamW")
    progress = TrainingProgress(step=20, consumed_samples=1600, model="6 layers", counters={"step": 19.0}, **stated)
    return finish(tmp_path, progress, contents(partial))


def test_show_says_where_the_run_stood(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "show", str(saved)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == [
        "step 20, 1,600 samples consumed",
        "saved with pp2 x dp1 x tp1, ZeRO-1, bf16; any other can resume it",
        "model: 6 layers",
        "optimizer: AdamW, step 19",
    ]
    assert [line.split()[-1] for line in lines[4:]] == ["model.safetensors", "state.json"]


def test_verify_finds_a_flipped_bit(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "verify", str(saved)]) == 0
    assert "2 files" in capsys.readouterr().out
    (saved / "model.safetensors").write_bytes(b"weightr")
    assert main(["checkpoint", "verify", str(saved)]) == 1
    said = capsys.readouterr().err.splitlines()
    assert said == [f"ds-harness checkpoint: {saved} is damaged: model.safetensors differs from what was saved"]


def test_verify_finds_a_file_that_was_not_saved(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (saved / ".hidden").write_bytes(b"")  # as network file systems and desktops leave them
    assert main(["checkpoint", "verify", str(saved)]) == 0
    (saved / "deep").mkdir()
    (saved / "deep/model-00001-of-00001.safetensors").write_bytes(b"planted")
    assert main(["checkpoint", "verify", str(saved)]) == 1
    words = f"{saved} contains deep/model-00001-of-00001.safetensors, which it was not saved with"
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["show", "/nowhere"], "no whole checkpoint there (no such directory)"),
        (["export", "{saved}", "--output_dir", "out"], "a list of layers is not a HuggingFace model"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    arguments: list[str], words: str, saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoint", *(each.format(saved=saved) for each in arguments)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


@pytest.mark.parametrize("arguments", [["export", "somewhere"], ["show", "somewhere", "--output_dir", "out"], ["mend"]])
def test_unusable_arguments_exit_with_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["checkpoint", *arguments])
