"""One rank's connections to the other ranks of a group, all on one host, and the memory that it shares with them.

Each pair has a Unix socket with an abstract name; through it go a note for each meeting and, once, the memory itself:
a file of memory without a name, so that nothing is left when a process is killed. A note carries the number of bytes
that were written, and a socket orders what was written before a note and is read after it, on any processor. Who waits
sleeps; a peer that dies closes its sockets, which is known at once.

Every user of the host can see an abstract name and call it. So a rank hands its memory only to a process of its own
user that knows the secret which the ranks have told each other; any other call is closed, and the rank goes on
listening.
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

from harness.topology.placement import host_id

_NOTE = struct.Struct("<q")
_GREETING = struct.Struct("<q16s")  # the caller's rank, and the secret of the rank that is called
_CREDENTIALS = struct.Struct("3i")  # of SO_PEERCRED: process, user, group
_TIMEVAL = struct.Struct("ll")  # of SO_RCVTIMEO
_MEETING_S = 20.0  # for connections among processes that are all there
_GREETING_S = 5.0  # a caller says at once who it is; who says nothing keeps the others waiting no longer


@dataclass(frozen=True)
class Invitation:
    """How to reach a rank: the abstract name of its socket, its host as far as sockets can reach, and what to say."""

    name: bytes
    host: tuple[str, int, int]
    secret: bytes


class Neighbours:
    """The other ranks of a group.

    Attributes:
        rank, size: this rank's index in the group, and the number of its ranks.
        memory: of each rank, in their order, as bytes.
    """

    def __init__(self, rank: int, sockets: dict[int, socket.socket], memory: list[Tensor]) -> None:
        self.rank, self.size, self.memory = rank, len(memory), memory
        self._sockets = sockets

    def tell_ranks(self, written: int) -> None:
        """Tell the other ranks how many bytes this one has written; ConnectionError where one has ended."""
        note = _NOTE.pack(written)
        for rank, connection in self._sockets.items():
            try:
                connection.send(note)
            except OSError:
                raise self._lost(rank) from None

    def wait_for_ranks(self, written: int) -> None:
        """Return once every other rank has told that it has written as many bytes.

        Raises ConnectionError where a rank has ended, TimeoutError where it does not come, and RuntimeError where it
        has written another number of bytes: the ranks are not in the same collective.
        """
        note = _NOTE.pack(written)
        for rank, connection in self._sockets.items():
            try:
                answer = connection.recv(_NOTE.size)
            except BlockingIOError:
                raise TimeoutError(f"timed out: rank {rank} of the group did not come to a collective") from None
            except OSError:
                raise self._lost(rank) from None
            if not answer:
                raise self._lost(rank)
            if answer != note:
                there = _NOTE.unpack(answer)[0]
                raise RuntimeError(f"ranks are in different collectives: {written} bytes here, {there} on rank {rank}")

    def close(self) -> None:
        """Close the connections; the memory goes with its last tensor."""
        for connection in self._sockets.values():
            with suppress(OSError):  # the other has closed it
                connection.shutdown(socket.SHUT_RDWR)  # a process that this one has forked holds it open
            connection.close()

    def _lost(self, rank: int) -> ConnectionError:
        return ConnectionError(f"connection closed by peer: rank {rank} of the group has ended")


def meet(group: dist.ProcessGroup, memory_bytes: int, timeout: timedelta) -> Neighbours | None:
    """Connect to all ranks of `group`, each with so many bytes of shared memory; None, on all of them, where they are
    not on one host or it does not let them. All ranks of the group call it."""
    invitations: list[Invitation | None] = [None] * dist.get_world_size(group)
    found: Neighbours | None = None
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
    """Return a socket and how to reach it; None where the system has no such sockets, or no memory to hand over."""
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        return None
    try:
        # what processes have in common that reach each other's abstract names: a kernel and a network of it
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
) -> Neighbours:
    """Call the lower ranks, let the higher ones call, and exchange memory with each of them."""
    own = os.memfd_create("ds-harness", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(own, 0, memory_bytes)  # it is there now, or never: later, a process that lacks it is killed
        sockets: dict[int, socket.socket] = {}
        memory = {rank: _mapped(own, memory_bytes)}
        for other in range(rank):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            connection.settimeout(_MEETING_S)
            connection.connect(invitations[other].name)
            if not _is_own_user(connection):
                raise ConnectionError(f"another user answers in the place of rank {other}")
            connection.send(_GREETING.pack(rank, invitations[other].secret))
            sockets[other], memory[other] = connection, _exchanged(connection, own, memory_bytes)
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
            sockets[caller], memory[caller] = connection, _exchanged(connection, own, memory_bytes)
    finally:
        os.close(own)
    for connection in sockets.values():
        connection.settimeout(None)
        limit = _TIMEVAL.pack(max(int(timeout.total_seconds()), 1), 0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    return Neighbours(rank, dict(sorted(sockets.items())), [memory[each] for each in range(len(invitations))])


def _caller(connection: socket.socket, secret: bytes) -> int:
    """Return the rank that calls; -1 for a process of another user, or one that does not know the secret."""
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
    """Send this rank's memory; return the other's."""
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
