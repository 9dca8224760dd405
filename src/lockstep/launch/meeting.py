"""The start of a launcher's relay, and which host leads: the one that has the address of the rendezvous."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import threading
import uuid
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from lockstep import __version__
from lockstep.core.errors import ConfigError, Failure, Problem, RunFailed, message_of
from lockstep.core.failure_kinds import FailureKind
from lockstep.core.interfaces import is_loopback
from lockstep.core.nodes import is_elastic, node_range, split_address
from lockstep.core.stopping import code_at_once, undo_on_stop
from lockstep.launch.host_protocol import SHORT_SILENCE_S, SILENCE_S, job_key
from lockstep.launch.hosts import Hosts
from lockstep.launch.outcome import kind_of_stop, print_on_stderr
from lockstep.launch.relay_process import RelayProcess

if TYPE_CHECKING:
    from lockstep.config.schema import Launch

TOKEN = "LOCKSTEP_JOB_TOKEN"

_Address = tuple[int, int, int, str, tuple[Any, ...]]  # as of getaddrinfo
_NOTED_S = 0.5  # after which a name server that hasn't answered is noted


@contextlib.contextmanager
def connected_hosts(
    launch: Launch, ranks: int, settings: Mapping[str, str], *, recovers: bool = False
) -> Iterator[Hosts]:
    """Connect with the other hosts' launchers while the block runs; a failure of the block is reported to them.

    Args:
        launch: `nodes`, `rendezvous`, `node_rank`, `job_id`, and `timeout`: seconds to wait for the other hosts.
        ranks: Number of ranks on this host.
        settings: What must be equal on all hosts, by name: hashes.
        recovers: Whether another round may follow after a failure, also with hosts that come later.

    Raises:
        ConfigError: The rendezvous isn't an address, or not this host's although it shall lead.
    """
    host, port = _rendezvous(launch)
    listener = _listener(launch, host, port)
    name = socket.gethostname()
    token = os.environ.get(TOKEN, "")
    hello = {
        "host": name,
        "launcher": uuid.uuid4().hex,
        "node_rank": 0 if listener is not None else launch.node_rank,
        "nodes": launch.nodes,
        "ranks": ranks,
        "versions": versions(),
        "settings": dict(settings),
    }
    order = {
        "address": [host if listener is None else listener.getsockname()[0], port],
        "name": host,
        "key": job_key(token, launch.job_id or "").hex(),
        "timeout": launch.timeout,
        "limit": "launch.timeout",
        "join_wait": launch.nodes_wait,
        "silence": SHORT_SILENCE_S if recovers else SILENCE_S,
        "recovers": recovers,
        "hello": hello,
    }
    relay = RelayProcess(listener, order)
    hosts = Hosts(relay, name, leads=listener is not None, recovers=recovers)
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
            hosts.fail(
                FailureKind.STOPPED if isinstance(error, KeyboardInterrupt) else FailureKind.FAILED,
                f"host {name}: {error!r}",
            )
            raise


def _rendezvous(launch: Launch) -> tuple[str, int]:
    if launch.rendezvous is None:
        why = "is missing; give all hosts the same one, such as 10.0.0.1:29500, at which node 0 listens"
        raise ConfigError(Problem("", "launch.rendezvous", why))
    most = node_range(launch.nodes)[1]
    if launch.node_rank is not None and launch.node_rank >= most:
        why = f"{launch.node_rank}, but node ranks are 0 to {most - 1} with --nodes {launch.nodes}"
        raise ConfigError(Problem("", "launch.node_rank", why))
    return split_address(launch.rendezvous)


def _listener(launch: Launch, host: str, port: int) -> socket.socket | None:
    """Return a socket that listens at the rendezvous, on that address alone; None: another launcher listens there.

    A name that this host resolves to a loopback address (Debian has its own name as 127.0.1.1) is no address that
    others reach: then it listens on all.
    """
    if launch.node_rank not in (None, 0):
        return None
    try:
        family, _, _, _, address = _resolved(host, port, launch.timeout)
    except OSError as error:
        if launch.node_rank is None:
            return None  # the relay reports whether it can be reached
        raise ConfigError(Problem("", "launch.rendezvous", f"{host} can't be resolved: {error.strerror}")) from None
    everywhere = is_loopback(str(address[0])) and not is_loopback(host)
    try:
        return socket.create_server(("", port) if everywhere else address[:2], family=family, backlog=1024)
    except OSError as error:
        if launch.node_rank is None:
            return None
        why = f"node 0 can't listen on {host}:{port} ({os.strerror(error.errno or 0)}); give an address of this host"
        raise ConfigError(Problem("", "launch.rendezvous", why)) from None


def _resolved(host: str, port: int, timeout: float) -> _Address:
    """Resolve a name, in a thread that a signal needn't wait for; note that no name server answers. Raises OSError."""
    answers: list[_Address | OSError] = []

    def ask() -> None:
        try:
            answers.append(_own_address(host, port))
        except OSError as error:
            answers.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_NOTED_S)
    if thread.is_alive():
        print_on_stderr(f"note: no name server answers for {host} yet; waiting up to {timeout:g} s (launch.timeout)")
        thread.join(timeout)
    if not answers:
        raise RunFailed(
            f"no name server has answered for {host} within {timeout:g} s (launch.timeout); give --rendezvous an "
            "address of node 0, such as 10.0.0.1:29500"
        )
    if isinstance(answers[0], OSError):
        raise answers[0]
    return answers[0]


def _own_address(host: str, port: int) -> _Address:
    """Resolve a name of this host. A pod has its name before the cluster's name server knows `NAME.SERVICE`."""
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError:
        name = socket.gethostname()
        if host.partition(".")[0] != name.partition(".")[0]:
            raise
        return socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)[0]


def versions() -> dict[str, str]:
    """Return the versions that must be equal on all hosts. Raises PackageNotFoundError."""
    from importlib.metadata import version

    return {
        "Lockstep": __version__,
        "torch": version("torch").partition("+")[0],
        "Python": ".".join(platform.python_version_tuple()[:2]),
    }
