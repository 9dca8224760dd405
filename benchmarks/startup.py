"""Measures the time from command to the first all-reduce of two ranks, to the first optimizer step, and to the end.

    python benchmarks/startup.py [--rounds 7]      prints a table, writes benchmarks/results/startup.json

A plain DDP script (`work` below) runs under every launcher, in interleaved rounds: each round runs all of them once, in
a rotating order, so that a slow minute of the machine affects all of them. Times are seconds since just before the
command was started; medians with ranges. A launcher that can't run here is listed with what it printed.
"""

from __future__ import annotations

import os
import sys
import time

BEGAN = "STARTUP_BEGAN"
RANKS = 2


def work() -> int:
    """Run a rank: join, all-reduce, one step of a small model under DDP; rank 0 prints the times."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    _join()
    dist.all_reduce(torch.ones(1))
    reduced = time.time()
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    stepped = time.time()
    if dist.get_rank() == 0:
        began = float(os.environ[BEGAN])
        print(f"TIMES {reduced - began} {stepped - began}", flush=True)
    dist.destroy_process_group()
    return 0


def _join() -> None:
    """Join with a store on the socket that Lockstep's launcher passes on, or with torch's rendezvous."""
    import torch.distributed as dist

    store_fd = os.environ.get("LOCKSTEP_STORE_FD")
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if "LOCKSTEP_BENCHMARK" not in os.environ:
        dist.init_process_group("gloo")
        return
    port = int(os.environ["MASTER_PORT"])
    descriptor = int(store_fd) if store_fd else None
    store = dist.TCPStore("127.0.0.1", port, ranks, rank == 0, master_listen_fd=descriptor)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)


def launch_with_lockstep() -> int:
    from lockstep.config.schema import Launch
    from lockstep.launch.local import launch

    return launch(work, RANKS, Launch(environment={"LOCKSTEP_BENCHMARK": "1"}), None).show()


def contestants() -> dict[str, list[str]]:
    """Return the command of each contestant, by name."""
    from pathlib import Path

    bin_, me = Path(sys.executable).parent, str(Path(__file__).resolve())
    return {
        "lockstep": [sys.executable, me, "lockstep"],
        "torchrun": [str(bin_ / "torchrun"), "--nproc-per-node", str(RANKS), me, "rank"],
        "accelerate launch": [
            *(str(bin_ / "accelerate"), "launch", "--multi_gpu", "--num_processes", str(RANKS), "--num_machines", "1"),
            *("--mixed_precision", "no", "--dynamo_backend", "no", "--num_cpu_threads_per_process", "1", me, "rank"),
        ],
        "deepspeed": [str(bin_ / "deepspeed"), "--num_accelerators", str(RANKS), "--no_local_rank", me, "rank"],
    }


def measure(command: list[str]) -> dict[str, float] | str:
    """Return the seconds to the first all-reduce, to the first step and to the end, or why it did not run."""
    import re
    import subprocess

    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", BEGAN: str(time.time())}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    ended = time.time()
    times = re.search(r"TIMES (\S+) (\S+)", done.stdout)
    if done.returncode != 0 or times is None:
        errors = [line for line in done.stderr.splitlines() if re.search(r"terminate called|Error\b", line)]
        return (errors or [f"exit code {done.returncode}"])[0].strip()
    return {
        "first all-reduce": float(times[1]),
        "first step": float(times[2]),
        "prompt": ended - float(environment[BEGAN]),
    }


def main() -> None:
    import argparse
    import json
    from pathlib import Path

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds

    names = list(commands := contestants())
    times: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    refusals: dict[str, str] = {}
    failures: list[str] = []
    for name in names:  # once to fill the page cache, and to see which run here
        outcome = measure(commands[name])
        if isinstance(outcome, str):
            refusals[name] = outcome
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            if name in refusals:
                continue
            outcome = measure(commands[name])
            if isinstance(outcome, str):
                failures.append(f"round {turn + 1}, {name}: {outcome}")
            else:
                times[name].append(outcome)
    results = {
        "command": f"python benchmarks/startup.py --rounds {rounds}",
        "machine": _machine(),
        "seconds": {name: _summary(rounds_) for name, rounds_ in times.items() if rounds_},
        "refused": refusals,
        "failures": failures,
    }
    path = Path(__file__).parent / "results" / "startup.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(results, indent=2) + "\n")
    print(_table(results))


def _summary(times: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    from statistics import median

    columns = {what: [row[what] for row in times] for what in times[0]}
    return {
        what: {"median": round(median(all_), 3), "least": round(min(all_), 3), "most": round(max(all_), 3)}
        for what, all_ in columns.items()
    }


def _machine() -> dict[str, object]:
    import platform
    from importlib.metadata import version

    packages = ("torch", "accelerate", "deepspeed")
    return {
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
        "load": round(os.getloadavg()[0], 2),
    }


def _table(results: dict[str, object]) -> str:
    seconds = results["seconds"]
    assert isinstance(seconds, dict)
    columns = list(next(iter(seconds.values())))
    lines = ["| launcher | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
    for name, row in seconds.items():
        cells = [f"{row[what]['median']:.2f} ({row[what]['least']:.2f}-{row[what]['most']:.2f})" for what in columns]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    refused = results["refused"]
    assert isinstance(refused, dict)
    lines += [f"| {name} | did not run: {why} |" + " |" * (len(columns) - 1) for name, why in refused.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    roles = {"rank": work, "lockstep": launch_with_lockstep}
    if len(sys.argv) > 1 and sys.argv[1] in roles:
        sys.exit(roles[sys.argv[1]]())
    main()
