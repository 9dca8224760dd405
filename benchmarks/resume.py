"""Measures how soon a run resumes: `python benchmarks/resume.py [--rounds 7]`. Writes results/resume.json.

a run      seconds from `lockstep train` to its next update, from the start and resumed from a checkpoint, on two
           ranks: the default recipe (5.6 MB of state), and a larger model (86 MB)
the data   milliseconds to the next batch at sample 9e8 of 1e9; and what torch and Accelerate do at 9e6 of 1e7
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rounds import DidNotRun, Spread, about_here, in_processes, interleaved, markdown, provenance, report, save

PACKAGES = ("torch", "accelerate")
ROUNDS, STEP = 7, 6
LARGE = (
    "--model.layers=4", "--model.width=384", "--model.heads=4", "--data.train.length=32", "--batch.global_size=4",
)  # fmt: skip
MODELS: Mapping[str, tuple[str, ...]] = {"the default recipe": (), "86 MB of state": LARGE}
SAMPLES, POSITION, BATCH = 10**9, 9 * 10**8, 256
FEWER = 100  # the data is smaller by this factor for contestants that count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--contestant", metavar="NAME", help="run this one for one round")
    arguments = parser.parse_args()
    if arguments.contestant:
        report({"ms": 1e3 * DATA[arguments.contestant]()})
        return
    results = measure(arguments.rounds)
    if arguments.rounds >= ROUNDS:
        save("resume", results)
    print(table(results))


def measure(rounds: int) -> dict[str, Any]:
    """Return the results in the form of results/resume.json."""
    machine = about_here(PACKAGES)
    with tempfile.TemporaryDirectory(prefix="resume-") as folder:
        saved = {name: _saved(Path(folder) / str(number), words) for number, (name, words) in enumerate(MODELS.items())}
        names = [f"{name}, {how}" for name in MODELS for how in ("begun", "gone on")]

        def run(name: str) -> Mapping[str, float]:
            model, _, how = name.rpartition(", ")
            return {"s": _until_next_step(Path(folder), MODELS[model], saved[model] if how == "gone on" else None)}

        runs, refused = interleaved(names, rounds, run)

    def data(name: str) -> Mapping[str, float]:
        return in_processes(__file__, ["--contestant", name], 1)

    batches, unable = interleaved(list(DATA), rounds, data)
    return {
        "command": f"python benchmarks/resume.py --rounds {rounds}",
        "rounds": rounds,
        "machine": machine,
        "runs": {name: Spread.over([run["s"] for run in rounds]) for name, rounds in runs.items()},
        "longer": {
            model: Spread.over(
                [
                    resumed["s"] - begun["s"]
                    for resumed, begun in zip(runs[f"{model}, gone on"], runs[f"{model}, begun"], strict=True)
                ]
            )
            for model in MODELS
        },
        "data": {name: Spread.over([run["ms"] for run in rounds]) for name, rounds in batches.items()},
        "refused": {**refused, **unable},
    }


# --- a run --------------------------------------------------------------------------------------------------------


def _command(run: Path, words: tuple[str, ...]) -> list[str]:
    return [
        sys.executable, "-m", "lockstep", "train", "stdlib-lm", *words, f"--run.folder={run}", "--ranks=2",
        "--launch.device=cpu", "--monitor.every=1", "--monitor.progress=plain", "--evaluation.every=null",
    ]  # fmt: skip


def _saved(run: Path, words: tuple[str, ...]) -> Path:
    """Return a run that was killed after its checkpoint of step STEP."""
    command = [*_command(run, words), f"--checkpoint.every={STEP} steps", "--run.steps=1000"]
    with _started(command) as process:
        _wait_for(process, rf"step {STEP}: saved")
        os.killpg(process.pid, signal.SIGKILL)
    return run


def _until_next_step(folder: Path, words: tuple[str, ...], origin: Path | None) -> float:
    """Return the seconds to its next update of a run, which resumes `origin` if that isn't None."""
    run = folder / "run"
    if origin is not None:
        shutil.copytree(origin, run)
    try:
        began = time.perf_counter()
        with _started([*_command(run, words), "--run.steps=1000"]) as process:
            line = _wait_for(process, r"step (\d+)/1,000 ")
            seconds = time.perf_counter() - began
            os.killpg(process.pid, signal.SIGKILL)
        first = int(line[1])
        if (first > STEP) != (origin is not None):
            raise DidNotRun(f"its first step was {first}")
        return seconds
    finally:
        shutil.rmtree(run)


def _started(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1, start_new_session=True
    )


def _wait_for(process: subprocess.Popen[str], pattern: str) -> re.Match[str]:
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if (match := re.match(pattern, line)) is not None:
            return match
    raise DidNotRun("".join(lines[-3:]))


# --- the data -----------------------------------------------------------------------------------------------------


def lockstep() -> float:
    """Return the seconds from a session that knows its position to its first batch, one gather of tokens."""
    import lockstep as library

    tokens = _tokens(SAMPLES)
    config = {
        "batch": {"global_size": BATCH},
        "precision": {"compute": "fp32"},
        "launch": {"device": "cpu"},
        "run": {"steps": 10**8},
    }

    def once(position: int) -> float:
        from torch import nn

        from lockstep.core.progress import Progress

        with library.session(
            config, model=nn.Linear(1, 1), train_dataset=tokens, objective=nn.MSELoss(reduction="sum")
        ) as session:
            session.progress = Progress(position // BATCH, position, position)
            began = time.perf_counter()
            next(session.batches())
            return time.perf_counter() - began

    return statistics.median(once(POSITION) for _ in range(5))


def torch_sampler() -> float:
    """Count the batches of a RandomSampler's order until the position, without fetching a sample."""
    import itertools

    from torch.utils.data import BatchSampler, RandomSampler

    samples = SAMPLES // FEWER
    began = time.perf_counter()
    order = BatchSampler(RandomSampler(range(samples)), BATCH, drop_last=False)
    next(itertools.islice(order, POSITION // FEWER // BATCH, None))
    return time.perf_counter() - began


def accelerate() -> float:
    """Call `skip_first_batches`, as its documentation resumes within an epoch."""
    from accelerate import Accelerator, skip_first_batches
    from torch.utils.data import DataLoader

    accelerator = Accelerator(cpu=True)
    batches = accelerator.prepare(DataLoader(_tokens(SAMPLES // FEWER), batch_size=BATCH, shuffle=True))
    began = time.perf_counter()
    next(iter(skip_first_batches(batches, POSITION // FEWER // BATCH)))
    return time.perf_counter() - began


def _tokens(samples: int) -> Any:
    """Return a dataset with this many samples that takes no memory."""
    import torch
    from torch.utils.data import Dataset

    class Tokens(Dataset[Any]):
        def __len__(self) -> int:
            return samples

        def __getitem__(self, index: int) -> Any:
            return torch.full((1,), float(index % 7)), torch.zeros(1)

    return Tokens()


DATA: Mapping[str, Callable[[], float]] = {
    "Lockstep, at 9e8 of 1e9": lockstep,
    "torch's samplers, at 9e6 of 1e7": torch_sampler,
    "Accelerate's skip_first_batches, at 9e6 of 1e7": accelerate,
}


# --- tables -------------------------------------------------------------------------------------------------------


def table(results: Mapping[str, Any]) -> str:
    """Return the table in Markdown, from what `measure` returned or results/resume.json holds."""

    def text(value: Spread | Mapping[str, float], form: str) -> str:
        return (value if isinstance(value, Spread) else Spread(**value)).text(form)

    runs = [
        [model, *(text(results["runs"][f"{model}, {how}"], "{:.2f}") for how in ("begun", "gone on")),
         text(longer, "{:+.2f}")]
        for model, longer in results["longer"].items()
    ]  # fmt: skip
    data = [[name, text(value, "{:,.1f}")] for name, value in results["data"].items()]
    data += [[name, f"did not run: {why}"] for name, why in results["refused"].items()]
    return "\n\n".join(
        [
            markdown(["s to the next update", "from the start", "resumed", "longer"], runs),
            markdown(["ms to the next batch", ""], data),
            provenance(results),
        ]
    )


if __name__ == "__main__":
    main()
