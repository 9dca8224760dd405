"""Compares a pipeline of two stages under Lockstep with torch's schedules by hand, and how long stages wait.

    python benchmarks/pipelines.py [--rounds 5] [--steps 24]

The GPT-2-shaped model of strategies.py in two stages, updates of 32 samples in 2, 4 or 8 micro-batches. The wait of a
stage is 1 - T1 / (2 T2): T1 the time of the same update in one process, T2 that of the pipeline. Prints the tables and
writes results/pipelines.json.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from rounds import Spread, about_here, in_processes, interleaved, markdown, provenance, report, save, within_rounds
from step_work import CLIP_NORM, GPT, WEIGHT_DECAY, loss_of, text
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.plan.stages import Schedule, bubble, stages_of

SAMPLES, LENGTH, RATE = 32, 128, 1e-3
LEAST_ROUNDS = 3  # of results that are kept
RANKS = 2
PAIRS: tuple[tuple[Schedule, int], ...] = (("gpipe", 8), ("1f1b", 8), ("interleaved-1f1b", 8))
WAITS: tuple[tuple[Schedule, int], ...] = (("1f1b", 2), ("1f1b", 4), ("1f1b", 8), ("interleaved-1f1b", 4))
BY_HAND = " by hand"


def model() -> GPT:
    torch.manual_seed(0)
    return GPT(layers=4, width=256, heads=4, length=LENGTH)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=24, help="of each round; the first quarter is not timed")
    parser.add_argument("--contestant", help="run this one for one round")
    arguments = parser.parse_args()
    if arguments.contestant:
        report({"milliseconds": train(arguments.contestant, arguments.steps)})
        sys.stdout.flush()
        os._exit(0)  # what gloo does afterwards belongs to no step
    results = measure(arguments.rounds, arguments.steps)
    if arguments.rounds >= LEAST_ROUNDS:
        save("pipelines", results)
    print(table(results))


def measure(rounds: int, steps: int) -> dict[str, Any]:
    """Return the results in the form of results/pipelines.json."""

    def run(name: str) -> Mapping[str, float]:
        ranks = 1 if name.startswith("single") else RANKS
        return in_processes(__file__, ["--contestant", name, "--steps", str(steps)], ranks)

    every = dict.fromkeys([*PAIRS, *WAITS])
    names = [f"single {count}" for count in dict.fromkeys(count for _, count in every)]
    names += [f"{schedule} {count}" for schedule, count in every]
    names += [f"{schedule} {count}{BY_HAND}" for schedule, count in PAIRS]
    runs, refused = interleaved(names, rounds, run)
    return {
        "command": f"python benchmarks/pipelines.py --rounds {rounds} --steps {steps}",
        "rounds": rounds,
        "machine": about_here(("torch",)),
        "pairs": {
            f"{schedule}, {count} micro-batches": _pair(runs, f"{schedule} {count}") for schedule, count in PAIRS
        },
        "waits": {f"{schedule}, {count} micro-batches": _wait(runs, schedule, count) for schedule, count in WAITS},
        "refused": refused,
    }


def _pair(runs: Mapping[str, Any], name: str) -> dict[str, Spread]:
    own, hand = runs[name], runs[name + BY_HAND]
    return {
        "own": Spread.over([run["milliseconds"] for run in own]),
        "hand": Spread.over([run["milliseconds"] for run in hand]),
        "ratio": within_rounds(own, hand, "milliseconds", lambda own, by_hand: by_hand / own),
    }


def _wait(runs: Mapping[str, Any], schedule: Schedule, count: int) -> dict[str, Any]:
    measured = within_rounds(
        runs[f"{schedule} {count}"],
        runs[f"single {count}"],
        "milliseconds",
        lambda both, alone: 1 - alone / (RANKS * both),
    )
    return {"measured": measured, "formula": bubble(schedule, RANKS, stages_of(schedule, "auto"), count)}


# --- a contestant -------------------------------------------------------------------------------------------------


def train(name: str, steps: int) -> float:
    """Return the milliseconds per step of the first rank."""
    kind, count = name.removesuffix(BY_HAND).split()
    samples = text(steps * SAMPLES, length=LENGTH)
    if name.endswith(BY_HAND):
        dist.init_process_group("gloo")
        return _timed(_by_hand(kind, int(count), samples), steps)
    return _under_lockstep(kind, int(count), samples, steps)


def _timed(update: Callable[[int], None], steps: int) -> float:
    began = 0.0
    for step in range(steps):
        if step == steps // 4:
            began = time.perf_counter()
        update(step)
    return (time.perf_counter() - began) / (steps - steps // 4) * 1e3


def _under_lockstep(kind: str, count: int, samples: tuple[torch.Tensor, torch.Tensor], steps: int) -> float:
    import lockstep

    pipeline = {"strategy": "ddp", "pipeline": RANKS, "pipeline_parallel": {"schedule": kind}}
    config = {
        "objective": {"kind": "next-token"},
        "data": {"shuffle": False},
        "batch": {"global_size": SAMPLES, "micro_size": SAMPLES // count},
        "optim": {"lr": RATE, "weight_decay": WEIGHT_DECAY, "decay": "all", "clip_norm": CLIP_NORM},
        "schedule": {"kind": "constant"},
        "precision": {"compute": "fp32"},
        "parallel": {"strategy": "single"} if kind == "single" else pipeline,
        "run": {"steps": steps},
    }
    with lockstep.session(config, model=model(), train_dataset=TensorDataset(*samples)) as session:
        reports = session
        return _timed(lambda step: next(reports) and None, steps)


def _by_hand(kind: str, count: int, samples: tuple[torch.Tensor, torch.Tensor]) -> Callable[[int], None]:
    """Return an update as in torch's documentation: custom stages and a schedule."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

    whole, rank = model(), dist.get_rank()
    per_rank = 2 if kind == "interleaved-1f1b" else 1
    stages = RANKS * per_rank
    mine = [
        _Stage(whole, number, stages) for number in range(rank, stages, RANKS)
    ]  # the head's weight is tied: both ends have it
    parameters = list({id(parameter): parameter for stage in mine for parameter in stage.parameters()}.values())
    optimizer = torch.optim.AdamW(parameters, lr=RATE, weight_decay=WEIGHT_DECAY, fused=True)
    pipeline_stages = [PipelineStage(stage, stage.number, stages, torch.device("cpu")) for stage in mine]
    kinds: Any = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved-1f1b": ScheduleInterleaved1F1B}
    schedule = kinds[kind](pipeline_stages if per_rank > 1 else pipeline_stages[0], count, loss_fn=loss_of)
    tied = whole.tokens.weight
    x, y = samples

    def update(step: int) -> None:
        optimizer.zero_grad()
        at = slice(step * SAMPLES, (step + 1) * SAMPLES)
        inputs = (x[at],) if rank == 0 else ()
        schedule.step(*inputs, **({"target": y[at]} if rank == RANKS - 1 else {}))
        dist.all_reduce(tied.grad)
        norm = torch.stack([p.grad.square().sum() for p in parameters if p is not tied or rank == 0]).sum()
        dist.all_reduce(norm)
        scale = (CLIP_NORM / (norm.sqrt() + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_([parameter.grad for parameter in parameters], scale)
        optimizer.step()

    return update


class _Stage(nn.Module):
    def __init__(self, whole: GPT, number: int, stages: int) -> None:
        super().__init__()
        self.number = number
        each = len(whole.blocks) // stages
        self.blocks = nn.ModuleList(whole.blocks[number * each : (number + 1) * each])
        self.tokens = whole.tokens if number == 0 else None
        self.positions = whole.positions if number == 0 else None
        self.norm = whole.norm if number == stages - 1 else None
        self.head = whole.head if number == stages - 1 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.tokens is not None and self.positions is not None:
            x = self.tokens(x) + self.positions.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if self.head is not None and self.norm is not None else x


# --- showing ------------------------------------------------------------------------------------------------------


def table(results: Mapping[str, Any]) -> str:
    """Return the table in Markdown, from what `measure` returned or results/pipelines.json holds."""
    pairs = []
    for name, row in results["pairs"].items():
        own, hand, ratio = (_spread(row[what]) for what in ("own", "hand", "ratio"))
        pairs.append([name, own.text("{:.0f}"), hand.text("{:.0f}"), ratio.text("{:.3f}")])
    waits = [
        [name, _spread(row["measured"]).text("{:.1%}"), f"{row['formula']:.1%}"]
        for name, row in results["waits"].items()
    ]
    head = ["two stages", "ms an update, Lockstep", "by hand", "throughput relative to by hand"]
    return "\n\n".join(
        [markdown(head, pairs), markdown(["", "wait, measured", "by the formula"], waits), provenance(results)]
    )


def _spread(value: Any) -> Spread:
    return value if isinstance(value, Spread) else Spread(**value)


if __name__ == "__main__":
    main()
