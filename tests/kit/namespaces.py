"""Hosts on this machine: network namespaces, joined by a bridge in one more.

A host has its own network, hostname and /etc/hosts; files, memory and processes are the machine's.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from lockstep.core.errors import RunFailed

_NEWNS, _NEWUTS, _NEWNET = 0x00020000, 0x04000000, 0x40000000
_BIND, _PRIVATE, _RECURSIVE = 4096, 1 << 18, 16384
_NOWHERE = "02:00:00:00:00:01"  # no interface has this address
SLOW = "tbf rate 20mbit burst 32kbit latency 400ms"
_numbers = itertools.count()

NetworkT = TypeVar("NetworkT", bound="Network")


def _hostname(host: int) -> str:
    return f"host-{host}"


def _known(address: str, host: int, other: int) -> str:
    return f"{address if other != host else '127.0.1.1'} {_hostname(other)}"  # as Debian does


@dataclass
class Network:
    """Hosts on one network.

    Attributes:
        name: Of the bridge's namespace; hosts have NAME-0, NAME-1, ...
        folder: For the hosts' files.
        prefix: Of addresses, 10.77.0. or one of IPv6.
        hostname: How a host calls itself.
        known: Returns a host's line in /etc/hosts for another host, or itself.
    """

    name: str
    hosts: int
    folder: Path
    prefix: str = "10.77.0."
    hostname: Callable[[int], str] = _hostname
    known: Callable[[str, int, int], str] = _known

    def address(self, host: int) -> str:
        return f"{self.prefix}{host + 1}"

    def cut(self, host: int) -> None:
        """Set a host's link down."""
        _ip(f"link set port{host} down", within=self.name)

    def join(self, host: int) -> None:
        """Set a host's link up."""
        _ip(f"link set port{host} up", within=self.name)

    def lose(self, host: int) -> None:
        """Lose all that a host sends to host 0, or host 0 to host 1; it still receives."""
        neighbor = f"neigh replace {self.address(int(host == 0))} lladdr {_NOWHERE} dev eth0 nud permanent"
        _ip(neighbor, within=f"{self.name}-{host}")

    def find(self, host: int) -> None:
        """Let what `lose` loses arrive again."""
        _ip(f"neigh del {self.address(int(host == 0))} dev eth0", within=f"{self.name}-{host}")

    def slow(self, host: int) -> None:
        """Limit what a host sends to 20 Mbit/s."""
        self.control(host, f"qdisc add dev eth0 root {SLOW}")

    def enter(self, host: int) -> None:
        """Let the calling thread use a host's network from now on."""
        with open(f"/run/netns/{self.name}-{host}") as namespace:
            _checked(_libc().setns(namespace.fileno(), _NEWNET))

    def run(self, host: int, function: Callable[[], Any]) -> Any:
        """Run a function in this process, which is on the host from now on."""
        libc = _libc()
        self.enter(host)
        _checked(libc.unshare(_NEWUTS | _NEWNS))
        hostname = self.hostname(host).encode()
        _checked(libc.sethostname(hostname, len(hostname)))
        _checked(libc.mount(None, b"/", None, _RECURSIVE | _PRIVATE, None))
        known = (self.known(self.address(other), host, other) for other in range(self.hosts))
        hosts = self.folder / f"hosts-{host}"
        hosts.write_text("\n".join(["127.0.0.1 localhost", *known, ""]))
        bind(hosts, "/etc/hosts")
        sysfs = self.folder / f"sys-{host}"
        sysfs.mkdir(exist_ok=True)
        _checked(libc.mount(b"sysfs", bytes(sysfs), b"sysfs", 0, None))
        for part in ("class/net", "devices/virtual/net"):  # of this host; the machine's control groups stay
            bind(sysfs / part, f"/sys/{part}")
        return function()

    def control(self, host: int, words: str) -> None:
        """Call `tc`, which shapes the traffic, on a host."""
        _run(["ip", "netns", "exec", f"{self.name}-{host}", "tc", *words.split()])


@contextlib.contextmanager
def joined(network: NetworkT) -> Iterator[NetworkT]:
    """Make a network's hosts and join them; remove them afterwards."""
    length = "64 nodad" if ":" in network.prefix else "24"
    spaces = [network.name, *(f"{network.name}-{host}" for host in range(network.hosts))]
    try:
        _ip(*(f"netns add {space}" for space in spaces))
        _ip("link add hub type bridge", "link set hub up", "link set lo up", within=network.name)
        for host in range(network.hosts):
            own = f"{network.name}-{host}"
            _ip(f"link add port{host} type veth peer name eth0 netns {own}", within=network.name)
            _ip(f"link set port{host} master hub", f"link set port{host} up", within=network.name)
            address = f"addr add {network.address(host)}/{length} dev eth0"
            _ip("link set lo up", address, "link set eth0 up", within=own)
        yield network
    finally:
        for space in spaces:
            subprocess.run(["ip", "netns", "delete", space], capture_output=True)


def new_name() -> str:
    """Return a name that no other network of this machine has."""
    return f"lockstep-{os.getpid()}-{next(_numbers)}"


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _checked(code: int) -> None:
    if code:
        raise OSError(ctypes.get_errno(), f"a network namespace can't be used: {os.strerror(ctypes.get_errno())}")


def bind(source: Path, place: str) -> None:
    """Let this process, and those that it starts, see a file or folder at another place."""
    _checked(_libc().mount(bytes(source), place.encode(), None, _BIND, None))


def _ip(*commands: str, within: str | None = None) -> None:
    options = ["-n", within] if within is not None else []
    if len(commands) == 1:
        _run(["ip", *options, *commands[0].split()])
    else:
        _run(["ip", *options, "-batch", "-"], "\n".join(commands))


def _run(words: list[str], text: str | None = None) -> None:
    done = subprocess.run(words, input=text, capture_output=True, text=True)
    if done.returncode:
        raise RunFailed(f"{' '.join(words)} ended with exit code {done.returncode}: {done.stderr.strip()}")
