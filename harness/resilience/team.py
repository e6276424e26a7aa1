"""The hosts of a start: which devices they offer, which of these are used, and in which layout.

The engine would give each agent as many ranks as it has devices, in the order of addresses, whether a layout fits or
not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from harness.resilience.cause import Device
from harness.resilience.judging import History
from harness.resilience.placement import Host, place
from harness.resilience.script import Script, Start

LOST = 75  # exit code of an agent that must join again: the store is gone, or the others went on without it


@dataclass(frozen=True, kw_only=True)
class Offer:
    """What a host brings to a start."""

    host: str
    devices: tuple[int, ...]  # numbers of its devices for ranks
    address: str  # at which other hosts reach it
    position: int  # ranks fill the hosts in this order, then by name of the agent
    node: str = ""  # name of its agent in the rendezvous
    port: int = 0  # a free one, for rank 0
    history: History | None = None  # as its agent knows it, if the store has none: the store may have been lost


@dataclass(frozen=True, kw_only=True)
class Team:
    """The hosts of a start, in the order of their ranks, each with the devices in use; and what they start."""

    offers: tuple[Offer, ...]
    start: Start | None = None  # None while too few hosts are there to start anything
    available: int = 0  # number of devices that it could use

    def device(self, rank: int | None) -> Device | None:
        """Return host and device of a rank."""
        devices = [(offer.host, device) for offer in self.offers for device in offer.devices]
        return devices[rank] if rank is not None and rank < len(devices) else None


def team_of(offers: Sequence[Offer], failing: Sequence[Device], script: Script, wanted: int, fewest: int) -> Team:
    """Return the best layout for these hosts: as typed on all `wanted` devices, else one with the same global batch.

    Hosts fill up with ranks in the order of their positions; some may get none. The team starts nothing if no layout
    of at least `fewest` ranks fits.
    """
    left = []
    for offer in sorted(offers, key=lambda each: (each.position, each.node)):
        devices = tuple(device for device in offer.devices if (offer.host, device) not in failing)
        left.append(replace(offer, devices=devices))
    ranks = sum(len(offer.devices) for offer in left)
    start = None
    if ranks:
        start = script.first(ranks) if ranks == wanted else script.on_fewer(wanted, ranks)
    if start is None or start.ranks < fewest:
        return Team(offers=tuple(replace(offer, devices=()) for offer in left), available=ranks)
    return Team(offers=_used(left, start), start=start)


def _used(offers: Sequence[Offer], start: Start) -> tuple[Offer, ...]:
    """Reduce the devices to those of the layout, keeping tensor-parallel groups inside hosts if possible.

    Hosts without ranks come last.
    """
    hosts = [Host(name=str(index), slots=len(offer.devices)) for index, offer in enumerate(offers) if offer.devices]
    placed = place(start.layout, hosts) if start.layout else None
    slots = {int(host.name): host.slots for host in placed} if placed else None
    left = start.ranks
    used = []
    for index, offer in enumerate(offers):
        count = min(left, len(offer.devices) if slots is None else slots.get(index, 0))
        used.append(replace(offer, devices=offer.devices[:count]))
        left -= count
    return tuple(sorted(used, key=lambda offer: not offer.devices))
