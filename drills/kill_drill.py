"""What is lost when everything is killed: `python drills/kill_drill.py`, about 3 minutes on 2 cores.

    runs     train a recipe, SIGKILL the whole process group at random moments, start it again, until it is done
             the weights of an undisturbed run, to the bit?  every sample once?  one history?  then on 1, 4, 3 ranks
    saves    train with large states, saving after every step; SIGKILL between a save's first byte and its end
             the newest checkpoint verifies, byte by byte?  none that was there is lost?  the run goes on from it?

    python drills/kill_drill.py runs --kills 20 --ranks 1
    python drills/kill_drill.py saves --kills 300

Where a kill has hit is what lies on the disk afterwards. Prints tables, writes results/kill_drill_NAME.json, and fails
(exit code 1) if anything was lost. Everything is drawn from --seed, but the moments are the machine's.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from lockstep.checkpoint.inspection import verify
from lockstep.checkpoint.local import LocalStorage
from lockstep.checkpoint.manifest import Manifest
from lockstep.checkpoint.reading import Reader, Wanted, by_step, read_manifest
from lockstep.checkpoint.saving import name_of
from lockstep.training.audit import audit

RESULTS = Path(__file__).parent / "results"
PATIENCE = 180.0  # seconds, after which a run hangs
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
        found = {"command": " ".join(["python", "drills/kill_drill.py", *sys.argv[1:]]), "machine": machine(), **found}
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
    parser.add_argument("--then", default="1,4,3", help="ranks that `runs` goes on with; '' for none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--where", type=Path, help="a folder on the disk that is to be tried; default: the system's own"
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    return parser.parse_args()


@contextmanager
def nobody_left_behind() -> Iterator[None]:
    """Whoever interrupts a drill ends its runs too."""
    try:
        yield
    finally:
        if Attempt.last is not None:
            Attempt.last.kill()


def machine() -> dict[str, Any]:
    return {
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load": os.getloadavg()[0],
    }


# --- a run, from outside ------------------------------------------------------------------------------------------


class Attempt:
    """`lockstep train` in a process group of its own."""

    last: Attempt | None = None

    def __init__(self, run: Path, words: Sequence[str]) -> None:
        Attempt.last = self
        self.run = run
        self._log = run.with_name(f"{run.name}.log")
        common = ["--monitor.progress=none", "--monitor.tensorboard=false", "--launch.device=cpu"]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "lockstep", "train", *words, f"--run.folder={run}", *common],
                stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=run.parent, start_new_session=True,
            )  # fmt: skip

    @property
    def said(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def lives(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> bool:
        """All its processes, at once; whether it was alive."""
        lived = self.lives
        if lived:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._wait_for_ranks()
        return lived

    def end(self) -> None:
        """Waits until it is done."""
        code = self._process.wait(PATIENCE)
        if code != 0:
            raise SystemExit(f"a run failed with exit code {code}:\n{self.said[-3000:]}")

    def wait(self, moment: Callable[[], bool], pause: float = 0.01) -> bool:
        """Until it has come, or the run is over; whether it has come."""
        deadline = time.monotonic() + PATIENCE
        while not moment():
            if not self.lives:
                return False
            if time.monotonic() > deadline:
                self.kill()
                raise SystemExit(f"a run hangs:\n{self.said[-3000:]}")
            time.sleep(pause)
        return True

    def _wait_for_ranks(self) -> None:
        deadline = time.monotonic() + PATIENCE
        while any(_group_of(pid) == self._process.pid for pid in os.listdir("/proc") if pid.isdecimal()):
            assert time.monotonic() < deadline, "ranks outlive SIGKILL"
            time.sleep(0.001)


def _group_of(pid: str) -> int | None:
    """None for what is dead already."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[2])


# --- what lies on the disk ----------------------------------------------------------------------------------------


def saves_of(run: Path) -> LocalStorage:
    return LocalStorage(run / "checkpoints")


def newest(run: Path) -> int:
    """Step of the newest checkpoint; 0 if there is none."""
    return max(by_step(saves_of(run).names()), default=0)


def damage(run: Path) -> list[str]:
    """What is wrong with what was published."""
    return [
        f"{name}: {verified.fault}"
        for name in saves_of(run).names()
        if (verified := verify(saves_of(run), name)).fault is not None
    ]


def state_hash(run: Path) -> str:
    """Of every tensor of the newest checkpoint, whoever wrote which part of it."""
    storage, name = saves_of(run), name_of(newest(run))
    manifest = read_manifest(storage, name)
    found = hashlib.sha256()
    with Reader(storage, name, manifest) as reader:
        for key, entry in sorted(manifest.tensors.items()):
            memory = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
            reader.read([Wanted(key, entry.kind.whole, memory)])
            found.update(f"{key} {entry.kind}".encode())
            found.update(memory.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def weights_hash(run: Path) -> str:
    """Of the model that a finished run left."""
    return hashlib.sha256((run / "model" / "model.safetensors").read_bytes()).hexdigest()


def history(run: Path) -> list[tuple[int, float]]:
    """Step and loss, as written down over all attempts."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines]


def manifest_of(run: Path) -> Manifest:
    return read_manifest(saves_of(run), name_of(newest(run)))


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


def drill_runs(asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    rng, kills = random.Random(asked.seed), 5 if asked.kills is None else asked.kills
    words = [asked.recipe, *SHORT[asked.recipe], "--monitor.every=1", "--checkpoint.every=4 steps"]
    then = [int(ranks) for ranks in asked.then.split(",") if ranks]
    undisturbed, lost = folder / "undisturbed", []
    began = time.perf_counter()
    Attempt(undisturbed, [*words, f"--run.steps={asked.steps}", f"--ranks={asked.ranks}"]).end()
    seconds = time.perf_counter() - began
    made: list[Kill] = []
    lives = []
    while len(made) < kills or not lives:
        run = folder / f"killed-{len(lives)}"
        _live([*words, f"--run.steps={asked.steps}", f"--ranks={asked.ranks}"], run, kills, made, rng, seconds, lost)
        lives.append(run)
        lost += compared(run, undisturbed)
    steps = asked.steps
    for ranks in then:
        steps += max(4, asked.steps // 5)
        for run in (undisturbed, lives[-1]):
            Attempt(run, [*words, f"--run.steps={steps}", f"--ranks={ranks}"]).end()
        lost += [f"on {ranks} ranks: {one}" for one in compared(lives[-1], undisturbed)]
    return {
        "recipe": asked.recipe,
        "ranks": [asked.ranks, *then],
        "steps": steps,
        "undisturbed_seconds": round(seconds, 1),
        "runs": len(lives),
        "kills": [vars(kill) for kill in made],
        "attempts_in_the_ledger": len(manifest_of(lives[-1]).state["ledger"]),
        "samples": manifest_of(lives[-1]).samples,
        "lost": lost,
    }


def _live(
    words: list[str], run: Path, kills: int, made: list[Kill], rng: random.Random, seconds: float, lost: list[str]
) -> None:
    """One run, started again after each kill until it is done; `made` and `lost` grow."""
    while True:
        attempt, began = Attempt(run, words), time.perf_counter()
        if len(made) >= kills:
            attempt.end()
            return
        before = newest(run)
        _moment(attempt, rng, seconds)
        if not attempt.kill():
            attempt.end()
            return
        made.append(Kill(round(time.perf_counter() - began, 2), _doing(run, attempt), newest(run)))
        lost += damage(run)
        if newest(run) < before:
            lost.append(f"kill {len(made)}: the newest checkpoint was of step {before}, and is of {newest(run)}")


def _moment(attempt: Attempt, rng: random.Random, seconds: float) -> None:
    """One in six falls into the start, the others somewhere between the first step and the end."""
    if rng.random() < 1 / 6:
        delay = rng.uniform(0, seconds / 2)
    else:
        seen = _size(attempt.run / "metrics.jsonl")
        attempt.wait(lambda: _size(attempt.run / "metrics.jsonl") not in (0, seen))
        delay = rng.uniform(0, seconds / 3)
    until = time.perf_counter() + delay
    attempt.wait(lambda: time.perf_counter() >= until, pause=0.001)


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


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
        return max(by_step(name for name in self._names(self.folder) if name.startswith("step-")), default=0)

    def _of_draft(self, draft: Path) -> str | None:
        names = self._names(draft)
        if "manifest.json" in names:
            return "manifest"
        sizes = {name: _size(draft / name) for name in names if name.endswith(".safetensors")}
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
        raise SystemExit(f"a run ended by itself:\n{attempt.said[-3000:]}")
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
