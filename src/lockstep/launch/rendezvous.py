"""How the launchers of several hosts meet, and which host leads: the one that has the address of the rendezvous."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from lockstep import __version__
from lockstep.core.errors import ConfigError, Failure, Problem, message_of
from lockstep.core.failure_kinds import FailureKind
from lockstep.core.interfaces import is_loopback
from lockstep.core.nodes import is_elastic, node_range, split_address
from lockstep.core.stopping import code_at_once, undo_on_stop
from lockstep.launch.agent import Hosts, ProxyProcess
from lockstep.launch.channel import SHORT_SILENCE_S, SILENCE_S, job_key
from lockstep.launch.outcome import kind_of_stop, print_on_stderr

if TYPE_CHECKING:
    from lockstep.config.schema import Launch

TOKEN = "LOCKSTEP_JOB_TOKEN"


@contextlib.contextmanager
def connected_hosts(
    launch: Launch, ranks: int, settings: Mapping[str, str], *, recovers: bool = False
) -> Iterator[Hosts]:
    """Connect with the other hosts' launchers while the block runs; a failure of the block is reported to them.

    Args:
        ranks: Number of ranks on this host.
        settings: Hashes of what must be equal on all hosts, by name.
        recovers: Whether another round may follow after a failure, also with hosts that come later.

    Raises:
        ConfigError: The rendezvous isn't an address, or not this host's although it shall lead.
    """
    host, port = _rendezvous(launch)
    listener = _listener(launch, host, port)
    name = socket.gethostname()
    token = os.environ.get(TOKEN, "")
    order = {
        "address": [host if listener is None else listener.getsockname()[0], port],
        "name": host,
        "key": job_key(token, launch.job_id or "").hex(),
        "timeout": launch.timeout,
        "join_wait": launch.nodes_wait,
        "silence": SHORT_SILENCE_S if recovers else SILENCE_S,
        "recovers": recovers,
        "hello": {
            "host": name,
            "node_rank": launch.node_rank if listener is None else 0,
            "nodes": launch.nodes,
            "ranks": ranks,
            "versions": versions(),
            "settings": dict(settings),
        },
    }
    hosts = Hosts(ProxyProcess(listener, order), name, leads=listener is not None, recovers=recovers)
    hosts.elastic = is_elastic(launch.nodes)
    with (
        contextlib.closing(hosts),
        undo_on_stop(lambda: hosts.fail(kind_of_stop(code_at_once()), f"stopped on host {name}")),
    ):
        if hosts.leads and not token:
            print_on_stderr(f"note: {TOKEN} isn't set: any host that knows the job's id can join this run")
        try:
            yield hosts
        except Failure as failure:
            hosts.fail(failure.kind, message_of(failure))
            raise
        except BaseException as error:
            stops = isinstance(error, KeyboardInterrupt)
            hosts.fail(FailureKind.STOPPED if stops else FailureKind.FAILED, f"host {name}: {error!r}")
            raise


def _rendezvous(launch: Launch) -> tuple[str, int]:
    if launch.rendezvous is None:
        why = "is missing; give all hosts the same one, where node 0 listens, such as 10.0.0.1:29500"
        raise ConfigError(Problem("", "launch.rendezvous", why))
    most = node_range(launch.nodes)[1]
    if launch.node_rank is not None and launch.node_rank >= most:
        why = f"{launch.node_rank}, but node ranks are 0 to {most - 1} with --nodes {launch.nodes}"
        raise ConfigError(Problem("", "launch.node_rank", why))
    return split_address(launch.rendezvous)


def _listener(launch: Launch, host: str, port: int) -> socket.socket | None:
    """Return a socket that listens at the rendezvous, on that address only; None: another launcher listens there.

    A name that this host resolves to a loopback address (Debian has its own name as 127.0.1.1) is no address that
    others reach: then it listens on all.
    """
    if launch.node_rank not in (None, 0):
        return None
    try:
        family, address = _own_address(host, port)
        everywhere = is_loopback(str(address[0])) and not is_loopback(host)
        return socket.create_server(("", port) if everywhere else address[:2], family=family, backlog=1024)
    except OSError as error:
        if launch.node_rank is None:
            return None  # the proxy reports whether another host listens there
        why = f"node 0 can't listen on {host}:{port} ({error.strerror}); give an address of this host"
        raise ConfigError(Problem("", "launch.rendezvous", why)) from None


def _own_address(host: str, port: int) -> tuple[int, tuple[Any, ...]]:
    """Resolve a name of this host. A pod has its name before the cluster's name server knows `NAME.SERVICE`."""
    name = socket.gethostname()
    try:
        answers = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        if host.partition(".")[0] != name.partition(".")[0]:
            raise
        answers = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return answers[0][0], answers[0][4]


def versions() -> dict[str, str]:
    """Return the versions that must be equal on all hosts. Raises PackageNotFoundError."""
    from importlib.metadata import version

    python = ".".join(platform.python_version_tuple()[:2])
    return {"Lockstep": __version__, "torch": version("torch").partition("+")[0], "Python": python}
