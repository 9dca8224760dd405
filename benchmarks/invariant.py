"""Measures the cost of weights that are bitwise identical on any number of ranks (`run.determinism: invariant`).

    python benchmarks/invariant.py [--rounds 5] [--steps 40]

The GPT-2-shaped model of step_overhead.py with dropout, updates of 32 samples in micro-batches of 4: eight on one
rank, four on each of two. Prints the table and writes results/invariant.json.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from collections.abc import Mapping
from typing import Any

from rounds import Spread, about_here, in_processes, interleaved, markdown, provenance, report, save, within_rounds

from lockstep.loop.session import components_of

PACKAGES = ("torch",)
CONTESTANTS = ("default", "deterministic", "invariant")
MICRO, GLOBAL = 4, 32
LEAST_ROUNDS = 3  # of results that are kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40, help="of each round; the first quarter is not timed")
    parser.add_argument("--contestant", metavar="NAME", help="run this one for one round")
    arguments = parser.parse_args()
    if arguments.contestant:
        report(be_contestant(arguments.contestant, arguments.steps))
        return
    results = {
        "command": f"python benchmarks/invariant.py --rounds {arguments.rounds} --steps {arguments.steps}",
        "rounds": arguments.rounds,
        "machine": about_here(PACKAGES),
        "settings": [_setting(ranks, arguments) for ranks in (1, 2)],
    }
    if arguments.rounds >= LEAST_ROUNDS:
        save("invariant", results)
    print(table(results))


def be_contestant(determinism: str, steps: int) -> dict[str, float]:
    import torch
    from step_work import GPT, text
    from torch.utils.data import TensorDataset

    import lockstep

    config = {
        "objective": {"kind": "next-token"},
        "data": {"shuffle": False},
        "batch": {"global_size": GLOBAL, "micro_size": MICRO},
        "precision": {"compute": "fp32"},
        "parallel": {"strategy": "single" if os.environ.get("WORLD_SIZE", "1") == "1" else "ddp"},
        "monitor": {"tensorboard": False, "progress": "none"},
        "run": {"steps": steps, "determinism": determinism},
    }
    torch.manual_seed(0)
    model = torch.nn.Sequential(GPT(), torch.nn.Dropout(0.1))  # on the logits: it draws as any other dropout
    times = []
    with lockstep.session(config, model=model, train_dataset=TensorDataset(*text(steps * GLOBAL))) as session:
        for _ in session:
            times.append(time.perf_counter())
        weights = b"".join(value.numpy().tobytes() for _, value in components_of(session).sharding.state.weights())
    first = steps // 4
    return {
        "milliseconds": (times[-1] - times[first]) / (len(times) - 1 - first) * 1e3,
        "bits": int.from_bytes(hashlib.blake2b(weights, digest_size=4).digest(), "big"),
    }


def _setting(ranks: int, arguments: argparse.Namespace) -> dict[str, Any]:
    def run(name: str) -> Mapping[str, float]:
        return in_processes(__file__, ["--contestant", name, "--steps", str(arguments.steps)], ranks)

    runs, refused = interleaved(CONTESTANTS, arguments.rounds, run)
    reference = runs[CONTESTANTS[0]]
    rows = {
        name: {
            "milliseconds": Spread.over([run["milliseconds"] for run in rounds]),
            "ratio": within_rounds(rounds, reference, "milliseconds", lambda own, default: own / default),
            "bits": sorted({f"{int(run['bits']):08x}" for run in rounds}),
        }
        for name, rounds in runs.items()
    }
    return {"ranks": ranks, "rows": rows, "refused": refused}


def table(results: Mapping[str, Any]) -> str:
    """Return the table in Markdown, from what `main` measured or results/invariant.json holds."""
    lines = []
    for setting in results["settings"]:
        for name, row in setting["rows"].items():
            spent, ratio = (
                row[what] if isinstance(row[what], Spread) else Spread(**row[what])
                for what in ("milliseconds", "ratio")
            )
            bits = ", ".join(row["bits"])
            lines.append([f"{name}, ranks: {setting['ranks']}", spent.text("{:,.1f}"), ratio.text("{:.2f}"), bits])
    columns = ["", "ms an update", "times the default's", "hash of the weights"]
    return f"{markdown(columns, lines)}\n\n{provenance(results)}"


if __name__ == "__main__":
    main()
