"""Kills runs and saves at random moments, and checks for data loss: `python drills/kill_drill.py`, about 3 minutes.

    runs     train a recipe, SIGKILL the whole process group at random moments, start it again, until it is done
             weights bitwise identical to an undisturbed run's?  every sample once?  one history?  then on 1, 4, 3 ranks
    saves    train with large states, saving after every step; SIGKILL between a save's first byte and its end
             does the newest checkpoint verify, byte by byte?  is none lost?  does the run resume from it?

    python drills/kill_drill.py runs --kills 20 --whole --steps 480      the default recipe, unchanged
    python drills/kill_drill.py saves --kills 300

The files on the disk show where a kill has hit. Prints tables, writes results/kill_drill_NAME.json, and fails (exit
code 1) if anything was lost. Everything is drawn from --seed, but the timing is the machine's.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from attempts import (
    Attempt,
    damage,
    history,
    machine,
    manifest_of,
    newest,
    no_processes_left,
    size_of,
    state_hash,
    weights_hash,
)

from lockstep.checkpoint.storage import names_by_step
from lockstep.loop.ledger import audit

RESULTS = Path(__file__).parent / "results"
SHORT: Mapping[str, Sequence[str]] = {
    "stdlib-lm": (
        "--model.layers=2", "--model.width=64", "--model.heads=2", "--data.train.length=64",
        "--data.evaluation.held-out.length=64", "--data.evaluation.held-out.samples=16", "--evaluation.prompt=null",
        "--evaluation.every=null",
    ),
    "digits": ("--run.epochs=null", "--evaluation.every=null"),
}  # fmt: skip
LARGE = (  # 7.2 M parameters: 86 MB of state
    "--model.layers=4", "--model.width=384", "--model.heads=4", "--data.train.length=32", "--batch.global_size=4",
    "--data.evaluation.held-out.length=32", "--data.evaluation.held-out.samples=4", "--evaluation.prompt=null",
    "--evaluation.every=null", "--run.steps=1000000",
)  # fmt: skip


def main() -> None:
    arguments = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # after ending the runs
    drills = {"runs": drill_runs, "saves": drill_saves}
    lost = 0
    for name in drills if arguments.drill == "all" else (arguments.drill,):
        began = time.perf_counter()
        with tempfile.TemporaryDirectory(dir=arguments.where, prefix=f"drill-{name}-") as folder, no_processes_left():
            results = drills[name](arguments, Path(folder))
        results = {"command": command(name, arguments), "machine": machine(), **results}
        results["seconds"] = round(time.perf_counter() - began, 1)
        arguments.results.mkdir(parents=True, exist_ok=True)
        (arguments.results / f"kill_drill_{name}.json").write_text(json.dumps(results, indent=2) + "\n")
        print(TABLES[name](results), flush=True)
        lost += len(results["lost"])
    sys.exit(1 if lost else 0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drill", nargs="?", choices=["runs", "saves", "all"], default="all")
    parser.add_argument("--kills", type=int, help="default: 5 of runs, 15 of saves")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--recipe", choices=list(SHORT), default="stdlib-lm", help="of `runs`")
    parser.add_argument("--steps", type=int, default=60, help="of `runs`")
    parser.add_argument("--whole", action="store_true", help="`runs` takes the recipe unchanged, not a small one")
    parser.add_argument("--then", default="1,4,3", help="numbers of ranks on which `runs` resumes; '' for none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--where", type=Path, help="a folder on the disk to test; default: the system's temporary folder"
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    return parser.parse_args()


def _tell(progress: str) -> None:
    print(progress, file=sys.stderr, flush=True)


def command(name: str, arguments: argparse.Namespace) -> str:
    """Return the command that repeats the drill."""
    words = {"kills": arguments.kills, "ranks": arguments.ranks, "seed": arguments.seed}
    if name == "runs":
        words |= {"recipe": arguments.recipe, "steps": arguments.steps, "then": arguments.then}
    given = [f"--{flag} {value}" for flag, value in words.items() if value not in (None, "")]
    return " ".join(["python drills/kill_drill.py", name, *given, *(["--whole"] if arguments.whole else [])])


# --- (a) runs -----------------------------------------------------------------------------------------------------


@dataclass
class Kill:
    """A kill.

    Attributes:
        when: Seconds after the attempt began.
        phase: What the run was doing.
        step: Step of the newest checkpoint at that time.
    """

    when: float
    phase: str
    step: int


@dataclass
class Killer:
    """Kills a run at random moments until it is done.

    Attributes:
        kills: Number of kills to make.
        seconds: Duration of an undisturbed run.
        made: Kills made so far.
        lost: What is missing or wrong, one line each.
    """

    rng: random.Random
    kills: int
    seconds: float
    made: list[Kill] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    def live(self, run: Path, words: list[str]) -> None:
        """Start a run again after each kill until it is done."""
        while True:
            before, began = newest(run), time.perf_counter()
            attempt = Attempt(run, words)
            if len(self.made) < self.kills:
                self._wait(attempt)
            if len(self.made) >= self.kills or not attempt.kill():
                attempt.end()
                return
            kill = Kill(round(time.perf_counter() - began, 2), _doing(run, attempt), newest(run))
            self.made.append(kill)
            _tell(f"kill {len(self.made)} of {self.kills}: {kill.phase}, step {kill.step}")
            self.lost += damage(run)
            if kill.step < before:
                self.lost.append(f"kill {len(self.made)}: step {before} was there, and is gone")

    def _wait(self, attempt: Attempt) -> None:
        """Wait for the next kill: one in six hits the start, the others the time between the first step and the end."""
        if self.rng.random() < 1 / 6:
            delay = self.rng.uniform(0, self.seconds / 2)
        else:
            lines = attempt.run / "metrics.jsonl"
            seen = size_of(lines)
            attempt.wait(lambda: size_of(lines) not in (0, seen))
            delay = self.rng.uniform(0, self.seconds / 3)
        until = time.perf_counter() + delay
        attempt.wait(lambda: time.perf_counter() >= until, pause=0.001)


def drill_runs(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    shorter = () if arguments.whole else SHORT[arguments.recipe]
    every = max(4, arguments.steps // 24)
    words = [arguments.recipe, *shorter, "--monitor.every=1", f"--checkpoint.every={every} steps"]
    configured = [*words, f"--run.steps={arguments.steps}", f"--ranks={arguments.ranks}"]
    undisturbed, began = folder / "undisturbed", time.perf_counter()
    Attempt(undisturbed, configured).end()
    seconds = time.perf_counter() - began
    killer = Killer(random.Random(arguments.seed), 5 if arguments.kills is None else arguments.kills, seconds)
    runs: list[Path] = []
    while len(killer.made) < killer.kills or not runs:
        runs.append(folder / f"killed-{len(runs)}")
        killer.live(runs[-1], configured)
        killer.lost += compared(runs[-1], undisturbed)
    then = [int(ranks) for ranks in arguments.then.split(",") if ranks]
    steps = arguments.steps
    for ranks in then:
        steps += max(4, arguments.steps // 5)
        for run in (undisturbed, runs[-1]):
            Attempt(run, [*words, f"--run.steps={steps}", f"--ranks={ranks}"]).end()
        killer.lost += [f"on {ranks} ranks: {fault}" for fault in compared(runs[-1], undisturbed)]
    last = manifest_of(runs[-1])
    return {
        "recipe": arguments.recipe,
        "ranks": [arguments.ranks, *then],
        "steps": steps,
        "undisturbed_seconds": round(seconds, 1),
        "runs": len(runs),
        "kills": [vars(kill) for kill in killer.made],
        "attempts_in_the_ledger": len(last.state["ledger"]),
        "samples": last.samples,
        "lost": killer.lost,
    }


def _doing(run: Path, attempt: Attempt) -> str:
    saves = run / "checkpoints"
    if saves.is_dir() and any(entry.name.startswith((".draft", ".deleted")) for entry in saves.iterdir()):
        return "saving"
    if (run / "model").is_dir():
        return "ending"
    return "training" if "strategy" in attempt.output else "starting"


def compared(run: Path, undisturbed: Path) -> list[str]:
    """Return how a killed run differs from the undisturbed one."""
    faults = damage(run)
    if weights_hash(run) != weights_hash(undisturbed):
        faults.append(f"{run.name}: other weights than the undisturbed run's")
    if state_hash(run) != state_hash(undisturbed):
        faults.append(f"{run.name}: another state than the undisturbed run's")
    if history(run) != history(undisturbed):
        faults.append(f"{run.name}: another history than the undisturbed run's")
    manifest = manifest_of(run)
    if not audit(manifest.state, manifest.samples).complete:
        faults.append(f"{run.name}: its ledger is incomplete")
    return faults


def runs_table(results: Mapping[str, Any]) -> str:
    phases = Counter(kill["phase"] for kill in results["kills"])
    lines = [
        f"\n{results['recipe']}, {results['steps']} steps on {', then '.join(map(str, results['ranks']))} ranks: "
        f"{len(results['kills'])} SIGKILLs in {results['runs']} runs",
        *(f"  while {phase:<10} {number:>4}" for phase, number in phases.most_common()),
        f"  {results['attempts_in_the_ledger']} attempts in the last run's ledger, {results['samples']:,} samples",
        *_verdict(results["lost"], "weights, state, history and ledger are the undisturbed run's"),
    ]
    return "\n".join(lines)


def _verdict(lost: Sequence[str], fine: str) -> Iterator[str]:
    yield f"  LOST: {len(lost)}" if lost else f"  nothing lost: {fine}"
    yield from (f"    {fault}" for fault in lost)


# --- (b) saves ----------------------------------------------------------------------------------------------------

PHASES = {
    "begun": "the draft is there, nothing is in it",
    "bytes": "a shard is being written",
    "flush": "all bytes are written; not all are flushed, or not all ranks know it",
    "manifest": "the manifest is being written and flushed",
    "renamed": "published, and not yet reported by the run",
}


@dataclass
class Disk:
    """The state of a run's folder of checkpoints; cheap to read, because it is read often.

    Attributes:
        full: Sizes of the shards of a complete checkpoint.
    """

    folder: Path
    full: Mapping[str, int]
    seen: int = field(default=0)

    def phase(self) -> str | None:
        """Return the phase of the current save; None between two saves."""
        drafts = [name for name in self._names(self.folder) if name.startswith(".draft-")]
        if not drafts:
            return "renamed" if self.newest() > self.seen else None
        return self._of_draft(self.folder / drafts[0])

    def newest(self) -> int:
        return max(names_by_step(name for name in self._names(self.folder) if name.startswith("step-")), default=0)

    def _of_draft(self, draft: Path) -> str | None:
        names = self._names(draft)
        if "manifest.json" in names:
            return "manifest"
        sizes = {name: size_of(draft / name) for name in names if name.endswith(".safetensors")}
        if not any(sizes.values()):
            return "begun"
        return "flush" if sizes == self.full else "bytes"

    @staticmethod
    def _names(folder: Path) -> list[str]:
        try:
            return os.listdir(folder)
        except OSError:
            return []


def drill_saves(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    rng, kills = random.Random(arguments.seed), 15 if arguments.kills is None else arguments.kills
    run, lost = folder / "run", []
    words = ["stdlib-lm", *LARGE, f"--ranks={arguments.ranks}"]
    words += ["--checkpoint.every=1 steps", "--checkpoint.keep_last=2"]
    first = Attempt(run, words)
    first.wait(lambda: newest(run) >= 2)
    first.kill()
    full = {name: file.size for name, file in manifest_of(run).files.items()}
    hits: Counter[str] = Counter()
    missed, recovered, number = 0, 0, 0
    while sum(hits.values()) < kills:
        number += 1
        aim = min(PHASES, key=lambda phase: (hits[phase], rng.random()))
        attempt, disk = Attempt(run, words), Disk(run / "checkpoints", full)
        before = newest(run)
        phase = _kill_at(attempt, disk, aim, passing=rng.randrange(3), rng=rng)
        hits.update([phase] if phase else [])
        missed += phase is None
        _tell(f"kill {sum(hits.values())} of {kills}: aimed at {aim}, hit {phase or 'nothing'}, step {newest(run)}")
        lost += [f"kill {number}, at {aim}: {fault}" for fault in damage(run)]
        if newest(run) < before:
            lost.append(f"kill {number}, at {aim}: step {before} was there, and is gone")
        resumed = re.search(r"resumes from step ([\d,]+) ", attempt.output)
        if resumed is not None and int(resumed[1].replace(",", "")) >= before:  # a snapshot in memory may be newer
            recovered += 1
        else:
            lost.append(f"kill {number}: did not resume from step {before}, or later:\n{attempt.output[-2000:]}")
    return {
        "ranks": arguments.ranks,
        "state_bytes": sum(full.values()),
        "kills": sum(hits.values()),
        "phases": {phase: hits[phase] for phase in PHASES},
        "outside": missed,
        "recovered": recovered,
        "unrecoverable": len(lost),
        "newest_step": newest(run),
        "lost": lost,
    }


def _kill_at(attempt: Attempt, disk: Disk, aim: str, *, passing: int, rng: random.Random) -> str | None:
    """Kill the run during the phase `aim` of a later save; return the phase that was hit."""
    before = disk.newest()
    attempt.wait(lambda: disk.newest() > before + passing)
    disk.seen = disk.newest()
    attempt.wait(lambda: disk.phase() == aim, pause=0.00005)
    if aim in ("bytes", "flush"):
        time.sleep(rng.uniform(0, 0.05))
    if not attempt.kill():
        raise SystemExit(f"a run ended by itself, with exit code {attempt.code}:\n{attempt.output[-3000:]}")
    phase = disk.phase()
    return None if phase == "renamed" and _is_reported(attempt, disk.newest()) else phase


def _is_reported(attempt: Attempt, step: int) -> bool:
    return re.search(rf"^step {step:,}: saved", attempt.output, re.MULTILINE) is not None


def saves_table(results: Mapping[str, Any]) -> str:
    lines = [
        f"\nsaves of {results['state_bytes'] / 1e6:.0f} MB by {results['ranks']} ranks: "
        f"{results['kills']} SIGKILLs between",
        f"draft and report ({results['outside']} more fell between two saves)",
        *(_bar(phase, number, max(1, results["kills"])) for phase, number in results["phases"].items()),
        *_verdict(results["lost"], f"{results['recovered']} times the run resumed from the newest checkpoint"),
    ]
    return "\n".join(lines)


def _bar(phase: str, number: int, of: int) -> str:
    return (
        f"  {phase:<9} {number:>4}  {100 * number / of:>5.1f} %  {'#' * round(40 * number / of):<16}  {PHASES[phase]}"
    )


TABLES: Mapping[str, Callable[[Mapping[str, Any]], str]] = {"runs": runs_table, "saves": saves_table}

if __name__ == "__main__":
    main()
