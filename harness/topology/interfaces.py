"""Find this host's network interface towards rank 0's host, which gloo does not find by itself."""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping

import psutil

from harness.errors import UserError
from harness.topology.slurm import address_of

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def interface_to(host: str, port: int) -> str | None:
    """Return the interface that packets to a host would use; None if unknown."""
    try:
        ours = address_towards(host, port)
    except (OSError, UnicodeError):
        return None
    for name, addresses in psutil.net_if_addrs().items():
        # A link-local IPv6 address comes with its interface: fe80::1%eth0.
        if ours in (each.address.partition("%")[0] for each in addresses):
            return str(name)
    return None


def address_towards(host: str, port: int) -> str:
    """Return this host's source address for packets to another host; sends none. Raises OSError without a route."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # on a UDP socket this only chooses the route
        return str(probe.getsockname()[0].partition("%")[0])


def reachable(host: str) -> str:
    """Return the host name, or its address from Slurm if name resolution fails. Raises UserError if both fail."""
    try:
        socket.getaddrinfo(host, None)
    except (socket.gaierror, UnicodeError) as error:  # UnicodeError: a part of the name is empty or too long
        if (address := address_of(host)) is None:
            why = getattr(error, "strerror", None) or error
            raise UserError(f"MASTER_ADDR {host}: no such host: {why}") from error
        return address
    return host


def listen_at(host: str, port: int, backlog: int) -> socket.socket | None:
    """Listen at an address; return None if it is not an address of this host. Raises OSError if the port is taken."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # An IPv6 address has two entries more, which `create_server` does not take.
        return socket.create_server(address[:2], family=family, backlog=backlog)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            return None
        raise


def require_interfaces(environ: Mapping[str, str]) -> None:
    """Raise UserError if an environment variable names an interface that this host does not have."""
    present = [name for _, name in socket.if_nameindex()]
    for variable in VARIABLES:
        for wanted in filter(None, environ.get(variable, "").split(",")):
            # gloo takes names. NCCL takes prefixes of names, names after `=`, and after `^` those to leave out.
            exact = variable.startswith("GLOO") or wanted.startswith("=")
            name = wanted.lstrip("=")
            found = name in present if exact else any(each.startswith(name) for each in present)
            if not found and not wanted.startswith("^"):
                raise UserError(
                    f"{variable} is {environ[variable]}, but {socket.gethostname()} has no such network interface, "
                    f"only {', '.join(present)}: correct it, or unset it to use the one that leads to rank 0"
                )
