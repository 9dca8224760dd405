"""Compares contestants in interleaved rounds, each run in fresh processes, by medians with ranges.

round 1    a b c d        Each round runs all contestants once, and begins with another one, so that a slow minute of
round 2    b c d a        the machine affects all of them. Differences and ratios are taken within a round, where the
round 3    c d a b        machine was the same for both, and then their median.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

RESULTS = Path(__file__).parent / "results"
PREFIX = "RESULT "
"""Beginning of the line in which a contestant prints what it measured; the rest is JSON."""


@dataclass(frozen=True, slots=True)
class Spread:
    """The median and range of a figure over all rounds."""

    median: float
    least: float
    most: float

    @staticmethod
    def over(values: Sequence[float]) -> Spread:
        return Spread(median(values), min(values), max(values))

    def text(self, form: str = "{:,.0f}") -> str:
        return f"{form.format(self.median)} ({form.format(self.least)} to {form.format(self.most)})"


class DidNotRun(Exception):
    """A contestant can't run here; the message is what it printed."""


def interleaved(
    names: Sequence[str], rounds: int, measure: Callable[[str], Mapping[str, float]]
) -> tuple[dict[str, list[Mapping[str, float]]], dict[str, str]]:
    """Return what each contestant measured in each round, and the messages of those that don't run."""
    runs: dict[str, list[Mapping[str, float]]] = {name: [] for name in names}
    refused: dict[str, str] = {}
    for turn in range(rounds):
        shift = turn % len(names)
        for name in [*names[shift:], *names[:shift]]:
            if name in refused:
                continue
            began = time.time()
            try:
                runs[name].append(measure(name))
            except DidNotRun as reason:
                refused[name] = str(reason)
            result = refused.get(name) or "  ".join(f"{what} {value:.6g}" for what, value in runs[name][-1].items())
            print(f"  round {turn + 1}  {name:34} {result}  [{time.time() - began:.0f} s]", file=sys.stderr, flush=True)
    return {name: figures for name, figures in runs.items() if name not in refused}, refused


def in_processes(
    script: str,
    arguments: Sequence[str],
    ranks: int,
    timeout: float = 300,
    *,
    gpus: bool = False,
    python: str = sys.executable,
) -> dict[str, float]:
    """Run `script`, under torchrun if there are several ranks, and return the figures that it reports.

    Each rank has one thread and, but with `gpus`, no GPU, so that all contestants compute on the same cores in the same
    way.

    Raises:
        DidNotRun: It failed, or reported nothing.
    """
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [python, *(torchrun if ranks > 1 else []), script, *arguments]
    on_cpu = {} if gpus else {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **on_cpu}
    code, output, errors = _run(command, environment, timeout)
    reports = [line.removeprefix(PREFIX) for line in output.splitlines() if line.startswith(PREFIX)]
    if code != 0 or not reports:
        lines = [line for line in errors.splitlines() if "Error" in line] or errors.splitlines()
        raise DidNotRun(lines[-1].strip() if lines else f"exit code {code}")
    figures: dict[str, float] = json.loads(reports[-1])
    return figures


def _run(command: Sequence[str], environment: Mapping[str, str], timeout: float) -> tuple[int, str, str]:
    """Return exit code, standard output and error; a process that hangs is killed with all that it started."""
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
    )
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise DidNotRun(f"not done after {timeout:g} s") from None
    return process.returncode, output, errors


def report(figures: Mapping[str, float]) -> None:
    """Report a contestant's figures to `in_processes`, on the first rank."""
    if os.environ.get("RANK", "0") == "0":
        print(f"\n{PREFIX}{json.dumps(dict(figures))}", flush=True)


def within_rounds(
    runs: Sequence[Mapping[str, float]],
    reference: Sequence[Mapping[str, float]],
    figure: str,
    compare: Callable[[float, float], float],
) -> Spread:
    """Return the spread of `compare(own, reference's)` over the rounds."""
    return Spread.over([compare(own[figure], other[figure]) for own, other in zip(runs, reference, strict=True)])


def about_here(packages: Iterable[str]) -> dict[str, Any]:
    """Return where and when figures were measured."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in packages},
        "load_before": round(os.getloadavg()[0], 2),
    }


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def save(name: str, results: Mapping[str, Any]) -> None:
    """Write results/NAME.json, from which tables.py makes the tables of README.md."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(results, indent=1, default=_plain) + "\n")


def _plain(value: object) -> dict[str, float]:
    assert isinstance(value, Spread)
    return {name: float(f"{number:.6g}") for name, number in asdict(value).items()}


def renamed(name: str) -> str:
    """Return a contestant's name, which older results spell differently."""
    return name.replace("bare loop", "plain loop").replace("AdamW as it comes", "default AdamW")


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown; all columns but the first are numbers."""
    lines = [f"| {' | '.join(columns)} |", "|---|" + "--:|" * (len(columns) - 1)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def provenance(results: Mapping[str, Any]) -> str:
    """Return the lines under a table: command, date, machine, versions."""
    here = results["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in here["versions"].items())
    return (
        f"`{results['command']}`, {here['date']}, {here['cores']} cores of {here['processor']} "
        f"(load before: {here['load_before']}), Python {here['python']}, {versions}. Medians over {results['rounds']} "
        f"interleaved rounds, in brackets the least and the most."
    )
