"""Reads the environment variables that make a process a rank: torchrun's, and some of Lockstep's launcher.

LOCKSTEP_STORE_FD   for rank 0: a socket that already listens on MASTER_PORT, so that no other process can take the port
LOCKSTEP_LAUNCHER   process id of Lockstep's launcher
LOCKSTEP_NODES      number of hosts; on several, MASTER_PORT is on each host's loopback, and launchers forward it
LOCKSTEP_ADDRESS    this host's address on the launchers' network
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from lockstep.core.errors import ConfigError, Problem, refuse

STORE_FD = "LOCKSTEP_STORE_FD"
LAUNCHER = "LOCKSTEP_LAUNCHER"
NODES = "LOCKSTEP_NODES"
ADDRESS = "LOCKSTEP_ADDRESS"

_LOOPBACK = "127.0.0.1"
_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class RankEnvironment:
    """The rank of a process.

    Attributes:
        local_rank, local_world_size: Among the ranks on this machine.
        master_addr, master_port: Of rank 0's store. Port 0: a single rank.
        store_fd: Descriptor of a socket that listens there already; only for rank 0 of Lockstep's launcher.
        agent_store: torchrun's agent keeps the store, with all that earlier ranks have left there.
        launch_id: The id that an elastic launcher gives all ranks, also restarted ones; empty: none.
        one_machine: All ranks are known to be on this machine.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str = _LOOPBACK
    master_port: int = 0
    store_fd: int | None = None
    agent_store: bool = False
    launch_id: str = ""
    one_machine: bool = field(default=True, compare=False)  # follows from the others, and from what was left out

    @property
    def keeps_store(self) -> bool:
        """True if this rank runs the store's server."""
        return self.rank == 0 and not self.agent_store

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> RankEnvironment:
        """Return the rank that `environ` describes; a single one if it has neither RANK nor WORLD_SIZE.

        Without LOCAL_WORLD_SIZE (or DeepSpeed's LOCAL_SIZE), all ranks are assumed to be on this machine.

        Raises:
            ConfigError: Lists the variables that are missing or wrong.
        """
        if not names_a_rank(environ):
            return cls()
        _require(environ)
        world_size = _number(environ, "WORLD_SIZE")
        master_addr = environ.get("MASTER_ADDR", _LOOPBACK)
        local = environ.get("LOCAL_WORLD_SIZE", environ.get("LOCAL_SIZE"))
        is_loopback = master_addr in ("localhost", "::1") or master_addr.startswith("127.")
        environment = cls(
            rank=_number(environ, "RANK"),
            world_size=world_size,
            local_rank=_number(environ, "LOCAL_RANK", 0 if world_size == 1 else None),
            local_world_size=_number(environ, "LOCAL_WORLD_SIZE", _number(environ, "LOCAL_SIZE", world_size)),
            master_addr=master_addr,
            master_port=_number(environ, "MASTER_PORT", 0),
            store_fd=_number(environ, STORE_FD) if STORE_FD in environ else None,
            agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            launch_id=environ.get("TORCHELASTIC_RUN_ID", ""),
            one_machine=world_size == 1 or local == str(world_size) or (is_loopback and environ.get(NODES, "1") == "1"),
        )
        refuse(environment._contradictions())
        return environment

    def variables(self) -> dict[str, str]:
        """Return the environment variables for `read`."""
        variables = {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }
        return variables if self.store_fd is None else {**variables, STORE_FD: str(self.store_fd)}

    def _contradictions(self) -> Iterator[Problem]:
        limits = {
            "WORLD_SIZE": (self.world_size, 1, self.world_size),
            "RANK": (self.rank, 0, self.world_size - 1),
            "LOCAL_WORLD_SIZE": (self.local_world_size, 1, self.world_size),
            "LOCAL_RANK": (self.local_rank, 0, self.local_world_size - 1),
            "MASTER_PORT": (self.master_port, 0, 65535),
        }
        for name, (value, low, high) in limits.items():
            if not low <= value <= high:
                yield _problem(name, f"is {value}, but with WORLD_SIZE {self.world_size} it is from {low} to {high}")


def names_a_rank(environ: Mapping[str, str]) -> bool:
    """Return whether a launcher made this process a rank."""
    return "RANK" in environ or "WORLD_SIZE" in environ


def started_by_lockstep(environ: Mapping[str, str]) -> bool:
    """Return whether Lockstep's launcher started this process as a rank, or is this process (one rank)."""
    return environ.get(LAUNCHER) in (str(os.getpid()), str(os.getppid()))


def _require(environ: Mapping[str, str]) -> None:
    """Raise ConfigError unless the variables of torch's `env://` are set, and LOCAL_RANK."""
    needed = _NEEDED[:2] if environ.get("WORLD_SIZE") == "1" else _NEEDED
    if missing := [name for name in needed if name not in environ]:
        variables = ", ".join(f"{name}={environ[name]}" for name in needed if name in environ)
        why = f"is not set, but {variables} is; set it as torchrun does, or unset RANK and WORLD_SIZE for one process"
        raise ConfigError([_problem(name, why) for name in missing])


def _number(environ: Mapping[str, str], name: str, otherwise: int | None = None) -> int:
    if (text := environ.get(name)) is None:
        assert otherwise is not None, f"_require has checked that {name} is set"
        return otherwise
    try:
        return int(text)
    except ValueError:
        raise ConfigError(_problem(name, f"is {text!r}, which is not a whole number")) from None


def _problem(name: str, message: str) -> Problem:
    return Problem("environment", name, message)
