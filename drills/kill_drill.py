"""What is lost when everything is killed: `python drills/kill_drill.py`, about 3 minutes on 2 cores.

    runs     train a recipe, SIGKILL the whole process group at random moments, start it again, until it is done
             the weights of an undisturbed run, to the bit?  every sample once?  one history?  then on 1, 4, 3 ranks
    saves    train with large states, saving after every step; SIGKILL between a save's first byte and its end
             the newest checkpoint verifies, byte by byte?  none that was there is lost?  the run goes on from it?

    python drills/kill_drill.py runs --kills 20 --whole --steps 480      the default recipe as it is
    python drills/kill_drill.py saves --kills 300

Where a kill has hit is what lies on the disk afterwards. Prints tables, writes results/kill_drill_NAME.json, and fails
(exit code 1) if anything was lost. Everything is drawn from --seed, but the moments are the machine's.
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
    nobody_left_behind,
    size_of,
    state_hash,
    weights_hash,
)

from lockstep.checkpoint.storage import names_by_step
from lockstep.training.audit import audit

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
    asked = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # not without ending the runs
    drills = {"runs": drill_runs, "saves": drill_saves}
    lost = 0
    for name in drills if asked.drill == "all" else (asked.drill,):
        began = time.perf_counter()
        with tempfile.TemporaryDirectory(dir=asked.where, prefix=f"drill-{name}-") as folder, nobody_left_behind():
            found = drills[name](asked, Path(folder))
        found = {"command": command(name, asked), "machine": machine(), **found}
        found["seconds"] = round(time.perf_counter() - began, 1)
        asked.results.mkdir(parents=True, exist_ok=True)
        (asked.results / f"kill_drill_{name}.json").write_text(json.dumps(found, indent=2) + "\n")
        print(TABLES[name](found), flush=True)
        lost += len(found["lost"])
    sys.exit(1 if lost else 0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drill", nargs="?", choices=["runs", "saves", "all"], default="all")
    parser.add_argument("--kills", type=int, help="default: 5 of runs, 15 of saves")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--recipe", choices=list(SHORT), default="stdlib-lm", help="of `runs`")
    parser.add_argument("--steps", type=int, default=60, help="of `runs`")
    parser.add_argument("--whole", action="store_true", help="`runs` takes the recipe as it is, not a small one")
    parser.add_argument("--then", default="1,4,3", help="ranks that `runs` goes on with; '' for none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--where", type=Path, help="a folder on the disk that is to be tried; default: the system's own"
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    return parser.parse_args()


def _tell(progress: str) -> None:
    print(progress, file=sys.stderr, flush=True)


def command(name: str, asked: argparse.Namespace) -> str:
    """That does the same again."""
    words = {"kills": asked.kills, "ranks": asked.ranks, "seed": asked.seed}
    if name == "runs":
        words |= {"recipe": asked.recipe, "steps": asked.steps, "then": asked.then}
    given = [f"--{flag} {value}" for flag, value in words.items() if value not in (None, "")]
    return " ".join(["python drills/kill_drill.py", name, *given, *(["--whole"] if asked.whole else [])])


# --- (a) runs -----------------------------------------------------------------------------------------------------


@dataclass
class Kill:
    """Attributes:
    when: seconds after the attempt began.
    phase: what it was at.
    step: of the newest checkpoint then.
    """

    when: float
    phase: str
    step: int


@dataclass
class Killer:
    """Attributes:
    kills: to be made.
    seconds: that an undisturbed run takes.
    made: so far.
    lost: what should be there and isn't, one line each.
    """

    rng: random.Random
    kills: int
    seconds: float
    made: list[Kill] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    def live(self, run: Path, words: list[str]) -> None:
        """One run, started again after each kill until it is done."""
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
        """One kill in six falls into the start, the others somewhere between the first step and the end."""
        if self.rng.random() < 1 / 6:
            delay = self.rng.uniform(0, self.seconds / 2)
        else:
            lines = attempt.run / "metrics.jsonl"
            seen = size_of(lines)
            attempt.wait(lambda: size_of(lines) not in (0, seen))
            delay = self.rng.uniform(0, self.seconds / 3)
        until = time.perf_counter() + delay
        attempt.wait(lambda: time.perf_counter() >= until, pause=0.001)


def drill_runs(asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    shorter = () if asked.whole else SHORT[asked.recipe]
    words = [asked.recipe, *shorter, "--monitor.every=1", f"--checkpoint.every={max(4, asked.steps // 24)} steps"]
    as_asked = [*words, f"--run.steps={asked.steps}", f"--ranks={asked.ranks}"]
    undisturbed, began = folder / "undisturbed", time.perf_counter()
    Attempt(undisturbed, as_asked).end()
    seconds = time.perf_counter() - began
    killer = Killer(random.Random(asked.seed), 5 if asked.kills is None else asked.kills, seconds)
    runs: list[Path] = []
    while len(killer.made) < killer.kills or not runs:
        runs.append(folder / f"killed-{len(runs)}")
        killer.live(runs[-1], as_asked)
        killer.lost += compared(runs[-1], undisturbed)
    then = [int(ranks) for ranks in asked.then.split(",") if ranks]
    steps = asked.steps
    for ranks in then:
        steps += max(4, asked.steps // 5)
        for run in (undisturbed, runs[-1]):
            Attempt(run, [*words, f"--run.steps={steps}", f"--ranks={ranks}"]).end()
        killer.lost += [f"on {ranks} ranks: {one}" for one in compared(runs[-1], undisturbed)]
    last = manifest_of(runs[-1])
    return {
        "recipe": asked.recipe,
        "ranks": [asked.ranks, *then],
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
    return "training" if "strategy" in attempt.said else "starting"


def compared(run: Path, undisturbed: Path) -> list[str]:
    """In what a run that was killed is another one."""
    found = damage(run)
    if weights_hash(run) != weights_hash(undisturbed):
        found.append(f"{run.name}: other weights than the undisturbed run's")
    if state_hash(run) != state_hash(undisturbed):
        found.append(f"{run.name}: another state than the undisturbed run's")
    if history(run) != history(undisturbed):
        found.append(f"{run.name}: another history than the undisturbed run's")
    manifest = manifest_of(run)
    if not audit(manifest.state, manifest.samples).complete:
        found.append(f"{run.name}: its ledger is not whole")
    return found


def runs_table(found: Mapping[str, Any]) -> str:
    phases = Counter(kill["phase"] for kill in found["kills"])
    lines = [
        f"\n{found['recipe']}, {found['steps']} steps on {', then '.join(map(str, found['ranks']))} ranks: "
        f"{len(found['kills'])} SIGKILLs in {found['runs']} runs",
        *(f"  while {phase:<10} {number:>4}" for phase, number in phases.most_common()),
        f"  {found['attempts_in_the_ledger']} attempts in the last run's ledger, {found['samples']:,} samples",
        *_verdict(found["lost"], "weights, state, history and ledger are the undisturbed run's"),
    ]
    return "\n".join(lines)


def _verdict(lost: Sequence[str], fine: str) -> Iterator[str]:
    yield f"  LOST: {len(lost)}" if lost else f"  nothing lost: {fine}"
    yield from (f"    {one}" for one in lost)


# --- (b) saves ----------------------------------------------------------------------------------------------------

PHASES = {
    "begun": "the draft is there, nothing is in it",
    "bytes": "a shard is being written",
    "flush": "all bytes are written; not all are flushed, or not all ranks know it",
    "manifest": "the manifest is being written and flushed",
    "renamed": "published, and the run has not heard of it",
}


@dataclass
class Disk:
    """How a run's folder of checkpoints looks; looked at often, so it is looked at cheaply.

    Attributes:
        full: sizes of a whole checkpoint's shards.
    """

    folder: Path
    full: Mapping[str, int]
    seen: int = field(default=0)

    def phase(self) -> str | None:
        """Of the save under way; None between two."""
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


def drill_saves(asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    rng, kills = random.Random(asked.seed), 15 if asked.kills is None else asked.kills
    run, lost = folder / "run", []
    words = ["stdlib-lm", *LARGE, f"--ranks={asked.ranks}", "--checkpoint.every=1 steps", "--checkpoint.keep_last=2"]
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
        lost += [f"kill {number}, at {aim}: {one}" for one in damage(run)]
        if newest(run) < before:
            lost.append(f"kill {number}, at {aim}: step {before} was there, and is gone")
        if f"resumes from step {before:,} " in attempt.said:
            recovered += 1
        else:
            lost.append(f"kill {number}: did not go on from step {before}:\n{attempt.said[-2000:]}")
    return {
        "ranks": asked.ranks,
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
    """Lets some saves pass, waits for the phase, and a moment in it, and kills; returns the phase that was hit."""
    before = disk.newest()
    attempt.wait(lambda: disk.newest() > before + passing)
    disk.seen = disk.newest()
    attempt.wait(lambda: disk.phase() == aim, pause=0.00005)
    if aim in ("bytes", "flush"):
        time.sleep(rng.uniform(0, 0.05))
    if not attempt.kill():
        raise SystemExit(f"a run ended by itself, with exit code {attempt.code}:\n{attempt.said[-3000:]}")
    phase = disk.phase()
    return None if phase == "renamed" and _heard(attempt, disk.newest()) else phase


def _heard(attempt: Attempt, step: int) -> bool:
    return re.search(rf"^step {step:,}: saved", attempt.said, re.MULTILINE) is not None


def saves_table(found: Mapping[str, Any]) -> str:
    lines = [
        f"\nsaves of {found['state_bytes'] / 1e6:.0f} MB by {found['ranks']} ranks: {found['kills']} SIGKILLs between",
        f"draft and report ({found['outside']} more fell between two saves)",
        *(_bar(phase, number, max(1, found["kills"])) for phase, number in found["phases"].items()),
        *_verdict(found["lost"], f"{found['recovered']} times the run went on from the newest checkpoint"),
    ]
    return "\n".join(lines)


def _bar(phase: str, number: int, of: int) -> str:
    return (
        f"  {phase:<9} {number:>4}  {100 * number / of:>5.1f} %  {'#' * round(40 * number / of):<16}  {PHASES[phase]}"
    )


TABLES: Mapping[str, Callable[[Mapping[str, Any]], str]] = {"runs": runs_table, "saves": saves_table}

if __name__ == "__main__":
    main()
