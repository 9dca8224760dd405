"""Hosts for tests: network namespaces, joined by a bridge in one more. A host resolves its own name to 127.0.1.1.

10.77.0.1 host-0 --.
10.77.0.2 host-1 --+-- bridge          network.cut(1) sets host-1's link down
10.77.0.3 host-2 --'
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kit.commands import Running, _environment, _lead
from kit.worlds import served

_NEWNS, _NEWUTS, _NEWNET = 0x00020000, 0x04000000, 0x40000000
_BIND, _PRIVATE, _RECURSIVE = 4096, 1 << 18, 16384
_numbers = itertools.count()

needs_hosts = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None,
    reason="network namespaces need root and iproute2's `ip`",
)


@dataclass
class Network:
    """Hosts on one network.

    `service`: a headless Service of Kubernetes; a pod knows itself as SERVICE-0 and the others as SERVICE-1.SERVICE.
    `containers`: of Docker Compose instead; each knows all as NAME0, NAME1, ..., itself by its address.
    `prefix`: of addresses, 10.77.0. or one of IPv6.
    """

    name: str
    hosts: int
    folder: Path
    service: str = ""
    prefix: str = "10.77.0."
    containers: str = ""

    def address(self, host: int) -> str:
        return f"{self.prefix}{host + 1}"

    def add_interface(self, host: int, name: str) -> None:
        """Add an interface that is up and has no address."""
        _ip(f"link add {name} type bridge", f"link set {name} addrgenmode none up", within=f"{self.name}-{host}")

    def cut(self, host: int) -> None:
        _ip(f"netns exec {self.name} ip link set port{host} down")

    def join(self, host: int) -> None:
        _ip(f"netns exec {self.name} ip link set port{host} up")

    def listener(self, host: int) -> socket.socket:
        """A socket that listens on a host, in this process."""
        with ThreadPoolExecutor(1) as thread:  # which alone enters the host
            return thread.submit(self._listen, host).result()

    def _listen(self, host: int) -> socket.socket:
        self._enter(host)
        return socket.create_server((self.address(host), 0), backlog=128)

    def _enter(self, host: int) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{self.name}-{host}") as namespace:
            assert libc.setns(namespace.fileno(), _NEWNET) == 0, os.strerror(ctypes.get_errno())

    def start(
        self, host: int, *words: object, cwd: Path, hides: Path | None = None, **environment: str | None
    ) -> Running:
        """Start the command `lockstep` on a host, or a program whose path is the first word.

        `hides`: a folder that is another one there, `folder_of(host, hides)`.
        """
        output = cwd / f"of-host-{host}"
        output.mkdir(exist_ok=True)
        for name in ("out", "err"):
            (output / name).write_text("")
        variables = {name: text for name, text in {**_environment(), **environment}.items() if text is not None}
        where = (str(cwd), variables, str(output / "out"), str(output / "err"))
        is_program = str(words[0]).startswith("/")
        command = partial(_exec, [*map(str, words)], *where)
        if not is_program:
            command = partial(_lead, ["lockstep", *map(str, words)], *where)
        process = served().Process(target=partial(self.run, host, command, hides))
        process.start()
        return Running(process, output)

    def _known(self, host: int, other: int) -> str:
        """Return how a host knows another, or itself."""
        if self.containers:
            return f"{self.address(other)} {self.containers}{other}"
        if self.service:
            return f"{self.address(other)} {self.service}-{other}" + f".{self.service}" * (other != host)
        return f"{self.address(other) if other != host else '127.0.1.1'} host-{other}"

    def run(self, host: int, function: Callable[[], Any], hides: Path | None = None) -> Any:
        """Run a function in this process, which is on the host from now on."""
        libc = ctypes.CDLL(None, use_errno=True)
        self._enter(host)
        assert libc.unshare(_NEWUTS | _NEWNS) == 0, os.strerror(ctypes.get_errno())
        hostname = (f"{self.containers}{host}" if self.containers else f"{self.service or 'host'}-{host}").encode()
        libc.sethostname(hostname, len(hostname))
        libc.mount(None, b"/", None, _RECURSIVE | _PRIVATE, None)
        hosts = self.folder / f"hosts-{host}"
        hosts.write_text("\n".join(["127.0.0.1 localhost", *map(partial(self._known, host), range(self.hosts)), ""]))
        assert libc.mount(bytes(hosts), b"/etc/hosts", None, _BIND, None) == 0, os.strerror(ctypes.get_errno())
        sysfs = self.folder / f"sys-{host}"
        sysfs.mkdir(exist_ok=True)
        assert libc.mount(b"sysfs", bytes(sysfs), b"sysfs", 0, None) == 0, os.strerror(ctypes.get_errno())
        for part in ("class/net", "devices/virtual/net"):  # of this host; the machine's control groups stay
            source, place = bytes(sysfs / part), f"/sys/{part}".encode()
            assert libc.mount(source, place, None, _BIND, None) == 0, os.strerror(ctypes.get_errno())
        if hides is not None:
            own = folder_of(host, hides)
            for folder in (hides, own):
                folder.mkdir(exist_ok=True)
            assert libc.mount(bytes(own), bytes(hides), None, _BIND, None) == 0, os.strerror(ctypes.get_errno())
        return function()


def folder_of(host: int, folder: Path) -> Path:
    """The folder that a host has instead of this one, if it is started so."""
    return folder.with_name(f"{folder.name}-of-host-{host}")


def _exec(words: list[str], folder: str, environment: dict[str, str], out: str, err: str) -> None:
    os.setsid()
    os.chdir(folder)
    for stream, file in ((1, out), (2, err)):
        os.dup2(os.open(file, os.O_WRONLY), stream)
    os.execve(words[0], words, environment)


@contextlib.contextmanager
def network(
    hosts: int, folder: Path, service: str = "", prefix: str = "10.77.0.", containers: str = ""
) -> Iterator[Network]:
    """Yield a network of hosts, which is removed afterwards. Arguments as of `Network`."""
    length = "64 nodad" if ":" in prefix else "24"
    name = f"lockstep-{os.getpid()}-{next(_numbers)}"
    spaces = [name, *(f"{name}-{host}" for host in range(hosts))]
    try:
        _ip(*(f"netns add {space}" for space in spaces))
        _ip("link add hub type bridge", "link set hub up", "link set lo up", within=name)
        for host in range(hosts):
            own = f"{name}-{host}"
            _ip(f"link add port{host} type veth peer name eth0 netns {own}", within=name)
            _ip(f"link set port{host} master hub", f"link set port{host} up", within=name)
            _ip("link set lo up", f"addr add {prefix}{host + 1}/{length} dev eth0", "link set eth0 up", within=own)
        yield Network(name, hosts, folder, service, prefix, containers)
    finally:
        for space in spaces:
            subprocess.run(["ip", "netns", "delete", space], capture_output=True)


def _ip(*commands: str, within: str | None = None) -> None:
    options = ["-n", within] if within is not None else []
    if within is None and len(commands) == 1:
        subprocess.run(["ip", *commands[0].split()], check=True, capture_output=True)
        return
    subprocess.run(["ip", *options, "-batch", "-"], input="\n".join(commands), text=True, check=True)
