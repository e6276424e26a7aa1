"""Hosts: as hostfiles, flags and Slurm name them; how a launch is started on them, and with which variables."""

from __future__ import annotations

import shlex
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import UserError
from harness.resilience import hosts as module
from harness.resilience.hosts import DS_HARNESS, HostDevices, _node_list, address_here, find_hosts, listen
from harness.resilience.options import read_options

AWAY = "203.0.113.7"  # an address of nobody, RFC 5737


def found(*flags: str) -> list[tuple[str, tuple[int, ...], bool]]:
    return [(host.name, host.devices, host.slurm) for host in find_hosts(read_options([*flags, "train.py"]))]


@pytest.fixture
def hostfile(tmp_path: Path) -> str:
    path = tmp_path / "hosts"
    path.write_text("# two hosts\n\n a slots=2 \nb   slots=3 extra words\n")
    return str(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        pytest.param("", "contains no host: write one `host slots=N` per line", id="empty"),
        pytest.param("# a slots=2\n", "contains no host", id="comments alone"),
        pytest.param("a slots=2\na slots=2\n", ":2: host a appears twice: add its slots up in one line", id="twice"),
        pytest.param("a slots=0\n", ":1: 'a slots=0' is not `host slots=N` with N of at least 1", id="no slot"),
        pytest.param("a\n", ":1: 'a' is not `host slots=N`", id="no number"),
        pytest.param("a slots = 2\n", ":1: 'a slots = 2' is not `host slots=N`", id="blanks"),
        pytest.param("b slots=1\nslots=2\n", ":2: 'slots=2' is not `host slots=N`", id="no name"),
        pytest.param("a slots=-1\n", ":1: 'a slots=-1' is not `host slots=N`", id="a negative number"),
    ],
)
def test_a_hostfile_that_cannot_be_is_told_with_its_line(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(UserError, match=said) as refused:
        found("--hostfile", str(path))
    assert str(path) in str(refused.value) and "\n" not in str(refused.value)


def test_a_hostfile_that_is_no_text_is_told(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="cannot read hostfile"):
        found("--hostfile", str(path))


@pytest.mark.parametrize(
    ("flags", "hosts"),
    [
        pytest.param("", {"a": (0, 1), "b": (0, 1, 2)}, id="all"),
        pytest.param("--include a", {"a": (0, 1)}, id="one host"),
        pytest.param("--include b:2,0", {"b": (0, 2)}, id="devices in the order of the host"),
        pytest.param("--include b:1,1", {"b": (1,)}, id="a device named twice"),
        pytest.param("--include b:0@b:2", {"b": (0, 2)}, id="a host named twice"),
        pytest.param("--include b:", {"b": (0, 1, 2)}, id="a colon without devices"),
        pytest.param("--exclude a@b:0", {"b": (1, 2)}, id="excluded"),
        pytest.param("--exclude b:0,1,2", {"a": (0, 1)}, id="all devices of a host"),
        pytest.param("--num_nodes 1", {"a": (0, 1)}, id="the first"),
        pytest.param("--num_nodes 9", {"a": (0, 1), "b": (0, 1, 2)}, id="more hosts than there are"),
        pytest.param("--num_gpus 1", {"a": (0,), "b": (0,)}, id="one on each"),
    ],
)
def test_flags_choose_of_a_hostfile(flags: str, hosts: dict[str, tuple[int, ...]], hostfile: str) -> None:
    assert {name: devices for name, devices, _ in found("-H", hostfile, *flags.split())} == hosts


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--include c", "--include c: there is no host c: use one of a, b"),
        ("--include A", "--include A: there is no host A: use one of a, b"),
        ("--include a:2", "--include a:2: a has no device 2"),
        ("--include a:9,7,0", "a has no device 7"),
        ("--exclude a:-1", "a has no device -1"),
        ("--include a:0-1", "'a:0-1' is not HOST or HOST:NUMBER,NUMBER"),
        ("--exclude a@b", "no host is left to run on: check --include, --exclude and the hostfile"),
        ("--include @", "no host is left to run on"),
    ],
)
def test_what_is_not_there_cannot_be_chosen(flags: str, said: str, hostfile: str) -> None:
    with pytest.raises(UserError, match=said.replace("(", r"\(")):
        found("-H", hostfile, *flags.split())


NODES = st.lists(
    st.tuples(st.text("ab-.1", min_size=1, max_size=3), st.lists(st.integers(0, 9), max_size=3)), max_size=3
)


@given(NODES)
def test_a_list_of_hosts_is_read_as_it_is_written(nodes: list[tuple[str, list[int]]]) -> None:
    written = "@".join(name + (":" + ",".join(map(str, devices)) if devices else "") for name, devices in nodes)
    assert _node_list(written) == nodes


def test_a_launch_starts_here_by_ssh_or_in_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "my runs"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    words = ["launch", "--started", "a b"]
    launch = [*DS_HARNESS, *words]
    assert HostDevices(name="localhost", devices=(0,)).command(words, 22) == launch
    *ssh, name, command = HostDevices(name=AWAY, devices=(0,)).command(words, 2222)
    assert ssh[-2:] == ["-p", "2222"] and "BatchMode=yes" in ssh and name == AWAY
    assert command == f"cd {shlex.quote(str(folder))} && exec {shlex.join(launch)}"
    assert "-p" not in HostDevices(name=AWAY, devices=(0,)).command(words, None)
    monkeypatch.setenv("PYTHONPATH", "/my code")
    assert "exec env 'PYTHONPATH=/my code' " in HostDevices(name=AWAY, devices=(0,)).command(words, None)[-1]
    srun = HostDevices(name="n1", devices=(0,), slurm=True).command(words, 2222)
    assert srun[0] == "srun" and srun[srun.index("-w") + 1] == "n1" and srun[-len(launch) :] == launch


def test_a_host_is_here_by_its_name_or_address() -> None:
    names = {
        "localhost": True,
        socket.gethostname(): True,
        "127.0.0.1": True,
        AWAY: False,
        "no-such-host.invalid": False,
    }
    assert {name: HostDevices(name=name, devices=(0,)).is_here for name in names} == names
    assert not HostDevices(name=socket.gethostname(), devices=(0,), slurm=True).is_here  # srun starts there too


def test_another_host_gets_the_variables_that_deepspeed_hands_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own = tmp_path / ".deepspeed_env"
    own.write_text("# mine\nMINE=a=b\n\nNCCL_DEBUG=WARN\nno variable\n")
    monkeypatch.setattr(module, "ENVIRONMENT_FILES", (tmp_path / "missing", own))
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("SECRET", "not for others")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    away = HostDevices(name=AWAY, devices=(1, 3)).environment()
    assert (away["NCCL_DEBUG"], away["MINE"]) == ("WARN", "a=b")
    assert away["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert "SECRET" not in away and "no variable" not in away


def test_the_address_of_this_host_is_the_one_that_others_reach() -> None:
    assert address_here("127.0.0.1") == "127.0.0.1" and address_here("localhost") == "127.0.0.1"
    assert address_here("::1").startswith("::1")
    with pytest.raises(UserError, match=r"no-such-host\.invalid: cannot be reached"):
        address_here("no-such-host.invalid")


def test_one_launch_of_a_host_listens_and_only_at_its_own_address() -> None:
    first = listen("127.0.0.1", 0)
    assert first is not None
    port = first.getsockname()[1]
    assert listen("127.0.0.1", port) is None  # another one does
    assert listen(AWAY, port) is None and listen("no-such-host.invalid", port) is None
    with pytest.raises(UserError, match=r"no-such-host\.invalid: no such host"):
        listen("no-such-host.invalid", port, always=True)
    first.close()
    behind = listen(AWAY, 0, always=True)  # as behind a load balancer
    assert behind is not None and behind.getsockname()[0] == "0.0.0.0"
    behind.close()
