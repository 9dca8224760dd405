"""Compares each strategy under Lockstep with the same feature of torch or DeepSpeed by hand, on two ranks.

    python benchmarks/strategies.py [--rounds 5] [--only ddp "fsdp FULL_SHARD" ...]

Prints the table and writes results/strategies.json.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from rounds import (
    RESULTS,
    Spread,
    about_here,
    in_processes,
    interleaved,
    markdown,
    provenance,
    report,
    save,
    within_rounds,
)
from strategy_loops import LENGTH, PAIRS, WORK, train

RANKS = 2
LEAST_ROUNDS = 3  # of results that are kept
BY_HAND = " by hand"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=PAIRS, default=list(PAIRS))
    parser.add_argument("--contestant", help="run this one for one round")
    arguments = parser.parse_args()
    if arguments.contestant:
        report(train(arguments.contestant, WORK.steps))
        sys.stdout.flush()
        os._exit(0)  # what DeepSpeed and gloo do afterwards belongs to no step
    results = measure(arguments.rounds, arguments.only)
    if arguments.rounds >= LEAST_ROUNDS:
        results = beside_others(results, arguments.only)
        save("strategies", results)
    print(table(results))


def measure(rounds: int, only: list[str]) -> dict[str, Any]:
    """Return the results in the form of results/strategies.json."""

    def run(name: str) -> Mapping[str, float]:
        return in_processes(__file__, ["--contestant", name], RANKS)

    names = [name for strategy in only for name in (strategy + BY_HAND, strategy)]
    runs, refused = interleaved(names, rounds, run)
    rows = {}
    for strategy in only:
        if strategy in runs and strategy + BY_HAND in runs:
            own, hand = runs[strategy], runs[strategy + BY_HAND]
            rows[strategy] = {
                "own": Spread.over([run["microseconds"] / 1000 for run in own]),
                "hand": Spread.over([run["microseconds"] / 1000 for run in hand]),
                "ratio": within_rounds(own, hand, "microseconds", lambda own, by_hand: by_hand / own),
            }
    return {
        "command": f"python benchmarks/strategies.py --rounds {rounds}",
        "rounds": rounds,
        "title": f"{WORK.title} ({LENGTH} long), {RANKS} ranks over gloo, fp32, {WORK.steps} steps",
        "machine": about_here(("torch", "deepspeed")),
        "rows": rows,
        "refused": refused,
    }


def beside_others(results: dict[str, Any], only: list[str]) -> dict[str, Any]:
    """Return the results with earlier ones of other strategies, and both commands."""
    path = RESULTS / "strategies.json"
    if len(only) == len(PAIRS) or not path.exists():
        return results
    before = json.loads(path.read_text())
    names = " ".join(f'"{name}"' for name in only)
    rows = {**before["rows"], **results["rows"]}
    refused = {name: why for name, why in before["refused"].items() if name.removesuffix(BY_HAND) not in only}
    return {
        **before,
        "command": f"{before['command']}, then {results['command']} --only {names}",
        "rows": {name: rows[name] for name in PAIRS if name in rows},
        "refused": {**refused, **results["refused"]},
    }


def table(results: Mapping[str, Any]) -> str:
    """Return the table in Markdown, from what `measure` returned or results/strategies.json holds."""
    lines = []
    for name, row in results["rows"].items():
        own, hand, ratio = (
            value if isinstance(value, Spread) else Spread(**value) for value in (row["own"], row["hand"], row["ratio"])
        )
        lines.append([name, own.text("{:.1f}"), hand.text("{:.1f}"), ratio.text("{:.3f}")])
    lines += [[name, f"did not run: {why}", "", ""] for name, why in results["refused"].items()]
    head = ["", "ms a step, Lockstep", "ms a step, by hand", "throughput relative to by hand"]
    return f"**{results['title']}**\n\n{markdown(head, lines)}\n\n{provenance(results)}"


if __name__ == "__main__":
    main()
