"""One rank's connections to the other ranks of a group, all on one host, and the memory that it shares with them.

Each pair of ranks has a Unix socket with an abstract name. Once, the ranks exchange their memory through it: an
anonymous file (memfd), so nothing is left when a process is killed. Then they exchange a note for each synchronisation,
with the number of bytes written. Sending and receiving a note is a memory barrier on any processor: what was written
before it is seen after it. A waiting rank sleeps, and a peer that dies closes its sockets, which wakes the others.

Every user of the host can see an abstract name and connect to it. So a rank hands its memory only to a process of its
own user that knows the secret which the ranks have exchanged. It closes any other connection and keeps listening.
"""

from __future__ import annotations

import mmap
import os
import secrets
import socket
import struct
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from harness.topology.hosts import host_id

_NOTE = struct.Struct("<q")
_GREETING = struct.Struct("<q16s")  # the caller's rank, and the secret of the rank that is called
_CREDENTIALS = struct.Struct("3i")  # of SO_PEERCRED: process, user, group
_TIMEVAL = struct.Struct("ll")  # of SO_RCVTIMEO
_MEETING_S = 20.0  # time limit to connect; all processes are running by then
_GREETING_S = 5.0  # a rank sends its greeting at once; a stranger that sends none must not hold up the others longer


@dataclass(frozen=True)
class Invitation:
    """How to reach a rank: the abstract name of its socket, the reach of abstract names, and the secret to send."""

    name: bytes
    host: tuple[str, int, int]
    secret: bytes


class Peers:
    """Connections to the other ranks of a group.

    Attributes:
        rank, size: this rank's index in the group, and the number of its ranks.
        memory: the shared memory of each rank as uint8 tensors, in rank order.
    """

    def __init__(self, rank: int, sockets: dict[int, socket.socket], memory: list[Tensor]) -> None:
        self.rank = rank
        self.size = len(memory)
        self.memory = memory
        self._sockets = sockets

    def tell_ranks(self, written: int) -> None:
        """Tell the other ranks how many bytes this one has written. Raises ConnectionError if one has ended."""
        note = _NOTE.pack(written)
        for rank, connection in self._sockets.items():
            try:
                connection.send(note)
            except OSError:
                raise self._lost(rank) from None

    def wait_for_ranks(self, written: int) -> None:
        """Wait until every other rank has written the same number of bytes.

        Raises ConnectionError if a rank has ended, TimeoutError if it does not come, and RuntimeError if it has written
        another number of bytes: the ranks are not in the same collective.
        """
        note = _NOTE.pack(written)
        for rank, connection in self._sockets.items():
            try:
                answer = connection.recv(_NOTE.size)
            except BlockingIOError:
                raise TimeoutError(f"timed out: rank {rank} of the group did not join the collective") from None
            except OSError:
                raise self._lost(rank) from None
            if not answer:
                raise self._lost(rank)
            if answer != note:
                there = _NOTE.unpack(answer)[0]
                raise RuntimeError(f"ranks are in different collectives: {written} bytes here, {there} on rank {rank}")

    def close(self) -> None:
        """Close the connections; the memory is freed with the last tensor on it."""
        for connection in self._sockets.values():
            with suppress(OSError):  # the other has closed it
                connection.shutdown(socket.SHUT_RDWR)  # close alone would not end it: a forked process has a copy
            connection.close()

    def _lost(self, rank: int) -> ConnectionError:
        return ConnectionError(f"connection closed by peer: rank {rank} of the group has ended")


def meet(group: dist.ProcessGroup, memory_bytes: int, timeout: timedelta) -> Peers | None:
    """Connect to all ranks of `group`, each with `memory_bytes` of shared memory; all its ranks must call it.

    Return None on all of them if they are not on one host or if the system does not let them share memory.
    """
    invitations: list[Invitation | None] = [None] * dist.get_world_size(group)
    found: Peers | None = None
    with ExitStack() as until_met:
        own = _listen()
        dist.all_gather_object(invitations, None if own is None else own[1], group=group)
        known = [each for each in invitations if each is not None]
        if own is not None:
            listener = until_met.enter_context(own[0])
            if len(known) == len(invitations) and len({each.host for each in known}) == 1:
                with suppress(OSError):
                    found = _connect(dist.get_rank(group), known, listener, memory_bytes, timeout)
    agreed: list[bool] = [False] * len(invitations)
    dist.all_gather_object(agreed, found is not None, group=group)
    if found is not None and not all(agreed):
        found.close()
        return None
    return found


def _listen() -> tuple[socket.socket, Invitation] | None:
    """Return a listening socket and its invitation; None if the system lacks abstract names or memfd."""
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        return None
    try:
        # processes reach each other's abstract names if they share a kernel and a network namespace
        kernel = host_id()
        network = Path("/proc/self/ns/net").stat()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(b"\0ds-harness-" + secrets.token_hex(16).encode())
        listener.listen(128)
    except OSError:
        return None
    listener.settimeout(_MEETING_S)
    host = kernel, network.st_dev, network.st_ino
    return listener, Invitation(listener.getsockname(), host, secrets.token_bytes(16))


def _connect(
    rank: int, invitations: list[Invitation], listener: socket.socket, memory_bytes: int, timeout: timedelta
) -> Peers:
    """Connect to the lower ranks, accept the higher ones, and exchange memory with each of them."""
    own = os.memfd_create("ds-harness", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(own, 0, memory_bytes)  # fail now if memory is short: a write to a missing page would kill us
        sockets: dict[int, socket.socket] = {}
        memory = {rank: _mapped(own, memory_bytes)}
        for other in range(rank):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            connection.settimeout(_MEETING_S)
            connection.connect(invitations[other].name)
            if not _is_own_user(connection):
                raise ConnectionError(f"another user answers in the place of rank {other}")
            connection.send(_GREETING.pack(rank, invitations[other].secret))
            sockets[other] = connection
            memory[other] = _exchanged(connection, own, memory_bytes)
        until = time.monotonic() + _MEETING_S
        while len(sockets) < len(invitations) - 1:
            listener.settimeout(max(until - time.monotonic(), 0.001))
            connection, _address = listener.accept()
            connection.settimeout(_GREETING_S)
            caller = _caller(connection, invitations[rank].secret)
            if not rank < caller < len(invitations) or caller in sockets:
                connection.close()  # a stranger
                continue
            connection.settimeout(_MEETING_S)
            sockets[caller] = connection
            memory[caller] = _exchanged(connection, own, memory_bytes)
    finally:
        os.close(own)
    for connection in sockets.values():
        connection.settimeout(None)
        limit = _TIMEVAL.pack(max(int(timeout.total_seconds()), 1), 0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    return Peers(rank, dict(sorted(sockets.items())), [memory[each] for each in range(len(invitations))])


def _caller(connection: socket.socket, secret: bytes) -> int:
    """Return the rank that connects; -1 for a process of another user, or one that does not know the secret."""
    try:
        greeting = connection.recv(_GREETING.size) if _is_own_user(connection) else b""
    except OSError:
        return -1
    if len(greeting) != _GREETING.size:
        return -1
    rank, said = _GREETING.unpack(greeting)
    return int(rank) if secrets.compare_digest(said, secret) else -1


def _is_own_user(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.geteuid())


def _exchanged(connection: socket.socket, own: int, memory_bytes: int) -> Tensor:
    """Send the file of this rank's memory and return the other rank's memory, mapped."""
    socket.send_fds(connection, [b"\0"], [own])
    _, files, _, _ = socket.recv_fds(connection, 1, 1)
    if not files:
        raise ConnectionError("connection closed by peer")
    try:
        return _mapped(files[0], memory_bytes)
    finally:
        os.close(files[0])


def _mapped(file: int, memory_bytes: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(file, memory_bytes), dtype=torch.uint8)
