"""Measures tokens per second of the default recipe on two CPU ranks: Lockstep, as in `make train`, and its peers.

    python benchmarks/throughput.py [--rounds 5] [--steps 160]

All train the same model from the same initial weights with the same samples, order, batch, optimizer, schedule and
clipping; bits per byte on held-out text after training show that they learned alike. Prints the table and writes
results/throughput.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from rounds import (
    Spread,
    about_here,
    in_processes,
    interleaved,
    markdown,
    provenance,
    renamed,
    report,
    save,
    within_rounds,
)

PACKAGES = ("torch", "transformers", "accelerate", "lightning")
STEPS, ROUNDS = 160, 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--contestant", metavar="NAME", help="run this one for one round, under torchrun")
    arguments = parser.parse_args()
    if arguments.contestant:
        from throughput_loops import train

        report(train(arguments.contestant, arguments.steps))
        return
    results = measure(arguments.rounds, arguments.steps)
    if arguments.steps == STEPS and arguments.rounds >= ROUNDS:
        save("throughput", results)
    print(table(results))


def measure(rounds: int, steps: int) -> dict[str, Any]:
    """Return the results in the form of results/throughput.json."""
    from throughput_loops import CONTESTANTS, LOCKSTEP, RANKS, lockstep

    def run(name: str) -> Mapping[str, float]:
        if name == LOCKSTEP:
            return lockstep(steps)
        return in_processes(__file__, ["--contestant", name, "--steps", str(steps)], RANKS)

    machine = about_here(PACKAGES)
    runs, refused = interleaved(CONTESTANTS, rounds, run)
    rows = {
        name: {
            "tokens_per_second": Spread.over([run["tokens_per_second"] for run in runs_]),
            "lockstep_over_it": within_rounds(
                runs_, runs[LOCKSTEP], "tokens_per_second", lambda own, lockstep: lockstep / own
            ),
            "bits_per_byte": Spread.over([run["bits_per_byte"] for run in runs_]),
        }
        for name, runs_ in runs.items()
    }
    return {
        "command": f"python benchmarks/throughput.py --rounds {rounds}",
        "rounds": rounds,
        "steps": steps,
        "machine": machine,
        "rows": rows,
        "refused": refused,
    }


def table(results: Mapping[str, Any]) -> str:
    """Return the table in Markdown, from what `measure` returned or results/throughput.json holds."""
    lines = []
    for name, row in results["rows"].items():
        figures = {what: value if isinstance(value, Spread) else Spread(**value) for what, value in row.items()}
        lines.append(
            [
                renamed(name),
                figures["tokens_per_second"].text(),
                figures["lockstep_over_it"].text("{:.2f}"),
                figures["bits_per_byte"].text("{:.3f}"),
            ]
        )
    lines += [[name, f"did not run: {why}", "", ""] for name, why in results["refused"].items()]
    columns = ["", "tokens/s", "Lockstep's speed, times this one", f"bits per byte after {results['steps']} steps"]
    return f"{markdown(columns, lines)}\n\n{provenance(results)}"


if __name__ == "__main__":
    main()
