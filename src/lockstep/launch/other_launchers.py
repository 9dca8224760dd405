"""Applies or refuses the config's `launch` where another launcher has started the ranks."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator, Mapping

from lockstep.config.schema import Launch
from lockstep.core.errors import ConfigError, Problem, refuse
from lockstep.core.interfaces import GLOO_INTERFACE, NCCL_INTERFACE, has_address, interface_names, interface_of
from lockstep.core.process_settings import set_environment
from lockstep.core.ranks import ADDRESS, LAUNCHER, NODES, STORE_FD, RankEnvironment, names_a_rank, started_by_lockstep

# Variables of the dynamic linker, the C library, the interpreter, OpenMP, MKL, and torch's import.
_READ_AT_START = re.compile(
    r"LD_|DYLD_|PYTHON(?!PATH)|MALLOC_|GLIBC_|OMP_(?!NUM_THREADS)|KMP_|GOMP_|MKL_|TORCH_LOGS|TORCH_TRACE"
)


def read_at_start(variables: Mapping[str, str]) -> list[str]:
    """Return the variables that a process reads only as it starts."""
    return [name for name in variables if _READ_AT_START.match(name)]


def refuse_unsettable(variables: Mapping[str, str]) -> None:
    """Raise ConfigError for variables of `launch.environment` that can't be set only for the ranks."""
    own = {*RankEnvironment().variables(), STORE_FD, LAUNCHER, NODES, ADDRESS}
    reasons = {name: "is set for each rank by the launcher; leave it out" for name in variables if name in own}
    if "PYTHONPATH" in variables:
        reasons["PYTHONPATH"] = "is read by the process that starts the ranks; export it before that"
    refuse(Problem("", f"launch.environment.{name}", why) for name, why in reasons.items())


@contextlib.contextmanager
def launch_environment(launch: Launch) -> Iterator[None]:
    """Apply `launch` to this process while the block runs. Under Lockstep's launcher it is applied already.

    Raises:
        ConfigError: The launcher, or the program, that has started this process contradicts it.
    """
    if started_by_lockstep(os.environ):
        yield
        return
    refuse_unsettable(launch.environment)
    refuse(_contradicted(launch))
    variables = {**interface_variables(launch.interface), **launch.environment}
    with set_environment(variables), set_threads(launch.environment):
        yield


@contextlib.contextmanager
def set_threads(variables: Mapping[str, str]) -> Iterator[None]:
    """Apply OMP_NUM_THREADS while the block runs to a torch that is imported already."""
    torch = sys.modules.get("torch")
    threads = variables.get("OMP_NUM_THREADS", "").split(",")[0]
    if torch is None or not threads.isdigit() or int(threads) < 1:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(int(threads))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def refuse_rank_count(ranks: int, key: str = "launch.ranks") -> None:
    """Raise ConfigError if another launcher has started another number of ranks on this machine."""
    refuse(_other_number(ranks, key))


def _other_number(ranks: int, key: str) -> Iterator[Problem]:
    is_rank = names_a_rank(os.environ)
    here = RankEnvironment.read(os.environ).local_world_size if is_rank else 1
    if ranks != here:
        remedy = f"start {ranks} there (torchrun --nproc-per-node {ranks})" if is_rank else f"give train ranks={ranks}"
        yield Problem("", key, f"{ranks} ranks, but {here} started on this machine; write {here} or auto, or {remedy}")


def _contradicted(launch: Launch) -> Iterator[Problem]:
    for name in read_at_start(launch.environment):
        why = "is read when a process starts, and Lockstep hasn't started this one; export it before that"
        yield Problem("", f"launch.environment.{name}", why)
    if launch.ranks != "auto":
        yield from _other_number(launch.ranks, "launch.ranks")
    is_rank = names_a_rank(os.environ)
    if launch.nodes != 1:
        why = "another launcher has started this rank, and joins hosts itself" if is_rank else "this starts no ranks"
        yield Problem("", "launch.nodes", f"{launch.nodes} hosts, but {why}; leave it out")
    environment = RankEnvironment.read(os.environ) if is_rank else RankEnvironment()
    if environment.world_size > 1 and launch.port not in (0, environment.master_port):
        other = f"MASTER_PORT is {environment.master_port}"
        yield Problem("", "launch.port", f"{launch.port}, but {other}; leave it out, or give it to your launcher")


def interface_variables(interface: str | None, address: str = "") -> dict[str, str]:
    """Return the variables that make gloo and NCCL use an interface, or the one with an address of this host.

    Those that the user has set are left out. Raises ConfigError if there is no such interface with an address.
    """
    if interface is not None and (interface not in interface_names() or not has_address(interface)):
        others = ", ".join(name for name in interface_names() if has_address(name))
        why = f"this host has no interface {interface} with an address; it has {others}"
        raise ConfigError(Problem("", "launch.interface", why))
    name = interface or (interface_of(address) if address else None)
    if name is None:
        return {}
    return {variable: name for variable in (GLOO_INTERFACE, NCCL_INTERFACE) if variable not in os.environ}
