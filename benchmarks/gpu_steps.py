"""Measures steps on this machine's GPUs: Lockstep with all that it does by default, a plain PyTorch loop, and peers.

    python benchmarks/gpu_steps.py [--rounds 5] [--only host gpt2 gpt2-large]

A rank on each GPU. All train the same decoder from the same weights with the same samples, bf16 autocast, fused AdamW
and clipping at norm 1. A last row has what `lockstep plan --gpus` predicts for GPUs that it knows. Prints the
tables and writes results/gpu_steps.json.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import Any

from rounds import Spread, about_here, in_processes, interleaved, markdown, provenance, report, save, within_rounds

PACKAGES = ("torch", "transformers", "accelerate", "lightning")
LEAST_ROUNDS = 3  # of results that are kept


def main() -> None:
    from gpu_loops import CONTESTANTS, WORKS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=list(WORKS), default=list(WORKS))
    parser.add_argument("--contestants", nargs="+", choices=list(CONTESTANTS), default=list(CONTESTANTS))
    parser.add_argument("--contestant", nargs=2, metavar=("NAME", "WORK"), help="run this one for one round")
    arguments = parser.parse_args()
    if arguments.contestant:
        from gpu_loops import train

        name, work = arguments.contestant
        report(train(name, WORKS[work]))
        return
    results = measure(arguments)
    if arguments.rounds >= LEAST_ROUNDS and arguments.contestants == list(CONTESTANTS):
        save("gpu_steps", results)
    print(table(results))


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return all settings, in the form of results/gpu_steps.json."""
    import torch

    gpus = torch.cuda.device_count()
    if not gpus:
        sys.exit("gpu_steps.py measures on NVIDIA GPUs, and this machine shows none")
    return {
        "command": f"python benchmarks/gpu_steps.py --rounds {arguments.rounds}",
        "rounds": arguments.rounds,
        "machine": {**about_here(PACKAGES), "gpus": f"{gpus} x {torch.cuda.get_device_name(0)}"},
        "settings": [_setting(work, gpus, arguments) for work in arguments.only],
    }


def _setting(work: str, ranks: int, arguments: argparse.Namespace) -> dict[str, Any]:
    import torch
    from gpu_loops import REFERENCE, WORKS, predicted

    from lockstep.plan.gpus import known_gpu

    def run(name: str) -> Mapping[str, float]:
        return in_processes(__file__, ["--contestant", name, work], ranks, gpus=True)

    print(WORKS[work].title, file=sys.stderr, flush=True)
    runs, refused = interleaved(arguments.contestants, arguments.rounds, run)
    reference = runs.get(REFERENCE, next(iter(runs.values())))
    tokens = WORKS[work].batch * WORKS[work].length * ranks
    rows = {
        name: {
            "microseconds": Spread.over([run["microseconds"] for run in rounds]),
            "tokens_per_second": Spread.over([tokens / run["microseconds"] * 1e6 for run in rounds]),
            "ratio": within_rounds(rounds, reference, "microseconds", lambda own, plain: own / plain),
            "bytes": Spread.over([run["bytes"] for run in rounds]),
            "loss": Spread.over([run["loss"] for run in rounds]),
        }
        for name, rounds in runs.items()
    }
    gpu = known_gpu(torch.cuda.get_device_name(0))
    plan = None if gpu is None else predicted(WORKS[work], gpu.name, ranks)
    return {"title": WORKS[work].title, "rows": rows, "refused": refused, "predicted": plan}


def table(results: Mapping[str, Any]) -> str:
    """Return the tables in Markdown, from what `measure` returned or results/gpu_steps.json holds."""
    parts = [
        f"**{setting['title'][0].upper()}{setting['title'][1:]}**\n\n{_rows(setting)}"
        for setting in results["settings"]
    ]
    return "\n\n".join([*parts, f"On {results['machine']['gpus']}. {provenance(results)}"])


def _rows(setting: Mapping[str, Any]) -> str:
    lines = []
    for name, row in setting["rows"].items():
        figures = {what: value if isinstance(value, Spread) else Spread(**value) for what, value in row.items()}
        lines.append(
            [
                name,
                figures["microseconds"].text(),
                f"{figures['tokens_per_second'].median:,.0f}",
                figures["ratio"].text("{:.2f}"),
                f"{figures['bytes'].median / 2**30:.2f}",
                f"{figures['loss'].median:.4f}",
            ]
        )
    if plan := setting.get("predicted"):
        figures = [f"{plan['microseconds']:,.0f}", "", "", f"{plan['bytes'] / 2**30:.2f}", ""]
        lines.append(["Lockstep, as `plan` predicts it", *figures])
    lines += [[name, f"did not run: {why}", "", "", "", ""] for name, why in setting["refused"].items()]
    return markdown(["", "µs a step", "tokens/s", "time, times the plain loop's", "GiB allocated", "final loss"], lines)


if __name__ == "__main__":
    main()
