"""Measures what the relays of several hosts add to the ranks' store, with hundreds of ranks' connections.

    python benchmarks/relay.py [--hosts 8] [--ranks 16,64] [--rounds 2]      writes benchmarks/results/relay.json

    direct     all ranks are connected with torch's TCPStore itself
    relayed    those of the first host are; the others by the relay of their host and the one at the rendezvous

A host is a launcher on loopback, and a rank is a thread of it with a connection of its own. All do what ranks of a run
do at the store when they start: connect, agree on a name (`next_round`), exchange addresses as gloo does for one group
(with a question for each peer, or with one for all), and then wait for each other three times, in
`StoreExchange.barrier`. Seconds are those of the slowest rank; the processor time is the relay's at the rendezvous.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from rounds import Spread, about_here, interleaved, markdown, save

PHASES = ("connect", "agree on a name", "addresses, one by one", "addresses, all at once", "3 barriers")
ONE_BY_ONE, MOST_ONE_BY_ONE = PHASES[2], 200  # ranks; with more it takes minutes
ROUND_TRIPS = 1000
ADDRESS = "x" * 200  # as long as gloo's
LIMIT = 120.0
_FORKS = multiprocessing.get_context("forkserver")


def host(node: int, hosts: int, ranks: int, address: str, relayed: bool, all_hosts: Barrier, results: Any) -> None:
    """Run the ranks of a host, phase by phase."""
    with ExitStack() as stack:
        port, relay = stack.enter_context(store_port(node, hosts, address, relayed))
        first = node * ranks
        stores: dict[int, Any] = {}
        phases = works(hosts * ranks, port, stores)
        if node == 0:
            phases["connect"](0)
        all_hosts.wait()
        for name in phases_of(hosts * ranks):
            all_hosts.wait()
            before, begun = processor_s(relay), time.perf_counter()
            in_threads(range(first, first + ranks), phases[name])
            seconds = time.perf_counter() - begun
            all_hosts.wait()
            results.put((name, seconds, processor_s(relay) - before))
        if node == hosts - 1:
            results.put(("us of a round trip", round_trip_us(stores[first]), 0.0))
        all_hosts.wait()


def phases_of(size: int) -> list[str]:
    return [name for name in PHASES if name != ONE_BY_ONE or size <= MOST_ONE_BY_ONE]


def works(size: int, port: int, stores: dict[int, Any]) -> dict[str, Callable[[int], None]]:
    """Return what a rank does in each phase."""
    from torch.distributed import PrefixStore, TCPStore

    from lockstep.distributed.rounds import next_round
    from lockstep.distributed.store_exchange import StoreExchange

    def connect(rank: int) -> None:
        if rank in stores:  # the first keeps the store, and is there before
            return
        descriptor = LISTENER.detach() if rank == 0 and LISTENER is not None else None
        limit = timedelta(seconds=LIMIT)
        stores[rank] = TCPStore(
            "127.0.0.1", port, size, rank == 0, limit, wait_for_workers=False, master_listen_fd=descriptor
        )

    def agree(rank: int) -> None:
        stores[rank] = PrefixStore(next_round(stores[rank], rank, size, LIMIT), stores[rank])

    def one_by_one(rank: int) -> None:
        stores[rank].set(f"v1/{rank}", ADDRESS)
        for peer in range(size):
            stores[rank].wait([f"v1/{peer}"])
            stores[rank].get(f"v1/{peer}")

    def all_at_once(rank: int) -> None:
        stores[rank].set(f"v2/{rank}", ADDRESS)
        stores[rank].multi_get([f"v2/{peer}" for peer in range(size)])

    def barriers(rank: int) -> None:
        exchange = StoreExchange(stores[rank], rank, size, wakes=False, timeout=LIMIT)
        exchange._store = PrefixStore("barriers", stores[rank])  # each process counts its exchanges, and not a thread
        for _ in range(3):
            exchange.barrier(range(size))

    return dict(zip(PHASES, (connect, agree, one_by_one, all_at_once, barriers), strict=True))


LISTENER: socket.socket | None = None  # of the store, on the first host


@contextmanager
def store_port(node: int, hosts: int, address: str, relayed: bool) -> Iterator[tuple[int, int]]:
    """Yield the port at which this host's ranks reach the store, and the process of its relay; 0: it has none."""
    global LISTENER
    from lockstep.config.schema import Launch
    from lockstep.launch.rendezvous import connected_hosts

    own = int(address.partition(":")[2])
    if node == 0:
        LISTENER = socket.create_server(("127.0.0.1", 0 if relayed else own), backlog=2048)
        own = LISTENER.getsockname()[1]
    if not relayed:
        yield own, 0
        return
    section = Launch(nodes=hosts, rendezvous=address, node_rank=node, job_id="benchmark")
    with connected_hosts(section, 1, {}) as meeting:
        meeting.meet()
        if node == 0:
            meeting.open_store(own)
        yield own if node == 0 else meeting.store_port, meeting._proxy._process.pid
        if node == 0:
            from lockstep.core.failure_kinds import FailureKind
            from lockstep.launch.outcome import LaunchResult

            meeting.finish(LaunchResult(FailureKind.DONE))


def in_threads(ranks: range, work: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=work, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def round_trip_us(store: Any) -> float:
    store.set("measured", "x")
    begun = time.perf_counter()
    for _ in range(ROUND_TRIPS):
        store.get("measured")
    return (time.perf_counter() - begun) / ROUND_TRIPS * 1e6 / 2  # get() waits for the key, and then gets it


def processor_s(process: int) -> float:
    if process == 0:
        return 0.0
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(name: str, hosts: int, ranks: int) -> dict[str, float]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    results, barrier = _FORKS.Manager().Queue(), _FORKS.Manager().Barrier(hosts)
    processes = [
        _FORKS.Process(target=host, args=(node, hosts, ranks, address, name == "relayed", barrier, results))
        for node in range(hosts)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit(f"{name}: {[process.exitcode for process in processes]}")
    seconds: dict[str, float] = {}
    busy: dict[str, float] = {}
    while not results.empty():
        phase, duration, processor = results.get()
        seconds[phase] = max(seconds.get(phase, 0.0), duration)
        busy[phase] = max(busy.get(phase, 0.0), processor)
    return {**seconds, **{f"processor, {phase}": busy[phase] for phase in phases_of(hosts * ranks)}}


def table(results: dict[str, Any]) -> str:
    """Return the tables of seconds, and of processor seconds of the relay at the rendezvous."""
    here = results["machine"]
    facts = f"{here['cores']} cores of {here['processor']} (load before: {here['load_before']})"
    tables = [_table(results["hosts"], ranks, runs) for ranks, runs in results["runs"].items()]
    return "\n\n".join([*tables, f"`{results['command']}`: {facts}. Medians, in brackets the least and the most."])


def _table(hosts: int, ranks: str, runs: dict[str, list[dict[str, float]]]) -> str:
    rows = [
        [phase, *(_range(runs[name], phase) for name in ("direct", "relayed")),
         _range(runs["relayed"], f"processor, {phase}")]
        for phase in phases_of(hosts * int(ranks))
    ]  # fmt: skip
    trips = [_range(runs[name], "us of a round trip", "{:,.0f}") for name in ("direct", "relayed")]
    head = [f"s, {hosts} hosts x {ranks} ranks", "direct", "relayed", "processor s of the relay"]
    return markdown(head, [*rows, ["us of a round trip, alone", *trips, ""]])


def _range(rows: list[dict[str, float]], key: str, form: str = "{:.2f}") -> str:
    return Spread.over([row[key] for row in rows]).text(form)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--ranks", default="16,64", help="of each host")
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    _FORKS.set_forkserver_preload(["torch", "lockstep.distributed.store_exchange"])
    machine = about_here(["torch"])
    runs: dict[str, Any] = {}
    for ranks in map(int, given.ranks.split(",")):
        runs[str(ranks)], _ = interleaved(
            ["direct", "relayed"], given.rounds, lambda name, ranks=ranks: measure(name, given.hosts, ranks)
        )
    results = {"hosts": given.hosts, "rounds": given.rounds, "machine": machine, "runs": runs,
               "command": " ".join(["python", "benchmarks/relay.py", *sys.argv[1:]])}  # fmt: skip
    save("relay", results)
    print(table(json.loads(json.dumps(results))))


if __name__ == "__main__":
    main()
