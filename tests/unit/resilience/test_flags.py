"""The words of `ds-harness launch`: which are its own, which the script's, and what each of them comes to."""

from __future__ import annotations

import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.cli import main
from harness.errors import UserError
from harness.resilience import options
from harness.resilience.launch import write_batch
from harness.resilience.options import DEEPSPEED_ONLY, USAGE, Options, _parser, read_options
from harness.resilience.script import without

PLAIN = read_options(["train.py"])


def changed(*argv: str) -> dict[str, object]:
    """What some flags change of the options that a script alone gives."""
    found = vars(read_options([*argv, "train.py"]))
    return {name: value for name, value in found.items() if name != "flags" and value != getattr(PLAIN, name)}


@pytest.mark.parametrize(
    ("words", "means"),
    [
        pytest.param("--max_restarts 3", {"max_restarts": 3}, id="restarts"),
        pytest.param("--max_restarts=3", {"max_restarts": 3}, id="with an equals sign"),
        pytest.param("--min_ranks 2", {"min_ranks": 2}, id="fewest ranks"),
        pytest.param("--num_gpus 4", {"num_accelerators": 4}, id="deepspeed's older name"),
        pytest.param("--num_nodes 2", {"num_nodes": 2}, id="hosts"),
        pytest.param("-i a:0,1@b", {"include": "a:0,1@b"}, id="include"),
        pytest.param("-e a:0", {"exclude": "a:0"}, id="exclude"),
        pytest.param("--master_addr 10.0.0.1 --master_port 65535", {"master_addr": "10.0.0.1", "master_port": 65535}),
        pytest.param("--ssh_port 1", {"ssh_port": 1}, id="the lowest port"),
        pytest.param("--module", {"module": True}, id="module"),
        pytest.param("--no_python --no_local_rank", {"no_python": True, "no_local_rank": True}, id="a command"),
        pytest.param("--no_standby", {"no_standby": True}, id="no standby"),
        pytest.param("--slurm_seconds 1", {"slurm_seconds": 1}, id="the shortest time to save"),
        pytest.param("-q --force_multi --no_ssh_check --log_level info", {}, id="what changes nothing here"),
    ],
)
def test_a_flag_sets_what_it_names_and_nothing_else(words: str, means: dict[str, object]) -> None:
    assert changed(*words.split()) == means


@pytest.mark.parametrize("flag", DEEPSPEED_ONLY)
def test_what_only_deepspeed_can_do_is_noted(flag: str) -> None:
    words = [flag, *["value"] * DEEPSPEED_ONLY[flag]]
    assert changed(*words) == {"deepspeed_only": (flag,)}
    with pytest.raises(UserError, match=f"{flag} cannot be combined with --max_restarts: leave out one of them"):
        read_options([*words, "--max_restarts", "1", "train.py"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--max_restarts -1", "--max_restarts -1: must be at least 0"),
        ("--min_ranks 0", "--min_ranks 0: must be at least 1"),
        ("--num_accelerators 0", "--num_accelerators 0: must be at least 1"),
        ("--num_nodes -3", "--num_nodes -3: must be at least 1"),
        ("--slurm_seconds 0", "--slurm_seconds 0: must be at least 1"),
        ("--master_port 0", "--master_port 0: must be a port, from 1 to 65535"),
        ("--master_port 65536", "--master_port 65536: must be a port, from 1 to 65535"),
        ("--ssh_port -22", "--ssh_port -22: must be a port, from 1 to 65535"),
        ("--num_nodes two", "argument --num_nodes: invalid int value: 'two' (see --help)"),
        ("--include a --num_accelerators 2", "--num_nodes and --num_accelerators cannot be combined with --include"),
        ("--exclude a --num_nodes 1", "--num_nodes and --num_accelerators cannot be combined with --include"),
        ("--include a --exclude a", "--include and --exclude: give one of them"),
        ("--hostfile /nowhere/hosts", "--hostfile /nowhere/hosts: no such file"),
        ("--hostfile /", "--hostfile /: no such file"),
    ],
)
def test_a_value_that_cannot_be_is_one_line(words: str, said: str) -> None:
    with pytest.raises(UserError) as refused:
        read_options([*words.split(), "train.py"])
    assert said in str(refused.value) and "\n" not in str(refused.value)


OWN = st.sampled_from([["--max_restarts", "2"], ["--module"], ["--slurm_seconds=9"], ["--num_gpus", "1"], ["--"]])
OTHERS = st.sampled_from(["--max_restarts", "7", "--slurm", "--", "-x", "train.py", "--hostfile=/no", "", "é ü"])


@given(st.lists(OWN, max_size=3), st.lists(OTHERS, max_size=5))
def test_every_word_behind_the_script_is_the_scripts(own: list[list[str]], script: list[str]) -> None:
    flags = [word for words in own if words != ["--"] for word in words] + ["--"] * (["--"] in own)
    options = read_options([*flags, "train.py", *script])
    assert options.script == ("train.py", *script)
    assert options.flags == tuple(flags)
    assert options.max_restarts == (2 if "--max_restarts" in flags else 0)


def batch_command(options: Options) -> list[str]:
    """The words that a batch file starts."""
    text = Path(write_batch(options)).read_text(encoding="utf-8")
    (line,) = [line for line in text.splitlines() if " launch " in line and line.endswith(" &")]
    return shlex.split(line.removesuffix(" &"))[2:]


def test_a_scripts_own_flags_are_kept_that_have_the_names_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")  # Slurm cannot be asked for GPUs
    own, script = ["--slurm", str(tmp_path / "job"), "--num_gpus", "2"], ["mine.py", "--slurm", "yes", "--", "a b"]
    words = batch_command(read_options([*own, *script]))
    assert words == ["--num_gpus", "2", *script, "--resume_from_checkpoint", "auto"]


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


def own_flags() -> dict[str, int]:
    """The flags of the launch that the `deepspeed` command refuses, with the number of their values."""
    folder = Path(str(find_spec("deepspeed").origin)).parent
    theirs = set(re.findall(r'"(--?[a-zA-Z_]+)"', (folder / "launcher" / "runner.py").read_text()))
    return {
        name: 0 if action.nargs == 0 else 1
        for action in _parser()._actions
        for name in action.option_strings
        if name not in theirs and action.dest != "help"
    }


def test_the_deepspeed_command_gets_no_flag_that_it_does_not_know() -> None:
    assert own_flags() == options.OWN
    own = [word for name, values in options.OWN.items() for word in [name, *["0"] * values]]
    own[own.index("--min_ranks") + 1] = own[own.index("--slurm_seconds") + 1] = "1"
    words = ["--no_standby", "--node_rank", "1", *own, "--min_ranks=2", "--num_gpus", "2", "train.py", "--no_standby"]
    assert read_options(words).for_deepspeed == ["--node_rank", "1", "--num_gpus", "2", "train.py", "--no_standby"]


def test_the_verb_without_words_shows_how_it_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch"]) == 2
    assert capsys.readouterr().out.strip() == USAGE


@pytest.mark.parametrize("words", [["--num_gpus", "2"], ["--"]])
def test_flags_without_a_script_are_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", *words]) == 1
    error = capsys.readouterr().err
    assert error.startswith("ds-harness launch: the following arguments are required: script")
    assert len(error.splitlines()) == 1
