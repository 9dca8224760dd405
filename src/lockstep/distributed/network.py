"""The network interface of a rank's connections, under every launcher.

one machine                             loopback, where no other machine can connect
the variable is set                     what the user, or Lockstep's launcher, has chosen
Lockstep's launcher of several hosts    the interface where it has met the others
MASTER_ADDR is another machine          the interface of the route to it
MASTER_ADDR is this machine             the interface of the address that the others connect to

By default gloo takes the interface of the hostname's address, which anybody can reach, or (Debian: 127.0.1.1) nobody.
With GLOO_ENABLE_STORE_V2_API each rank asks the store once for all addresses, instead of twice for each peer.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from lockstep.core.interfaces import (
    GLOO_INTERFACE,
    NCCL_INTERFACE,
    address_of,
    interface_names,
    interface_of,
    is_loopback,
    route_to,
)
from lockstep.core.ranks import ADDRESS
from lockstep.distributed.rounds import poll

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from lockstep.core.ranks import RankEnvironment

_ADDRESS, _OTHER = "network/address-of-rank-0", "network/other-interface-of-rank-"
_ALL_AT_ONCE = "GLOO_ENABLE_STORE_V2_API"
INTERFACE_VARIABLES = (GLOO_INTERFACE, NCCL_INTERFACE, _ALL_AT_ONCE)
_OTHERS_S = 30.0  # for ranks of other machines to post the address that they have connected to


def use_interface(environment: RankEnvironment, store: Store) -> None:
    """Make gloo and NCCL use the right interface, unless one is set. All ranks together."""
    os.environ.setdefault(_ALL_AT_ONCE, "1")
    if environment.one_machine:
        loopback = next((name for name in interface_names() if name in ("lo", "lo0")), None)
        if loopback is not None:
            os.environ.setdefault(GLOO_INTERFACE, loopback)
        return
    interface = _interface_to_others(environment, store)
    if interface is not None:
        for variable in (GLOO_INTERFACE, NCCL_INTERFACE):
            os.environ.setdefault(variable, interface)
        chosen = os.environ[GLOO_INTERFACE]
        if chosen != interface:
            uses = f"{socket.gethostname()} uses {_addressed(chosen)} ({GLOO_INTERFACE})"
            store.set(f"{_OTHER}{environment.rank}", f"{uses}, and reaches the others by {_addressed(interface)}")


def other_interfaces(environment: RankEnvironment, store: Store) -> list[str]:
    """Return a clause for each host that uses another interface than its route to the others."""
    keys = [f"{_OTHER}{rank}" for rank in range(environment.world_size)]
    with suppress(RuntimeError):  # the store has ended
        return [*dict.fromkeys(store.get(key).decode() for key in keys if store.check([key]))]
    return []


def _addressed(interface: str) -> str:
    return f"{interface}, {address_of(interface) or 'which has no address'}"


def _interface_to_others(environment: RankEnvironment, store: Store) -> str | None:
    if met := os.environ.get(ADDRESS):
        return interface_of(met)
    source = route_to(environment.master_addr)
    if source is not None and not is_loopback(source):
        store.set(_ADDRESS, socket.gethostbyname(environment.master_addr))
        return interface_of(source)
    has_others = environment.local_world_size < environment.world_size
    if GLOO_INTERFACE in os.environ or not has_others:
        return None
    if not poll(lambda: store.check([_ADDRESS]), time.monotonic() + _OTHERS_S):
        return None
    return interface_of(store.get(_ADDRESS).decode())
