"""One rank's connections to the other ranks of a group, all on one host, and the memory that it shares with them.

Each pair has a Unix socket with an abstract name; through it go a note for each meeting and, once, the memory itself:
a file of memory without a name, so that nothing is left when a process is killed. A note carries the number of bytes
that were written, and a socket orders what was written before a note and is read after it, on any processor. Who waits
sleeps; a peer that dies closes its sockets, which is known at once.
"""

from __future__ import annotations

import mmap
import os
import secrets
import socket
import struct
import sys
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from harness.topology.hosts import host_id

_NOTE = struct.Struct("<q")
_TIMEVAL = struct.Struct("ll")  # of SO_RCVTIMEO
_MEETING_S = 20.0  # for connections among processes that are all there


@dataclass(frozen=True)
class Invitation:
    """How to reach a rank: the abstract name of its socket, and its host as far as sockets can reach."""

    name: bytes
    host: tuple[str, int, int]


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
    return listener, Invitation(listener.getsockname(), (kernel, network.st_dev, network.st_ino))


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
            sockets[other], memory[other] = connection, _exchange(connection, rank, own, memory_bytes)[1]
        for _ in range(rank + 1, len(invitations)):
            connection, _address = listener.accept()
            connection.settimeout(_MEETING_S)
            caller, of_caller = _exchange(connection, rank, own, memory_bytes)
            sockets[caller], memory[caller] = connection, of_caller
    finally:
        os.close(own)
    for connection in sockets.values():
        connection.settimeout(None)
        limit = _TIMEVAL.pack(max(int(timeout.total_seconds()), 1), 0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    return Neighbours(rank, dict(sorted(sockets.items())), [memory[each] for each in range(len(invitations))])


def _exchange(connection: socket.socket, rank: int, own: int, memory_bytes: int) -> tuple[int, Tensor]:
    """Send this rank's memory; return the other's rank and memory."""
    socket.send_fds(connection, [_NOTE.pack(rank)], [own])
    note, files, _, _ = socket.recv_fds(connection, _NOTE.size, 1)
    if not files:
        raise ConnectionError("connection closed by peer")
    try:
        return _NOTE.unpack(note)[0], _mapped(files[0], memory_bytes)
    finally:
        os.close(files[0])


def _mapped(file: int, memory_bytes: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(file, memory_bytes), dtype=torch.uint8)
