"""Checks of ports, interfaces, names, and the Hugging Face hub."""

from __future__ import annotations

import errno
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from lockstep.core import hub
from lockstep.core.interfaces import is_loopback, route_to
from lockstep.doctor.findings import Finding, MachineView, ok, warning, wrong
from lockstep.doctor.interfaces import Interface, interfaces

_TORCH_PORT = 29500
_FEW_PORTS = 1000
_LOOPBACK = "127."
_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


def port(machine: MachineView) -> Iterator[Finding]:
    """Check that the store's port is free: that of launch.port, MASTER_PORT, or torch's default."""
    master = machine.environ.get("MASTER_PORT", "")
    is_master_here = _is_local(machine.environ.get("MASTER_ADDR", "localhost"))
    named = machine.port or (int(master) if master.isdecimal() and int(master) < 65536 and is_master_here else 0)
    number = named or _TORCH_PORT
    low, high = _ephemeral(machine)
    if not _is_taken(number):
        seen = f"{number} is free" + ("" if named else ", torchrun's default; Lockstep takes any")
        if named and low <= named <= high:
            yield warning(
                f"{seen}, and any connection of this machine may take it ({low} to {high} are given to connections)",
                "Choose one below, such as 29400, or 0 (any free port) for ranks of one machine.",
            )
        else:
            yield ok(seen)
    else:
        seen = f"port {number} is taken{_owner(machine, number)}"
        if named:
            key = "launch.port" if machine.port else "MASTER_PORT"
            yield wrong(seen, f"End that process, or set {key} to another port (0 for launch.port: any free one).")
        else:
            yield warning(
                f"{seen}: torchrun takes it by default", "Pass --master-port to torchrun; Lockstep takes any."
            )
    if high - low < _FEW_PORTS:
        yield wrong(
            f"{high - low + 1} ports for connections ({low} to {high})",
            "Widen the range: sysctl net.ipv4.ip_local_port_range='32768 60999'",
        )


def network_interfaces(machine: MachineView) -> Iterator[Finding]:
    """List the interfaces, and check those that variables name."""
    here = interfaces(machine)
    usable = [interface for interface in here if interface.is_up and interface.address]
    problems = [finding for name in _VARIABLES for finding in _named(machine, name, here)]
    yield from problems
    if not usable:
        yield wrong("no interface has an IPv4 address, loopback neither", "Set loopback up: ip link set lo up")
    elif not problems:
        yield ok(", ".join(str(interface) for interface in usable))


def _named(machine: MachineView, variable: str, here: list[Interface]) -> Iterator[Finding]:
    """Check the interfaces that a variable names: gloo takes names, NCCL prefixes and, after `=`, names."""
    value = machine.environ.get(variable, "")
    if not value or value.startswith("^"):
        return
    exact = value.startswith("=") or not variable.startswith("NCCL")
    names = value.removeprefix("=").split(",")
    usable = [item for item in here if item.is_up and item.address]
    known = ", ".join(item.name for item in usable if item.name != "lo") or "lo"
    chosen = [
        item for item in here for name in names if item.name == name or (not exact and item.name.startswith(name))
    ]
    if not chosen:
        yield wrong(f"{variable}={value}, and there is no such interface", f"Set it to one that is here: {known}.")
        return
    if all(item not in usable for item in chosen):
        yield wrong(
            f"{variable}={value}: {chosen[0]}", f"Set it up (ip link set {chosen[0].name} up), or choose {known}."
        )
        return
    master = machine.environ.get("MASTER_ADDR", "")
    source = route_to(master, socket.AF_INET) if master and not _is_local(master) else ""
    if source and all(item.address != source for item in chosen):
        by = next((item.name for item in here if item.address == source), source)
        finding = wrong if all(item.address.startswith(_LOOPBACK) for item in chosen) else warning
        yield finding(
            f"{variable}={value}, and the route to MASTER_ADDR={master} leaves by {by}", f"Set {variable}={by}."
        )


def hostname(machine: MachineView) -> Iterator[Finding]:
    """Check what the hostname resolves to. Lockstep's ranks don't use it; gloo of other programs listens there."""
    name, master = machine.hostname, machine.environ.get("MASTER_ADDR", "")
    addresses = machine.addresses(name)
    seen = f"{name} is {', '.join(addresses) or 'unknown'}"
    set_to = machine.environ.get("GLOO_SOCKET_IFNAME")
    is_reached = any(not is_loopback(address) for address in addresses)
    if set_to or is_reached:
        yield ok(f"{seen}; gloo uses {set_to} (GLOO_SOCKET_IFNAME)" if set_to else seen)
    elif not master or _is_local(master):
        yield ok(f"{seen}, which matters to other programs on several hosts; Lockstep chooses by the route")
    else:
        source = route_to(master, socket.AF_INET)
        by = next((item.name for item in interfaces(machine) if item.address == source), "eth0")
        yield warning(
            f"{seen}, where gloo of programs other than Lockstep listens, and no other host reaches it",
            f"For those, set GLOO_SOCKET_IFNAME={by}, or give {name} its address in /etc/hosts. Lockstep's ranks use "
            f"the interface that leads to MASTER_ADDR.",
        )


def hugging_face_hub(machine: MachineView) -> Iterator[Finding]:
    """Ask the hub, unless HF_HUB_OFFLINE is set."""
    setting = machine.environ.get("HF_HUB_OFFLINE")
    endpoint = machine.environ.get("HF_ENDPOINT", hub.ENDPOINT)
    if setting is not None and hub.means_offline(setting):
        yield ok(f"not asked: HF_HUB_OFFLINE={setting}, and only the cache is used")
        return
    began = time.monotonic()
    if hub.responds(endpoint):
        yield ok(f"{endpoint} answered after {time.monotonic() - began:.2f} s")
        return
    yield warning(
        f"{endpoint} doesn't answer: names of models and datasets are found in the cache alone",
        "Set HTTPS_PROXY or HF_ENDPOINT; or run `lockstep data fetch RECIPE` with a network, and set HF_HUB_OFFLINE=1.",
    )


def _is_local(host: str) -> bool:
    """Return whether a host is this machine: one of its addresses can be bound."""
    if host in ("", "localhost") or host.startswith(_LOOPBACK):
        return True
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return True
    return False


def _ephemeral(machine: MachineView) -> tuple[int, int]:
    """Return the lowest and highest port that connections get."""
    numbers = machine.text("proc/sys/net/ipv4/ip_local_port_range").split()
    return (int(numbers[0]), int(numbers[1])) if len(numbers) == 2 else (32768, 60999)


def _is_taken(number: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch's store: a closed connection is no owner
        try:
            probe.bind(("", number))
            probe.listen(1)
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def _owner(machine: MachineView, number: int) -> str:
    """Return which process listens on a port, if this user may see that."""
    nodes = set()
    for table in ("proc/net/tcp", "proc/net/tcp6"):
        rows = (line.split() for line in machine.text(table).splitlines()[1:])
        nodes |= {row[9] for row in rows if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == number}
    for process in filter(str.isdecimal, machine.names("proc")):
        for descriptor in machine.names(f"proc/{process}/fd"):
            with suppress(OSError):
                link = os.readlink(Path(machine.root, "proc", process, "fd", descriptor))
                match = re.fullmatch(r"socket:\[(\d+)\]", link)
                if match and match[1] in nodes:
                    command = machine.text(f"proc/{process}/cmdline").replace("\0", " ").strip()
                    return f" by process {process} ({command[:60]})"
    return ""
