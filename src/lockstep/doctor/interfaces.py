"""The network interfaces of this machine, as Linux describes them."""

from __future__ import annotations

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
