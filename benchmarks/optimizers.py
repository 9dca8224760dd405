"""Seconds of the update alone: Muon beside AdamW on the same model, in one process and under fsdp.

    round 1    adamw muon        each in fresh processes, on the same samples from the same weights
    round 2    muon adamw        a figure: the median over updates of what `update` takes on the first rank

Run it:  python benchmarks/optimizers.py
"""

from __future__ import annotations

import argparse
import operator
import statistics
import time
import warnings
from collections.abc import Mapping
from typing import Any

from rounds import Spread, about_here, in_processes, interleaved, markdown, provenance, report, save, within_rounds

LAYOUTS: Mapping[str, tuple[int, str]] = {"one process": (1, "single"), "fsdp on 2 ranks": (2, "fsdp")}
OPTIMIZERS = ("adamw", "muon")
WARM_UP, UPDATES = 3, 12


def config(optimizer: str, ranks: int, strategy: str) -> dict[str, Any]:
    """Return a run of a transformer of 3.3M parameters, 2 x 64 tokens a rank."""
    return {
        "model": {"kind": "transformer", "layers": 4, "width": 256, "heads": 4, "vocabulary": 256},
        "objective": {"kind": "next-token"},
        "data": {"train": {"kind": "stdlib-text", "length": 64, "split": "train"}},
        "batch": {"global_size": 2 * ranks},
        "optim": {"name": optimizer, "lr": 1e-3},
        "precision": {"compute": "fp32"},
        "parallel": {"strategy": strategy},
        "launch": {"device": "cpu"},
        "monitor": {"progress": "none", "tensorboard": False},
        "run": {"steps": WARM_UP + UPDATES},
    }


def contestant(optimizer: str, layout: str) -> None:
    """Report the milliseconds of an update on this rank."""
    warnings.simplefilter("ignore")
    import lockstep
    from lockstep.loop.session import components_of

    taken: list[float] = []
    with lockstep.session(config(optimizer, *LAYOUTS[layout])) as session:
        step: Any = components_of(session).sharding.step
        update = step.update

        def timed(*arguments: Any) -> None:
            began = time.perf_counter()
            update(*arguments)
            taken.append(1e3 * (time.perf_counter() - began))

        step.update = timed
        for _ in session:
            pass
    report({"milliseconds": statistics.median(taken[WARM_UP:])})


def measure(rounds: int) -> dict[str, Any]:
    """Return what all contestants took, and the ratios within rounds."""
    machine = about_here(["torch"])
    runs: dict[str, dict[str, Spread]] = {}
    for layout, (ranks, _) in LAYOUTS.items():
        measured, refused = interleaved(
            OPTIMIZERS,
            rounds,
            lambda name, layout=layout, ranks=ranks: in_processes(__file__, ["--contestant", name, layout], ranks),
        )
        assert not refused, refused
        runs[layout] = {name: Spread.over([run["milliseconds"] for run in measured[name]]) for name in OPTIMIZERS}
        runs[layout]["ratio"] = within_rounds(measured["muon"], measured["adamw"], "milliseconds", operator.truediv)
    command = f"python benchmarks/optimizers.py --rounds {rounds}"
    return {"command": command, "machine": machine, "rounds": rounds, "milliseconds": runs}


def table(results: Mapping[str, Any]) -> str:
    """Return the table in Markdown, from what `measure` returned or results/optimizers.json holds."""

    def text(value: Spread | Mapping[str, float]) -> str:
        return (value if isinstance(value, Spread) else Spread(**value)).text("{:.1f}")

    rows = [
        [layout, *(text(figures[name]) for name in (*OPTIMIZERS, "ratio"))]
        for layout, figures in results["milliseconds"].items()
    ]
    return "\n\n".join([markdown(["ms an update", *OPTIMIZERS, "muon / adamw"], rows), provenance(results)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--contestant", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.contestant is not None:
        contestant(*arguments.contestant)
        return
    results = measure(arguments.rounds)
    save("optimizers", results)
    print(table(results))


if __name__ == "__main__":
    main()
