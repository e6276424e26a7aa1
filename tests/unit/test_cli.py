"""The command itself: verbs, exit codes, and what reaches a terminal of whatever goes wrong."""

from __future__ import annotations

import argparse
import json
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from harness import cli
from harness.checking.cli import verbs
from harness.cli import VERBS, main
from harness.errors import UserError
from harness.verb_parser import Boolean, VerbParser, with_default
from scripts.write_verbs import parser_of


@pytest.mark.parametrize(
    ("words", "code"),
    [([], 2), (["-h"], 0), (["--help"], 0), (["--version"], 0), (["frobnicate"], 2), (["--frobnicate"], 2), ([""], 2)],
)
def test_words_that_are_no_verb(words: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == code
    captured = capsys.readouterr()
    if words == ["--version"]:
        assert captured.out == f"ds-harness {version('ds-harness')}\n"
    elif words and words[0].endswith("frobnicate"):
        assert captured.err == f"ds-harness: unknown verb {words[0]!r}; use one of {', '.join(VERBS)}\n"
    else:
        assert all(f"\n  {name} " in captured.out for name in VERBS)


def test_of_a_misspelt_verb_the_nearest_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dry_run"]) == 2
    assert capsys.readouterr().err == "ds-harness: unknown verb 'dry_run'; did you mean dry-run?\n"


def test_the_words_are_those_of_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["ds-harness", "explain", "DS101"])
    assert main() == 0
    assert capsys.readouterr().out.startswith("# DS101 misspelt-key (warning)")


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UserError("no such thing"), 1, "ds-harness explain: no such thing\n"),
        (UserError("\x1b[2J"), 1, "ds-harness explain: \\x1b[2J\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_what_ends_a_verb_is_a_code_and_at_most_a_line(
    error: BaseException, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_words: list[str]) -> int:
        raise error

    monkeypatch.setattr(verbs, "explain", fail)
    assert main(["explain"]) == code
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("verb", "part"), [("generate", "harness.data"), ("plan", "harness.planner"), ("report", "harness.report")]
)
def test_a_verb_of_a_part_that_is_not_installed_says_so(
    verb: str, part: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name == part or name.startswith(f"{part}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, part, None)  # what importing a deleted package comes to
    assert main([verb, "--help"]) == 1
    assert capsys.readouterr().err.startswith(f"ds-harness {verb}: needs {part}")


def test_an_error_of_our_own_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cli.VERBS, "explain", ("harness.of_nowhere", ""))
    with pytest.raises(ModuleNotFoundError):
        main(["explain"])


@pytest.mark.parametrize(
    ("files", "words", "said"),
    [
        ({}, ["nowhere.json"], "no such file or preset"),
        ({"a.json": "{"}, ["a.json"], "a closing brace is missing here, for the one that opens on line 1"),
        ({"empty/readme": ""}, ["empty"], "empty: no .json file in this directory"),
        ({}, ["*.json"], "*.json: no file matches"),
        ({"[a].json": '{"train_batch_size": 8}'}, ["[a].json"], "1 file checked, no problems found"),
        ({"a.json": '{"train_batch_size": 8}'}, ["a.json", "a.json"], "1 file checked, no problems found"),
        ({"d/b.json": '{"train_batch_size": 8}', "d/c.txt": ""}, ["d"], "1 file checked, no problems found"),
    ],
)
def test_what_check_reads(
    files: dict[str, str],
    words: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert main(["check", *words]) == (0 if "no problems" in said else 1)
    captured = capsys.readouterr()
    assert said in captured.out + captured.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "the following arguments are required: FILE"),
        (["zero3", "--world_size", "0"], "argument --world_size: must be a whole number of at least 1"),
        (["zero3", "--world_size", "x"], "argument --world_size: must be a whole number of at least 1"),
        (["zero3", "--target", "torch"], "argument --target: invalid choice: 'torch'"),
        (["zero3", "--format", "yaml"], "argument --format: invalid choice: 'yaml'"),
        (["zero3", "--frobnicate"], "unrecognized arguments: --frobnicate"),
    ],
)
def test_unusable_arguments_are_a_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["check", *words])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and said in error and len(error.splitlines()) == 1


def test_a_fix_that_cannot_be_written_is_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 8, // one\n}')

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    assert main(["check", str(path), "--fix"]) == 1
    assert (
        capsys.readouterr().err.splitlines()[-1]
        == f"ds-harness check: {path}: cannot be written: no space left on device"
    )


def test_standard_input_is_checked_and_its_fix_only_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "in"
    path.write_text('{"train_batch_size": 8, // one\n}')
    with path.open() as file:
        monkeypatch.setattr("sys.stdin", file)
        assert main(["check", "-", "--fix", "--format", "json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == [] and "+++ <stdin> (fixed)" in captured.err
    assert "// one" in path.read_text()


def flag_parser() -> VerbParser:
    parser = VerbParser("made", "")
    parser.add_argument("files", nargs="*")
    parser.add_argument("--strict", action=Boolean)
    parser.add_argument("--unsafe-fixes", action=Boolean)
    parser.add_argument("--world_size", type=int)
    return parser


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--strict a.json", {"strict": True, "files": ["a.json"]}),
        ("--str a.json", {"strict": True, "files": ["a.json"]}),
        ("--strict false a.json", {"strict": False, "files": ["a.json"]}),
        ("--strict=no a.json", {"strict": False, "files": ["a.json"]}),
        ("a.json --no_strict", {"strict": False, "files": ["a.json"]}),
        ("a.json --no-unsafe-fixes --strict", {"unsafe_fixes": False, "strict": True, "files": ["a.json"]}),
        ("--unsafe_fixes --world-size 2", {"unsafe_fixes": True, "world_size": 2}),
        ("--world-size=2 -- --strict", {"world_size": 2, "files": ["--strict"]}),
    ],
)
def test_flags_are_spelled_alike(words: str, expected: dict[str, object]) -> None:
    nothing = {"files": [], "strict": False, "unsafe_fixes": False, "world_size": None}
    assert vars(flag_parser().parse_args(words.split())) == {**nothing, **expected}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--strict=7", "argument --strict: '7' is not true or false"),
        ("--no_strict=true", "--no_strict=true takes no value: give --strict true or false"),
        ("--no_world_size", "unrecognized arguments: --no_world_size"),
    ],
)
def test_a_boolean_that_cannot_be_read(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        flag_parser().parse_args(words.split())
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("verb", VERBS)
def test_every_switch_of_a_verb_is_a_boolean_flag(verb: str) -> None:
    actions = parser_of(verb)._actions
    bare = [action.dest for action in actions if action.nargs == 0 and action.dest != "help"]
    assert bare == []


def test_a_default_is_said_once_and_only_where_there_is_one() -> None:
    assert with_default("hosts", 1) == "hosts (default: 1)"
    assert with_default("seconds", 120.0) == "seconds (default: 120)"
    assert with_default("", "a%b") == "(default: a%%b)"
    assert with_default("how often", 0) == "how often (default: 0)"
    assert [with_default("x", none) for none in (None, False, "", argparse.SUPPRESS)] == ["x"] * 4
    assert with_default("ranks (default: all)", 8) == "ranks (default: all)"
