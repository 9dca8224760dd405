"""Measures the overhead of a step: Lockstep with all safety on, a plain PyTorch loop, and peers with safety off.

    python benchmarks/step_overhead.py [--rounds 7] [--only mlp/1 gpt/2 ...]

Settings: a tiny MLP and a small GPT, each on one process and as DDP on two ranks over gloo; datasets of dicts and of
images. Prints the tables and writes results/step_overhead.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rounds import (
    RESULTS,
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

PACKAGES = ("torch", "transformers", "accelerate", "lightning", "deepspeed")
SETTINGS = ("mlp/1", "mlp/2", "items/1", "images/1", "gpt/1", "gpt/2")
LEAST_ROUNDS = 3  # of results that are kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="+", choices=SETTINGS, default=SETTINGS, help="work/ranks")
    parser.add_argument("--steps", type=int, help="steps of each round, instead of each work's own number")
    parser.add_argument("--contestants", nargs="+", help="by name, instead of all")
    parser.add_argument("--contestant", nargs=2, metavar=("NAME", "WORK"), help="run this one for one round")
    arguments = parser.parse_args()
    if arguments.contestant:
        be_contestant(*arguments.contestant, arguments.steps)
        return
    results = measure(arguments)
    if arguments.steps is None and arguments.contestants is None and arguments.rounds >= LEAST_ROUNDS:
        save("step_overhead", beside_earlier(results))
    print(table(results))


def be_contestant(name: str, work: str, steps: int | None) -> None:
    from step_loops import train
    from step_work import WORKS

    report(train(name, WORKS[work], steps or WORKS[work].steps))


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return all settings, in the form of results/step_overhead.json."""
    return {
        "command": f"python benchmarks/step_overhead.py --rounds {arguments.rounds}",
        "rounds": arguments.rounds,
        "machine": about_here(PACKAGES),
        "settings": [_setting(*setting.split("/"), arguments) for setting in arguments.only],
    }


def _setting(work_name: str, ranks: str, arguments: argparse.Namespace) -> dict[str, Any]:
    from step_loops import CONTESTANTS, REFERENCE
    from step_work import WORKS

    work = WORKS[work_name]
    work = replace(work, steps=arguments.steps or work.steps)
    title = (
        f"{work.title}, {'one process' if ranks == '1' else f'DDP on {ranks} ranks over gloo'}, {work.steps:,} steps"
    )
    print(title, file=sys.stderr, flush=True)

    def run(name: str) -> Mapping[str, float]:
        arguments = ["--contestant", name, work_name, "--steps", str(work.steps)]
        return in_processes(__file__, arguments, int(ranks))

    runs, refused = interleaved(arguments.contestants or list(CONTESTANTS), arguments.rounds, run)
    reference = runs.get(REFERENCE, next(iter(runs.values())))
    rows = {
        name: {
            "microseconds": Spread.over([run["microseconds"] for run in rounds]),
            "difference": within_rounds(rounds, reference, "microseconds", lambda own, plain: own - plain),
            "ratio": within_rounds(rounds, reference, "microseconds", lambda own, plain: own / plain),
            "loss": Spread.over([run["loss"] for run in rounds]),
        }
        for name, rounds in runs.items()
    }
    return {"title": title, "rows": rows, "refused": refused}


def beside_earlier(results: dict[str, Any]) -> dict[str, Any]:
    """Return the results with the settings that earlier calls measured and this one didn't."""
    path = RESULTS / "step_overhead.json"
    measured = {setting["title"] for setting in results["settings"]}
    earlier = json.loads(path.read_text())["settings"] if path.exists() else []
    kept = [setting for setting in earlier if setting["title"] not in measured]
    return {**results, "settings": [*kept, *results["settings"]]}


def table(results: Mapping[str, Any]) -> str:
    """Return the table in Markdown, from what `measure` returned or results/step_overhead.json holds."""
    parts = [f"{_heading(setting)}\n\n{_rows(setting)}" for setting in results["settings"]]
    return "\n\n".join([*parts, provenance(results)])


def _heading(setting: Mapping[str, Any]) -> str:
    title = setting["title"]
    return f"**{title[0].upper()}{title[1:]}**"


def _rows(setting: Mapping[str, Any]) -> str:
    lines = []
    for name, row in setting["rows"].items():
        figures = {what: value if isinstance(value, Spread) else Spread(**value) for what, value in row.items()}
        lines.append(
            [
                renamed(name),
                figures["microseconds"].text(),
                figures["difference"].text("{:+,.0f}"),
                f"{figures['ratio'].median:.2f}",
                f"{figures['loss'].median:.6f}",
            ]
        )
    lines += [[name, f"did not run: {why}", "", "", ""] for name, why in setting["refused"].items()]
    return markdown(["", "µs a step", "to the plain loop", "ratio", "final loss"], lines)


if __name__ == "__main__":
    main()
