"""The flags of `ds-harness launch`, and the hosts that they mean."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.errors import UserError
from harness.resilience.hosts import find_hosts
from harness.resilience.options import read_options


@pytest.fixture
def hostfile(tmp_path: Path) -> str:
    path = tmp_path / "hostfile"
    path.write_text("a slots=4\nb slots=2\n")
    return str(path)


def hosts(*argv: str) -> dict[str, tuple[int, ...]]:
    return {host.name: host.devices for host in find_hosts(read_options([*argv, "train.py"]))}


def test_the_script_keeps_its_arguments() -> None:
    for between in ([], ["--"]):
        options = read_options(["--num_gpus", "2", *between, "train.py", "--max_steps", "3", "--module"])
        assert options.script == ("train.py", "--max_steps", "3", "--module")
        assert (options.num_accelerators, options.max_restarts, options.module) == (2, 0, False)


@pytest.mark.parametrize(
    ("flag", "answer"),
    [
        (["--launcher=pdsh"], "--launcher: run `ds-harness launch --rdzv_endpoint HOST:PORT` on each host"),
        (["--bind_cores_to_rank"], "--bind_cores_to_rank: use `--no_python numactl"),
        (["--save_pid"], "--save_pid: only the `deepspeed` command can do this"),
    ],
)
def test_a_flag_that_is_gone_is_answered_with_what_to_use(flag: list[str], answer: str) -> None:
    with pytest.raises(UserError) as raised:
        read_options([*flag, "train.py"])
    assert str(raised.value).startswith(answer)


def test_hosts_and_devices_are_chosen_as_by_deepspeed(hostfile: str) -> None:
    assert hosts("--hostfile", hostfile) == {"a": (0, 1, 2, 3), "b": (0, 1)}
    assert hosts("--hostfile", hostfile, "--num_nodes", "1", "--num_accelerators", "2") == {"a": (0, 1)}
    assert hosts("-H", hostfile, "--include", "b@a:1,3") == {"a": (1, 3), "b": (0, 1)}
    assert hosts("-H", hostfile, "--exclude", "b@a:0") == {"a": (1, 2, 3)}
    assert hosts("--include", "localhost:2,3") == {"localhost": (2, 3)}
    assert hosts("--num_accelerators", "3") == {"localhost": (0, 1, 2)}


def test_a_pod_that_chooses_its_devices_meets_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    pod = {"NNODES": "2", "NODE_RANK": "1", "NPROC_PER_NODE": "8", "MASTER_ADDR": "first", "MASTER_PORT": "29400"}
    for name, value in pod.items():
        monkeypatch.setenv(f"PET_{name}", value)
    some = read_options(["--include", "localhost:0,1", "train.py"])
    assert (some.nnodes, some.rdzv_endpoint, some.num_accelerators) == ("2", "first:29400", None)
    assert read_options(["train.py"]).num_accelerators == 8


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--include", "c"], "there is no host c: use one of a, b"),
        (["--exclude", "b:7"], "b has no device 7"),
        (["--include", "a:x"], "'a:x' is not HOST or HOST:NUMBER,NUMBER"),
        (["--exclude", "a@b"], "no host is left"),
        (["--include", "a", "--exclude", "b"], "give one of them"),
        (["--include", "a", "--num_nodes", "1"], "cannot be combined"),
        (["--max_restarts", "-1"], "--max_restarts -1: must be at least 0"),
        (["--hostfile", "/nowhere"], "no such file"),
        (["--max_restart", "2"], "see --help"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(hostfile: str, argv: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said.replace("(", r"\(")) as refused:
        hosts("--hostfile", hostfile, *argv)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("flags", [[], ["--rdzv_endpoint", "a:29400"]])
def test_devices_of_this_host_need_not_be_the_first(flags: list[str]) -> None:
    (host,) = find_hosts(read_options([*flags, "--include", "localhost:2,3", "train.py"]))
    assert host.is_here and host.devices == (2, 3) and host.environment() == {}
