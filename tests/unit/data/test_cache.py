"""Prepared data is made once on each host, and known by what it was made of: ranks as threads, on a real store."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from harness.batches.stream import fingerprint
from harness.data.on_disk import cache
from harness.data.on_disk.cache import cache_error, once_per_host, prepared_folder
from harness.data.tokenizer import ByteTokenizer, encode, identity, load_tokenizer
from harness.errors import UserError
from harness.topology.env import LaunchEnv


def on_ranks(
    builds: Callable[[int, int], Any],
    hosts: int = 1,
    per_host: int = 3,
    store: dist.Store | None = None,
    host_of: Callable[[int, int, int], str] = lambda rank, _, per_host: f"host {rank // per_host}",
) -> list[Any]:
    """What each rank gets, or the error that it gets, of `builds(rank, local rank)`."""
    store = store or dist.HashStore()

    def of(rank: int) -> Any:
        local = rank % per_host
        env = LaunchEnv(rank=rank, world_size=hosts * per_host, local_rank=local, local_world_size=per_host)
        try:
            return once_per_host(
                lambda: builds(rank, local), env=env, store=store, host=host_of(rank, hosts, per_host), poll_s=0.001
            )
        except Exception as error:
            return error

    with ThreadPoolExecutor(hosts * per_host) as pool:
        return list(pool.map(of, range(hosts * per_host)))


@pytest.mark.parametrize("failing", [0, 1, 3], ids=["the-first", "one-that-reads", "on-another-host"])
def test_an_error_that_is_not_the_users_is_one_line_on_the_other_ranks(failing: int) -> None:
    error = ValueError("odd")

    def build(rank: int, _: int) -> int:
        if rank == failing:
            raise error
        return rank

    found = on_ranks(build, hosts=2, per_host=2)
    assert found[failing] is error
    others = [each for rank, each in enumerate(found) if rank != failing]
    assert all(isinstance(each, UserError) and str(each) == "data: ValueError: odd" for each in others)


DEALT = {
    "in order": lambda rank, _, per_host: f"host {rank // per_host}",
    "in turn": lambda rank, hosts, _: f"host {rank % hosts}",
    "in any order": lambda rank, hosts, _: f"host {rank * 7919 % 13 % hosts}",
    "each alone": lambda rank, *_: f"host {rank}",
}


@pytest.mark.parametrize("host_of", DEALT.values(), ids=DEALT)
def test_one_rank_of_each_host_builds_however_ranks_are_dealt_out(host_of: Callable[[int, int, int], str]) -> None:
    built: dict[str, list[int]] = {}

    def build(rank: int, _: int) -> int:
        built.setdefault(host_of(rank, 3, 4), []).append(rank)
        time.sleep(0.02)  # the others of this host would come meanwhile
        return len(built[host_of(rank, 3, 4)]) == 1

    first = on_ranks(build, hosts=3, per_host=4, host_of=host_of)
    assert sum(first) == len(built) == len({host_of(rank, 3, 4) for rank in range(12)})
    assert built[host_of(0, 3, 4)][0] == 0  # it speaks to the user
    assert sorted(rank for ranks in built.values() for rank in ranks) == list(range(12))


def test_a_later_data_set_has_a_turn_of_its_own() -> None:
    store = dist.HashStore()
    assert on_ranks(lambda rank, _: rank, store=store) == [0, 1, 2]
    assert on_ranks(lambda rank, _: -rank, store=store) == [0, -1, -2]

    def fails(rank: int, _: int) -> int:
        raise UserError("wrong")

    assert {str(error) for error in on_ranks(fails, store=store)} == {"wrong"}


def test_a_rank_alone_that_fails_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_PATIENCE_S", 1e6)

    def fails(rank: int, _: int) -> int:
        raise UserError("wrong")

    assert str(on_ranks(fails, per_host=1)[0]) == "wrong"


parts = st.lists(st.text(st.characters(exclude_characters="\0"), max_size=3), min_size=1, max_size=4)


@given(parts, parts)
def test_a_name_says_what_it_was_made_of(one: list[str], other: list[str]) -> None:
    assert (fingerprint(*one) == fingerprint(*other)) is (one == other)
    assert len(fingerprint(*one)) == 32 and fingerprint(*one, 1) == fingerprint(*one, "1")


def test_a_tokenizer_is_known_by_what_it_does_and_not_by_its_last_call(trained_tokenizer: Any) -> None:
    first, second = (load_tokenizer(str(trained_tokenizer)) for _ in range(2))
    before = identity(first)
    first(["a b", "c"], truncation=True, max_length=1)  # type: ignore[operator]
    assert identity(first) == before == identity(second)
    second.add_tokens(["<new>"])  # type: ignore[union-attr]
    assert identity(second) != before
    assert identity(ByteTokenizer()) == identity(ByteTokenizer()) != before
    first.split_special_tokens = True  # type: ignore[union-attr]
    assert encode(first, ["</s>"])[0].tolist() != encode(load_tokenizer(str(trained_tokenizer)), ["</s>"])[0].tolist()
    assert identity(first) != before


def test_where_data_is_kept_and_what_is_said_where_it_cannot_be(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "usual")
    assert prepared_folder(None) == tmp_path / "usual" / "prepared"
    assert prepared_folder(tmp_path / "own") == tmp_path / "own" / "prepared"
    assert prepared_folder("relative").is_absolute()
    full = OSError(28, "No space left on device")
    assert str(cache_error(full, None)) == (
        f"cannot keep prepared data in {tmp_path}/usual (No space left on device): set HF_DATASETS_CACHE"
    )
    assert "in elsewhere (odd)" in str(cache_error(OSError("odd"), "elsewhere"))


def test_thousands_of_ranks_that_wait_leave_the_store_in_peace(monkeypatch: pytest.MonkeyPatch) -> None:
    store, pauses = dist.HashStore(), list[float]()

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 30:  # rank 0 has built it, and all others have read it
            store.set("prepared/1/built/here", "")
            store.add("prepared/1/ready", 4095)

    monkeypatch.setattr(cache.time, "sleep", sleep)
    store.set("prepared/1/first", "here")
    env = LaunchEnv(rank=9, world_size=4096, local_rank=1, local_world_size=8)
    assert once_per_host(lambda: "built", env=env, store=store, host="here") == "built"
    assert pauses[:3] == [0.5, 0.75, 1.125] and pauses[-1] == 4096 / 512
