"""Hosts for tests: the network namespaces of `kit.namespaces`, and commands that are started on them."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest

from kit import namespaces
from kit.commands import Running, _environment, _lead
from kit.worlds import served

__all__ = ["Network", "folder_of", "needs_hosts", "network"]

needs_hosts = pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc"))),
    reason="network namespaces need root and iproute2's `ip`",
)


@dataclass
class Network(namespaces.Network):
    """Hosts on one network, with commands."""

    def add_interface(self, host: int, name: str) -> None:
        """Add an interface that is up and has no address."""
        namespaces._ip(
            f"link add {name} type bridge", f"link set {name} addrgenmode none up", within=f"{self.name}-{host}"
        )

    def slow_to(self, host: int, other: int) -> None:
        """Limit what a host sends to another to 20 Mbit/s."""
        for words in (
            "qdisc add dev eth0 root handle 1: htb default 1",
            "class add dev eth0 parent 1: classid 1:1 htb rate 10gbit",
            "class add dev eth0 parent 1: classid 1:2 htb rate 10gbit",
            f"qdisc add dev eth0 parent 1:2 {namespaces.SLOW}",
            f"filter add dev eth0 parent 1: protocol ip u32 match ip dst {self.address(other)}/32 flowid 1:2",
        ):
            self.control(host, words)

    def listener(self, host: int) -> socket.socket:
        """A socket that listens on a host, in this process."""
        with ThreadPoolExecutor(1) as thread:  # which alone enters the host
            return thread.submit(self._listen, host).result()

    def _listen(self, host: int) -> socket.socket:
        self.enter(host)
        return socket.create_server((self.address(host), 0), backlog=128)

    def start(
        self,
        host: int,
        *words: object,
        cwd: Path,
        hides: Path | None = None,
        silence: float | None = None,
        **environment: str | None,
    ) -> Running:
        """Start the command `lockstep` on a host, or a program whose path is the first word.

        `hides`: a folder that is another one there, `folder_of(host, hides)`.
        `silence`: seconds after which other hosts count as lost, instead of ten.
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
        if silence is not None:
            command = partial(_with_silence, silence, command)
        if hides is not None:
            command = partial(_with_hidden, hides, folder_of(host, hides), command)
        process = served().Process(target=partial(self.run, host, command))
        process.start()
        return Running(process, output)


def folder_of(host: int, folder: Path) -> Path:
    """The folder that a host has instead of this one, if it is started so."""
    return folder.with_name(f"{folder.name}-of-host-{host}")


def _with_hidden(folder: Path, own: Path, command: Callable[[], None]) -> None:
    for each in (folder, own):
        each.mkdir(exist_ok=True)
    namespaces.bind(own, str(folder))
    command()


def _with_silence(seconds: float, command: Callable[[], None]) -> None:
    with patch("lockstep.launch.rendezvous.SILENCE_S", seconds):
        command()


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
    """Yield a network of hosts, which is removed afterwards.

    `service`: a headless Service of Kubernetes; a pod knows itself as SERVICE-0 and the others as SERVICE-1.SERVICE.
    `containers`: of Docker Compose instead; each knows all as NAME0, NAME1, ..., itself by its address.
    `prefix`: of addresses, 10.77.0. or one of IPv6.
    """
    made = Network(namespaces.new_name(), hosts, folder, prefix)
    if service:
        made.hostname, made.known = partial(_pod, service), partial(_pod_known, service)
    if containers:
        made.hostname, made.known = partial(_container, containers), partial(_container_known, containers)
    with namespaces.joined(made):
        yield made


def _pod(service: str, host: int) -> str:
    return f"{service}-{host}"


def _pod_known(service: str, address: str, host: int, other: int) -> str:
    return f"{address} {service}-{other}" + f".{service}" * (other != host)


def _container(name: str, host: int) -> str:
    return f"{name}{host}"


def _container_known(name: str, address: str, host: int, other: int) -> str:
    return f"{address} {name}{other}"
