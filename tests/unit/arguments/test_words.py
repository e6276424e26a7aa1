"""Words of a command line: a flag's value, without flags, and with a resume."""

from __future__ import annotations

import pytest

from harness.arguments.words import resume_command, value_of, with_resume, without


@pytest.mark.parametrize(
    ("words", "flags", "left"),
    [
        pytest.param([], {"--a"}, [], id="nothing"),
        pytest.param(["--a", "1", "--b", "2"], {"--a"}, ["--b", "2"], id="a flag and its value"),
        pytest.param(["--a=1", "x"], {"--a"}, ["x"], id="with an equals sign the next word stays"),
        pytest.param(["--ab", "1"], {"--a"}, ["--ab", "1"], id="a longer name"),
        pytest.param(["x", "--a"], {"--a"}, ["x"], id="a flag without a value at the end"),
        pytest.param(["--a", "1", "--a", "2", "y"], {"--a"}, ["y"], id="twice"),
    ],
)
def test_flags_are_taken_out_with_their_values(words: list[str], flags: set[str], left: list[str]) -> None:
    assert without(words, flags) == left


def test_the_last_value_of_a_flag_counts() -> None:
    words = ["train.py", "--a", "1", "--b=2", "--a=3", "--c"]
    assert [value_of(words, flag) for flag in ("--a", "--b", "--c", "--d")] == ["3", "2", None, None]


def test_a_command_that_resumes() -> None:
    words = ["deepspeed", "train.py", "--resume_from_checkpoint", "old", "--seed", "1"]
    assert with_resume(words) == ["deepspeed", "train.py", "--seed", "1", "--resume_from_checkpoint", "auto"]
    assert with_resume(with_resume(words)) == with_resume(words)


def test_the_command_that_goes_on_is_what_the_user_typed() -> None:
    assert resume_command(["/usr/bin/python3", "a b.py"]) == "/usr/bin/python3 'a b.py' --resume_from_checkpoint auto"
