"""The environment variables by which a launcher tells a process its rank.

    launcher ---- RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT ----> RankEnvironment.read(os.environ)
    ours adds     LOCAL_WORLD_SIZE, LOCKSTEP_LAUNCHER, for rank 0 LOCKSTEP_STORE_FD     the same under every launcher

The names are torchrun's, so that any launcher that speaks them can start a rank. LOCKSTEP_STORE_FD is the file
descriptor of a socket that already listens on MASTER_PORT, on loopback alone: rank 0 makes its store of it
(`TCPStore(..., master_listen_fd=...)`), and nobody else can take the port in between. LOCKSTEP_LAUNCHER is
our launcher's process id.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from lockstep.core.errors import ConfigError, Problem

STORE_FD = "LOCKSTEP_STORE_FD"
LAUNCHER = "LOCKSTEP_LAUNCHER"

_LOOPBACK = "127.0.0.1"
_ANNOUNCES_A_RANK = ("RANK", "WORLD_SIZE")


@dataclass(frozen=True, slots=True)
class RankEnvironment:
    """The rank that a process is, as its environment describes it.

    Attributes:
        rank: of all, from 0.
        world_size: ranks in all.
        local_rank: of those on this machine, from 0; also the index of its GPU.
        local_world_size: ranks on this machine.
        master_addr, master_port: where rank 0 keeps the store. Port 0: a lone rank, any port will do.
        store_fd: rank 0 of our own launcher: a socket that listens there already.
        attempt: how often torchrun has restarted the ranks; what they leave in its store must not meet the next ones.
        agent_store: torchrun's agent keeps the store itself, and all ranks are its clients.
        one_machine: all ranks are known to be on this machine: nobody else need reach them.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str = _LOOPBACK
    master_port: int = 0
    store_fd: int | None = None
    attempt: int = 0
    agent_store: bool = False
    one_machine: bool = field(default=True, compare=False)  # follows from the others, and from what was left out

    @property
    def keeps_store(self) -> bool:
        """Whether this rank runs the store's server."""
        return self.rank == 0 and not self.agent_store

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> RankEnvironment:
        """Return the rank that `environ` describes; a single one if it has neither RANK nor WORLD_SIZE.

        LOCAL_WORLD_SIZE may be missing (DeepSpeed's launcher says LOCAL_SIZE, some none): all ranks are then taken
        to be on this machine.

        Raises:
            ConfigError: with all that is missing or contradicts, if only some are set.
        """
        if not names_a_rank(environ):
            return cls()
        _require(environ)
        world_size = _number(environ, "WORLD_SIZE")
        environment = cls(
            rank=_number(environ, "RANK"),
            world_size=world_size,
            local_rank=_number(environ, "LOCAL_RANK", 0 if world_size == 1 else None),
            local_world_size=_number(environ, "LOCAL_WORLD_SIZE", _number(environ, "LOCAL_SIZE", world_size)),
            master_addr=environ.get("MASTER_ADDR", _LOOPBACK),
            master_port=_number(environ, "MASTER_PORT", 0),
            store_fd=_number(environ, STORE_FD) if STORE_FD in environ else None,
            attempt=_number(environ, "TORCHELASTIC_RESTART_COUNT", 0),
            agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            one_machine=_is_one_machine(environ, world_size),
        )
        problems = environment._contradictions()
        if problems:
            raise ConfigError(problems)
        return environment

    def variables(self) -> dict[str, str]:
        """Return the environment that `read` reads this from."""
        variables = {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }
        return variables if self.store_fd is None else {**variables, STORE_FD: str(self.store_fd)}

    def _contradictions(self) -> list[Problem]:
        last, last_local = self.world_size - 1, self.local_world_size - 1
        checks = [
            (self.world_size >= 1, "WORLD_SIZE", f"is {self.world_size}; there is at least 1 rank"),
            (
                0 <= self.rank <= max(0, last),
                "RANK",
                f"is {self.rank}, but ranks are 0 to {last} with WORLD_SIZE {self.world_size}",
            ),
            (
                1 <= self.local_world_size <= max(1, self.world_size),
                "LOCAL_WORLD_SIZE",
                f"is {self.local_world_size}, "
                f"but WORLD_SIZE, which counts the ranks of all machines, is {self.world_size}",
            ),
            (
                0 <= self.local_rank <= max(0, last_local),
                "LOCAL_RANK",
                f"is {self.local_rank}, but local ranks are 0 to "
                f"{last_local} with {self.local_world_size} ranks on this machine",
            ),
            (0 <= self.master_port <= 65535, "MASTER_PORT", f"is {self.master_port}; ports are 1 to 65535"),
            (
                self.store_fd is None or self.rank == 0,
                STORE_FD,
                f"is set for rank {self.rank}, but rank 0 keeps the store; unset it",
            ),
        ]
        return [_problem(name, message) for holds, name, message in checks if not holds]


def is_loopback(host: str) -> bool:
    """Return whether only processes of this machine can reach a host."""
    return host in ("localhost", "::1") or host.startswith("127.")


def _is_one_machine(environ: Mapping[str, str], world_size: int) -> bool:
    """Return whether all ranks are known to be on this machine, by their number or by the address."""
    if world_size == 1 or is_loopback(environ.get("MASTER_ADDR", _LOOPBACK)):
        return True
    here = environ.get("LOCAL_WORLD_SIZE", environ.get("LOCAL_SIZE"))
    return here == str(world_size)


def names_a_rank(environ: Mapping[str, str]) -> bool:
    """Return whether a launcher made this process a rank (or tried to: `RankEnvironment.read` reports what is
    missing)."""
    return any(name in environ for name in _ANNOUNCES_A_RANK)


def started_by_lockstep(environ: Mapping[str, str]) -> bool:
    """Return whether Lockstep's launcher started this process as a rank, or is this process (with one rank)."""
    return environ.get(LAUNCHER) in (str(os.getpid()), str(os.getppid()))


def _require(environ: Mapping[str, str]) -> None:
    """Raise ConfigError unless the variables of torch's `env://` are set, and LOCAL_RANK, which chooses the GPU."""
    needed = list(_ANNOUNCES_A_RANK)
    if environ.get("WORLD_SIZE") != "1":
        needed += ["LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"]
    missing = [name for name in needed if name not in environ]
    if missing:
        variables = ", ".join(f"{name}={environ[name]}" for name in needed if name in environ)
        raise ConfigError([_problem(name, f"is not set, but {variables} is; {_REMEDIES[name]}") for name in missing])


_REMEDIES = {
    "RANK": "set it to this process's number among all, from 0, or unset WORLD_SIZE to start alone",
    "WORLD_SIZE": "set it to the number of ranks, or unset RANK to start alone",
    "LOCAL_RANK": "set it to this process's number on its machine, from 0 (on a single machine: RANK)",
    "MASTER_ADDR": "set it to the host of rank 0 (on a single machine: 127.0.0.1)",
    "MASTER_PORT": "set it to one free port of rank 0's host, the same for all ranks (such as 29500)",
}


def _number(environ: Mapping[str, str], name: str, otherwise: int | None = None) -> int:
    text = environ.get(name)
    if text is None:
        assert otherwise is not None, f"_require lets nobody come here without {name}"
        return otherwise
    try:
        return int(text)
    except ValueError:
        raise ConfigError(_problem(name, f"is {text!r}, which is not a whole number")) from None


def _problem(name: str, message: str) -> Problem:
    return Problem("environment", name, message)
