"""The words of `ds-harness launch`: which are its own, which the script's, and what each of them comes to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.arguments import TrainingArguments
from harness.cli import main
from harness.command_line.fewer_ranks import KINDS
from harness.command_line.parsing import known_flags
from harness.errors import UserError
from harness.installed import config_check
from harness.resilience import starter
from harness.resilience.hosts import HostDevices
from harness.resilience.options import USAGE, read_options, training_options
from harness.start import fewest_ranks
from scripts.write_verbs import parser_of

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
        pytest.param("--nproc_per_node 4", {"num_accelerators": 4}, id="torchrun's name"),
        pytest.param("--nproc-per-node 4 --rdzv-backend c10d", {"num_accelerators": 4}, id="and its other one"),
        pytest.param("--node_rank 0 --local_addr 10.0.0.7", {"node_rank": 0, "local_addr": "10.0.0.7"}, id="this host"),
        pytest.param(
            "--rdzv_id 7 --rdzv_endpoint a:29400", {"rdzv_id": "7", "rdzv_endpoint": "a:29400"}, id="a meeting"
        ),
        pytest.param("-q --force_multi --no_ssh_check --log_level info", {}, id="what changes nothing here"),
    ],
)
def test_a_flag_sets_what_it_names_and_nothing_else(words: str, means: dict[str, object]) -> None:
    assert changed(*words.split()) == means


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--max_restarts -1", "--max_restarts -1: must be at least 0"),
        ("--min_ranks 0", "--min_ranks 0: must be at least 1"),
        ("--num_accelerators 0", "--num_accelerators 0: must be at least 1"),
        ("--num_nodes -3", "--num_nodes -3: must be at least 1"),
        ("--nnodes 0 --rdzv_endpoint a:1", "--nnodes 0: must be a number of hosts, or the least and the largest"),
        ("--nnodes 4:2 --rdzv_endpoint a:1", "--nnodes 4:2: must be a number of hosts"),
        ("--nnodes two --rdzv_endpoint a:1", "--nnodes two: must be a number of hosts"),
        ("--nnodes 2", "--nnodes 2: give --rdzv_endpoint HOST:PORT too, the same on all hosts"),
        ("--rdzv_endpoint a", "--rdzv_endpoint a: must be HOST:PORT"),
        ("--rdzv_endpoint :1", "--rdzv_endpoint :1: must be HOST:PORT"),
        ("--rdzv_endpoint a:65536", "--rdzv_endpoint a:65536: must be HOST:PORT"),
        ("--rdzv_endpoint a:1 --num_nodes 2", "--num_nodes and --rdzv_endpoint: give one of them"),
        ("--rdzv_backend etcd", "invalid choice: 'etcd'"),
        ("--node_rank -1", "--node_rank -1: must be at least 0"),
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


OWN = st.sampled_from([["--max_restarts", "2"], ["--module"], ["--rdzv_id=9"], ["--num_gpus", "1"], ["--"]])
OTHERS = st.sampled_from(["--max_restarts", "7", "--nnodes", "--", "-x", "train.py", "--hostfile=/no", "", "é ü"])


@given(st.lists(OWN, max_size=3), st.lists(OTHERS, max_size=5))
def test_every_word_behind_the_script_is_the_scripts(own: list[list[str]], script: list[str]) -> None:
    flags = [word for words in own if words != ["--"] for word in words] + ["--"] * (["--"] in own)
    options = read_options([*flags, "train.py", *script])
    assert options.script == ("train.py", *script)
    assert options.flags == tuple("--module=true" if word == "--module" else word for word in flags)
    assert options.max_restarts == (2 if "--max_restarts" in flags else 0)


@pytest.mark.parametrize(
    ("words", "nodes"),
    [
        ("", (1, 1)),
        ("--rdzv_endpoint a:1", (1, 1)),
        ("--nnodes 2 --rdzv_endpoint a:1", (2, 2)),
        ("--nnodes=2:4 --rdzv-endpoint a:1", (2, 4)),
        ("--nnodes 2 --rdzv_endpoint [fd00::1]:1 --max_restarts 1", (2, 2)),
        ("--max_restarts 1", (1, 1)),
    ],
)
def test_hosts_that_meet_are_counted_as_by_torchrun(words: str, nodes: tuple[int, int]) -> None:
    assert read_options([*words.split(), "train.py"]).nodes == nodes


def test_the_verb_without_words_shows_how_it_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch"]) == 2
    assert capsys.readouterr().out.strip() == USAGE


@pytest.mark.parametrize("words", [["--num_gpus", "2"], ["--"]])
def test_flags_without_a_script_are_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", *words]) == 1
    error = capsys.readouterr().err
    assert error.startswith("ds-harness launch: the following arguments are required: script")
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "of_the_run", "means"),
    [
        ("--max_steps 3 --num_gpus 2 --max_restarts=4", "--max_steps 3", {"num_accelerators": 2, "max_restarts": 4}),
        (
            "--no-standby --train_file a b -i a:0 --bf16",
            "--train_file a b --bf16",
            {"include": "a:0", "no_standby": True},
        ),
        ("--no_standby false --learning_rate -1e-3 -q", "--learning_rate -1e-3", {"no_standby": False}),
        ("--config run.yml --max_steps -1", "--config run.yml --max_steps -1", {"num_accelerators": None}),
    ],
)
def test_flags_of_the_run_and_of_the_launch_stand_in_any_order(
    words: str, of_the_run: str, means: dict[str, object]
) -> None:
    options = training_options(words.split())
    assert options.script == ("harness.train", *of_the_run.split()) and options.module
    assert {name: getattr(options, name) for name in means} == means


@pytest.mark.parametrize(
    "words",
    ["train --max_restarts 2 --max_steps 3 --no_standby", "launch --max_restarts 2 scripts/train.py --max_steps 3"],
)
def test_a_host_is_started_by_the_verb_that_the_user_typed(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    verb, *argv = words.split()
    read = {"train": training_options, "launch": read_options}[verb]
    options, begun = read(argv), []
    hosts = [HostDevices(name=name, devices=(0,)) for name in ("localhost", "localhost")]
    monkeypatch.setattr(starter, "HostLaunch", lambda _host, words, _port: begun.append(words))
    starter.Starter(options, hosts, [])._begin(1)
    monkeypatch.setattr("harness.start.start", lambda options: options.node_rank)
    monkeypatch.setattr("harness.resilience.launch.start", lambda options: options.node_rank)
    assert begun[0][0] == verb and main(begun[0]) == 1
    there = read(begun[0][1:])
    assert (there.script, there.module, there.max_restarts) == (options.script, options.module, 2) and there.started
    assert there.command == f"ds-harness {verb}"


def test_no_flag_of_the_launch_is_one_of_the_run() -> None:
    launch = {name.lstrip("-").replace("-", "_") for name in parser_of("launch")._option_string_actions}
    assert launch & known_flags(KINDS).keys() == set()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("scripts/train.py --max_steps 3", "scripts/train.py: give flags alone; `ds-harness launch` starts a script"),
        ("--max_step 3 --num_gpus 2", "unknown flag --max_step: did you mean --max_steps?"),
        ("--max_steps 3 --num_gpus two", "argument --num_accelerators/--num_gpus/--nproc_per_node: invalid int value"),
        ("--max_steps 3 --num_gpus 3 --deepspeed_config pipeline_3d", "3 ranks cannot be divided into copies of 2"),
        ("--max_steps 3 --num_gpus 2 --output_dir {tmp}", "already holds a run"),
        ("--max_steps 3 --launcher pdsh", "--launcher: run `ds-harness launch --rdzv_endpoint HOST:PORT` on each host"),
    ],
)
def test_what_a_run_would_refuse_is_refused_before_a_rank_starts(
    words: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics.jsonl").touch()
    monkeypatch.setattr("harness.start.start", pytest.fail)
    assert main(["train", *words.format(tmp=tmp_path).split()]) == 1
    error = capsys.readouterr().err
    assert error.startswith("ds-harness train: ") and said in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        ({"deepspeed_config": "zero3"}, 1),
        ({"deepspeed_config": "pipeline_3d"}, 4),
        ({"deepspeed_config": "pipeline_3d", "tensor_parallel_size": 1}, 2),
        ({"context_parallel_size": 2, "expert_parallel_size": 4}, 4),
        ({"context_parallel_size": 2, "tensor_parallel_size": 2, "expert_parallel_size": 4}, 4),
    ],
)
def test_a_cpu_gets_the_fewest_ranks_that_the_layout_takes(flags: dict[str, Any], ranks: int) -> None:
    assert fewest_ranks(TrainingArguments(**flags), config_check()) == ranks
