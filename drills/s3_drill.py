"""Kills runs and breaks requests in the middle of saves to S3, and checks for data loss: `python drills/s3_drill.py`.

    a run saves to moto's server, over HTTP, after every update; single, ddp or fsdp on 1 or 2 ranks is drawn each time
    a request of a later save is drawn: upload of a part, its begin or end, a rank's record, the manifest, a deletion
    kill     SIGKILL to the process group before the server has the request, in the middle of its body, or after it
    fault    that request, and its repeats, are answered by 500, 503, a cut or a lost answer; then SIGKILL
    started again: does the newest checkpoint verify, byte by byte?  is none lost?  does the run resume from it?

Prints a table, writes results/s3_drill.json, and fails (exit code 1) if anything was lost.
Everything is drawn from --seed, but the timing is the machine's.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from attempts import machine
from kit import s3
from kit.commands import Running, start_lockstep
from kit.s3 import Fault

from lockstep.checkpoint.objects import ObjectStorage
from lockstep.checkpoint.reading import verify
from lockstep.checkpoint.storage import names_by_step
from lockstep.stores.buckets import Bucket

RESULTS = Path(__file__).parent / "results"
ADDRESS = f"s3://{s3.BUCKET}/drill"
WORDS = (
    "train", "digits", "--model.width=176", "--run.epochs=null", "--run.steps=1000000", "--batch.global_size=8",
    "--evaluation.every=null", "--monitor.progress=plain", "--monitor.every=1", "--monitor.tensorboard=false",
    "--launch.device=cpu", "--checkpoint.every=1 steps", "--checkpoint.keep_last=2", "--checkpoint.retry_seconds=0.5",
    f"--checkpoint.folder={ADDRESS}", "--run.folder=run",
    "--recovery.snapshot_every=null",  # else the run may resume from memory, later than from the newest checkpoint
)  # fmt: skip
LAYOUTS = {"single": 1, "ddp": 2, "fsdp": 2}
REQUESTS = {  # and the strategies that make them: under fsdp, no rank's file is large enough for an upload in parts
    "begin of an upload": ("POST .*step-.*uploads", ("single", "ddp")),
    "part of an upload": ("PUT .*step-.*partNumber=", ("single", "ddp")),
    "end of an upload": ("POST .*step-.*uploadId=", ("single", "ddp")),
    "a rank's record or small file": (r"PUT .*step-[0-9]*/rank-[^?]*$", ("ddp", "fsdp")),
    "manifest": ("PUT .*step-[0-9]*/manifest.json", tuple(LAYOUTS)),
    "deletion": ("(DELETE|POST .*[?]delete).*", tuple(LAYOUTS)),
}
KILLS = {"hang": "before the server has it", "cut": "in the middle of it", "lost": "after the server has it"}
FAULTS = ("500", "503", "cut", "lost")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attempts", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=36_000, help="stop after this time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="s3-drill-") as folder, s3.serving() as server, s3.proxied(server) as proxy:
        os.environ.update(s3.environment(proxy.endpoint))
        drill = Drill(Path(folder), server, proxy, random.Random(arguments.seed))
        while drill.made < arguments.attempts and time.perf_counter() - began < arguments.seconds:
            drill.attempt()
        measured = drill.results()  # asks the server, too
    command = f"python drills/s3_drill.py --attempts {arguments.attempts} --seed {arguments.seed}"
    results = {"command": command, "machine": machine(), **measured}
    results["seconds"] = round(time.perf_counter() - began, 1)
    path = arguments.results or RESULTS / "s3_drill.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results, indent=2))
    sys.exit(1 if drill.lost else 0)


class Drill:
    """One run that is started, disturbed in a save and killed, again and again."""

    def __init__(self, folder: Path, server: str, proxy: s3.Proxy, rng: random.Random) -> None:
        self._folder = folder
        self._server = server
        self._proxy = proxy
        self._storage = ObjectStorage(Bucket(ADDRESS))
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        os.environ["AWS_ENDPOINT_URL"] = server
        self._storage.names()  # its client goes past the proxy
        os.environ["AWS_ENDPOINT_URL"] = proxy.endpoint
        self._rng = rng
        self._cases: Counter[str] = Counter()
        self._requests: Counter[str] = Counter()
        self._layouts: Counter[str] = Counter()
        self._resumed = 0
        self._leftover_uploads = 0
        self.made = 0
        self.lost: list[str] = []

    def attempt(self) -> None:
        """Start the run, disturb it, kill it, and compare what is there with what was there."""
        request = min(REQUESTS, key=lambda name: (self._requests[name], self._rng.random()))
        pattern, strategies = REQUESTS[request]
        strategy = self._rng.choice(strategies)
        ranks = LAYOUTS[strategy]
        is_kill = self._rng.random() < 0.6
        kind = self._rng.choice([*KILLS] if is_kill else FAULTS)
        before = self._newest()
        self._proxy.plan()
        words = (*WORDS, f"--ranks={ranks}", f"--parallel.strategy={strategy}")
        run = start_lockstep(*words, cwd=self._folder)
        try:
            run.wait_for(lambda: self._newest() > before)
            resumes = before == 0 or f"resumes from step {before:,} " in self._output()
            left = len(s3.client(self._server).list_multipart_uploads(Bucket=s3.BUCKET).get("Uploads", ()))
            self._leftover_uploads = max(self._leftover_uploads, left)
            hit = self._disturb(run, pattern, kind, is_kill=is_kill)
        finally:
            if run.lives:
                run.send(signal.SIGKILL, group=True)
            run.end()
            self._proxy.plan()
        case = f"kill, {KILLS[kind]}" if is_kill else f"fault, {kind}"
        if hit:
            self.made += 1
            self._resumed += resumes
            self._cases[case] += 1
            self._requests[request] += 1
            self._layouts[f"{strategy} on {ranks}"] += 1
        self._judge(f"{case}, {request}", before, self._output(), resumes=resumes)
        done = f"{self.made}: {case}, {request}, {strategy}, step {self._newest()}"
        print(done if hit else f"missed: {case}, {request}", file=sys.stderr, flush=True)

    def results(self) -> dict[str, Any]:
        return {
            "attempts": self.made,
            "resumed_from_the_newest": self._resumed,
            "cases": dict(self._cases),
            "requests": dict(self._requests),
            "layouts": dict(self._layouts),
            "newest_step": self._newest(),
            "most_open_uploads_during_a_run": self._leftover_uploads,
            "lost": self.lost,
        }

    def _disturb(self, run: Running, pattern: str, kind: Any, *, is_kill: bool) -> bool:
        """Return whether a request was hit; the run is killed then."""
        fault = Fault(pattern, kind, times=1 if is_kill else 1000, after=self._rng.randrange(2))
        self._proxy.plan(fault)
        until = time.monotonic() + 20
        while not fault.made and run.lives and time.monotonic() < until:
            time.sleep(0.0005)
        if not fault.made:
            return False
        if not is_kill:  # the save fails, and another may begin
            time.sleep(self._rng.uniform(0, 1.5))
        elif self._rng.random() < 0.5:
            time.sleep(self._rng.uniform(0, 0.05))
        return True

    def _judge(self, case: str, before: int, output: str, *, resumes: bool) -> None:
        storage = self._storage
        names = names_by_step(storage.names())
        if max(names, default=0) < before:
            self.lost.append(f"{case}: step {before} was there, and is gone")
        faults = [f"{case}: {name}: {fault}" for name in names.values() if (fault := verify(storage, name).fault)]
        self.lost += faults
        if not resumes:
            self.lost.append(f"{case}: did not resume from step {before}:\n{output[-2000:]}")

    def _output(self) -> str:
        return "".join((self._folder / name).read_text() for name in ("out", "err"))

    def _newest(self) -> int:
        return max(names_by_step(self._storage.names()), default=0)


def table(results: Mapping[str, Any]) -> str:
    """Return the table in Markdown, from what results/s3_drill.json holds."""
    resumed = f"**{results['resumed_from_the_newest']} of {results['attempts']}**"
    lines = [
        "| | attempts |",
        "|---|--:|",
        f"| resumed from the newest complete checkpoint | {resumed} |",
        f"| checkpoints lost or damaged | {len(results['lost'])} |",
    ]
    for what, shown in (("cases", ""), ("requests", "hit: "), ("layouts", "")):
        lines += [f"| {shown}{name} | {number} |" for name, number in sorted(results.get(what, {}).items())]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
