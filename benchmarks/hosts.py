"""Measures the time from command to the first all-reduce over two hosts, beside torchrun's, and what the relay adds.

    python benchmarks/hosts.py [--rounds 5]      prints medians, writes benchmarks/results/hosts.json

The hosts are network namespaces with a rank each, which needs root. Both sides run the same function (`work`), in
interleaved rounds. Times are seconds since just before the commands were started. The last columns are round trips to
the ranks' store: from rank 0's host, and from the other host, under Lockstep through the relays.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

BEGAN = "HOSTS_BEGAN"
ROUND_TRIPS = 300


def work() -> int:
    """Run a rank: join as a run does, all-reduce; print the seconds since the command, and of a round trip."""
    import torch

    from lockstep.config.schema import Launch
    from lockstep.distributed.process_group import joined

    with joined(Launch(device="cpu"), grouped=True) as world:
        world.axis.sum(torch.ones(1))
        reduced = time.time() - float(os.environ[BEGAN])
        store = torch.distributed.distributed_c10d._get_default_store()
        store.set(f"measured/{world.rank}", "x")
        begun = time.perf_counter()
        for _ in range(ROUND_TRIPS):
            store.get(f"measured/{world.rank}")
        trip = (time.perf_counter() - begun) / ROUND_TRIPS
        world.axis.barrier()
        print(f"TIMES {world.rank} {reduced} {trip}", flush=True)
    return 0


def launch_on_host(node: int, address: str) -> int:
    from lockstep.config.schema import Launch
    from lockstep.launch.local import import_ahead, launch
    from lockstep.launch.rendezvous import connected_hosts

    section = Launch(nodes=2, rendezvous=address, node_rank=node, device="cpu")
    with connected_hosts(section, 1, {}) as hosts:
        import_ahead(["torch._dynamo"])
        hosts.meet()
        result = launch(work, 1, section, None, hosts=hosts)
        if hosts.leads:
            hosts.finish(result)
        return result.show()


def commands(name: str, address: str) -> list[list[str]]:
    """Return the command of each host."""
    me = str(Path(__file__).resolve())
    if name == "lockstep":
        return [[sys.executable, me, "host", str(node), address] for node in range(2)]
    torchrun = [str(Path(sys.executable).parent / "torchrun"), "--nnodes", "2", "--nproc-per-node", "1"]
    host, _, port = address.partition(":")
    meetings = []
    for node in range(2):  # torchrun doesn't find the namespaces' addresses by their hostname
        c10d = ["--rdzv-backend", "c10d", "--rdzv-endpoint", address, "--rdzv-id", "job"]
        places = ["--rdzv-conf", f"is_host={1 - node}", "--local-addr", f"{host[:-1]}{node + 1}"]
        meetings.append([*c10d, *places] if name == "torchrun" else ["--master-addr", host, "--master-port", port])
    return [[*torchrun, "--node-rank", str(node), *meeting, me, "rank"] for node, meeting in enumerate(meetings)]


def measure(name: str) -> dict[str, float]:
    from kit.hosts import network

    with tempfile.TemporaryDirectory() as place, network(2, Path(place)) as net:
        began = {BEGAN: str(time.time()), "OMP_NUM_THREADS": "1"}
        hosts = [
            net.start(node, *command, cwd=Path(place), **began)
            for node, command in enumerate(commands(name, f"{net.address(0)}:29500"))
        ]
        codes = [host.end() for host in hosts]
        outputs = [Path(place, f"of-host-{node}", "out").read_text() for node in range(2)]
        errors = [host.output for host in hosts]
    lines = [line.split() for output in outputs for line in output.splitlines() if line.startswith("TIMES")]
    if len(lines) != 2:
        raise SystemExit(f"{name}: {codes}, {errors}")
    ranks = {int(rank): (float(reduced), float(trip)) for _, rank, reduced, trip in lines}
    return {
        "first all-reduce": max(ranks[0][0], ranks[1][0]),
        "store, host 0": ranks[0][1],
        "store, host 1": ranks[1][1],
    }


def main() -> None:
    load = os.getloadavg()[0]
    rounds = int(sys.argv[2]) if sys.argv[1:2] == ["--rounds"] else 5
    names = ["lockstep", "torchrun", "torchrun static"]
    results: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    measure(names[0])  # starts the process from which commands are forked
    for turn in range(rounds):
        for name in names[turn % 3 :] + names[: turn % 3]:
            results[name].append(measure(name))
    table = {
        name: {key: statistics.median(row[key] for row in rows) for key in rows[0]} for name, rows in results.items()
    }
    for name, row in table.items():
        print(f"{name:16} " + "  ".join(f"{key} {value * 1e6:,.0f} us" for key, value in row.items()))
    Path(__file__).with_name("results").joinpath("hosts.json").write_text(
        json.dumps({"rounds": rounds, "load": load, "medians": table, "all": results}, indent=2) + "\n"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["host"]:
        sys.exit(launch_on_host(int(sys.argv[2]), sys.argv[3]))
    elif sys.argv[1:2] == ["rank"]:
        sys.exit(work())
    main()
