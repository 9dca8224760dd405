"""Network interfaces: which one has an address, and which local address reaches another host.

route_to("10.0.0.1")     --> "10.0.0.2"     the kernel's choice, for a datagram that is never sent
interface_of("10.0.0.2") --> "eth1"         for GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"

_ANY_PORT = 9  # discard: a datagram socket is connected, and nothing is sent


def is_loopback(address: str) -> bool:
    """Return whether only this host can reach an address."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return address == "localhost"


def interface_of(address: str) -> str | None:
    """Return the interface that has an address of this host, if any."""
    wanted = ipaddress.ip_address(address.partition("%")[0])
    if wanted.version == 6 and wanted.ipv4_mapped is not None:
        wanted = wanted.ipv4_mapped
    addresses = list(_addresses())
    exact = next((name for name, own in addresses if own == wanted), None)
    if exact is None and wanted.is_loopback:  # all of 127.0.0.0/8
        return next((name for name, own in addresses if own.is_loopback), None)
    return exact


def address_of(interface: str) -> str | None:
    """Return the first IPv4 address of an interface, if any."""
    return next((str(own) for name, own in _addresses() if name == interface and own.version == 4), None)


def has_address(interface: str) -> bool:
    """Return whether an interface can be reached."""
    return any(name == interface and not own.is_link_local for name, own in _addresses())


def route_to(host: str, family: socket.AddressFamily = socket.AF_UNSPEC) -> str | None:
    """Return the local address that this host uses to reach another; None if there is no route or no such host."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, _ANY_PORT, family, socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def interface_names() -> list[str]:
    return [name for _, name in socket.if_nameindex()]


def outside_addresses() -> list[str]:
    """Return the addresses where other hosts may reach this one."""
    return [str(own) for _, own in _addresses() if not own.is_loopback and not own.is_link_local]


def _addresses() -> Iterator[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]]:
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        for each in addresses:
            if each.family in (socket.AF_INET, socket.AF_INET6):
                yield name, ipaddress.ip_address(each.address.partition("%")[0])
