"""The network interfaces of this machine, as Linux describes them, and how fast TCP is without any."""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import dataclass

from lockstep.core.interfaces import address_of
from lockstep.doctor.findings import MachineView


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface.

    Attributes:
        is_up: Whether it can send.
        address: Its IPv4 address; empty if it has none.
        speed: Megabits per second; 0 if it isn't known, as of virtual ones.
    """

    name: str
    is_up: bool
    address: str
    speed: int

    def __str__(self) -> str:
        speed = f" at {self.speed / 1000:g} Gbit/s" if self.speed else ""
        return f"{self.name} {self.address or 'without an IPv4 address'}{'' if self.is_up else ', down'}{speed}"


def interfaces(machine: MachineView) -> list[Interface]:
    """Return all interfaces, by name."""
    return [_interface(machine, name) for name in machine.names("sys/class/net")]


def _interface(machine: MachineView, name: str) -> Interface:
    folder = f"sys/class/net/{name}"
    state = machine.text(f"{folder}/operstate")
    speed = machine.text(f"{folder}/speed")  # -1, or an error, if it isn't known
    flags = machine.text(f"{folder}/flags")
    is_up = state == "up" or (state == "unknown" and flags.startswith("0x") and bool(int(flags, 16) & 1))
    return Interface(name, is_up, address_of(name) or "", int(speed) if speed.isdecimal() else 0)


def infiniband(machine: MachineView) -> dict[str, float]:
    """Return the InfiniBand and RoCE adapters with an active port, and the bytes per second of the fastest."""
    rates = {}
    for adapter in machine.names("sys/class/infiniband"):
        ports = [
            f"sys/class/infiniband/{adapter}/ports/{port}"
            for port in machine.names(f"sys/class/infiniband/{adapter}/ports")
        ]
        active = [machine.text(f"{port}/rate").split() for port in ports if "ACTIVE" in machine.text(f"{port}/state")]
        gigabits = [float(words[0]) for words in active if words and words[0].replace(".", "", 1).isdecimal()]
        if gigabits:
            rates[adapter] = max(gigabits) * 125e6
    return rates


def tcp_bandwidth(size: int = 32 << 20) -> float:
    """Return the bytes per second of a TCP connection to this host itself, the best of some."""
    return max(_tcp_bandwidth(size) for _ in range(3))


def _tcp_bandwidth(size: int) -> float:
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = threading.Thread(target=_send, args=(server.getsockname(), size), daemon=True)
        sender.start()
        received, buffer = 0, bytearray(1 << 20)
        with server.accept()[0] as connection:
            began = time.perf_counter()
            while count := connection.recv_into(buffer):
                received += count
            seconds = time.perf_counter() - began
        sender.join()
    return received / seconds


def _send(address: tuple[str, int], size: int) -> None:
    with socket.create_connection(address) as connection:
        for _ in range(size >> 20):
            connection.sendall(bytes(1 << 20))
