"""Kills ranks of a run again and again, and measures what each kill costs.

    python benchmarks/recovery.py kills [--kills 200]             writes results/recovery.json
    python benchmarks/recovery.py goodput [--seconds 600]         writes results/goodput.json

    kills      a random rank gets a SIGKILL at a random moment; seconds from there to the end of the first update beyond
               all that were made before; updates that were made again; processes that are left at the end
    goodput    a random rank gets a SIGKILL every 15 s; the share of the time that this doesn't cost

Contestants: `lockstep train`, `torchrun --max-restarts` with a script that saves snapshots, and torchft, if
`--torchft PYTHON` names an interpreter that can import it beside the torch here:

    python -m venv --without-pip FOLDER
    python -c "import sysconfig; print(sysconfig.get_paths()['purelib'])" > FOLDER/lib/python3.11/site-packages/here.pth
    O=opentelemetry
    python -m pip --python FOLDER/bin/python install --no-deps torchft-nightly $O-api $O-sdk $O-proto \\
        $O-semantic-conventions $O-exporter-otlp-common $O-exporter-otlp-proto-common $O-exporter-otlp-proto-http \\
        $O-exporter-http-transport googleapis-common-protos
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from recovery_loops import LENGTH, NOTES, SAMPLES, TEXT
from rounds import RESULTS, about_here, markdown, save

PACKAGES = ("torch",)
KILLS, SECONDS, EVERY = 60, 300.0, 15.0
RANKS = 2
CALM = 5  # updates before the next kill
AFTERMATH_S = 3.0  # after the first new update, in which updates may be slow
JITTER_S = 2.5  # the next kill comes at a random moment of these
IN_FLIGHT_S = 0.025  # for an update to end whose collectives were over when the rank was killed
GIVES_UP_S = 60.0  # after a kill, without a new update
LEFT_S = 5.0  # after the end, for processes to end
MARK = "RECOVERY_BENCHMARK"
OWN_STORE = "torchrun, own store"
LOCKSTEP = (
    "stdlib-lm", "--ranks", str(RANKS), "parallel.strategy=ddp", f"batch.global_size={RANKS * SAMPLES}",
    f"data.train.length={LENGTH}", "data.evaluation={}", "evaluation.every=null", "evaluation.prompt=null",
    "evaluation.at_end=false", "run.steps=1000000", "launch.device=cpu", "monitor.progress=none",
)  # fmt: skip
"""Arguments of `lockstep train`: the recipe `stdlib-lm` with updates of about 50 ms on two cores."""


# --- contestants --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contestant:
    """A way to train on two ranks.

    Attributes:
        commands: The processes that a user starts, given the run's folder.
        environment: Variables that they get.
    """

    commands: Callable[[Path], Sequence[Sequence[str]]]
    environment: Callable[[int], Mapping[str, str]] = lambda number: {}


def contestants(torchft: str | None) -> dict[str, Contestant]:
    """Return the contestants by name; `torchft` is an interpreter."""
    loops = str(Path(__file__).with_name("recovery_loops.py"))
    torchrun = ("-m", "torch.distributed.run", "--max-restarts=1000000", "--monitor-interval=0.1")

    def lockstep(folder: Path) -> Sequence[Sequence[str]]:
        monitors = json.dumps([{"target": f"{loops}:monitor", "arguments": {"folder": str(folder)}}])
        return [[sys.executable, "-m", "lockstep", "train", *LOCKSTEP, f"run.folder={folder / 'run'}",
                 f"monitors={monitors}"]]  # fmt: skip

    def snapshots(folder: Path) -> Sequence[Sequence[str]]:
        return [[sys.executable, *torchrun, "--standalone", f"--nproc-per-node={RANKS}", loops, "snapshots",
                 str(folder)]]  # fmt: skip

    found = {
        "lockstep": Contestant(lockstep),
        "torchrun": Contestant(snapshots),
        OWN_STORE: Contestant(snapshots, lambda number: {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}),
    }
    if torchft is not None:
        port = 29000 + os.getpid() % 1000
        lighthouse = str(Path(torchft).with_name("torchft_lighthouse"))

        def groups(folder: Path) -> Sequence[Sequence[str]]:
            server = [lighthouse, "--min_replicas=1", "--quorum_tick_ms=50", "--join_timeout_ms=1000",
                      "--heartbeat_timeout_ms=1000", f"--bind=127.0.0.1:{port}"]  # fmt: skip
            group = [torchft, *torchrun, "--nnodes=1", "--nproc-per-node=1"]
            return [server, *([*group, f"--master-port={port + 1 + rank}", loops, "torchft", str(folder)]
                              for rank in range(RANKS))]  # fmt: skip

        def variables(number: int) -> Mapping[str, str]:
            return {"REPLICA_GROUP_ID": str(number - 1), "NUM_REPLICA_GROUPS": str(RANKS),
                    "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}"}  # fmt: skip

        found["torchft"] = Contestant(groups, variables)
    return found


# --- a run of a contestant ------------------------------------------------------------------------------------------


@dataclass
class Run:
    """The processes of a contestant, and what its ranks have noted."""

    contestant: Contestant
    folder: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    launches: int = 0
    events: list[dict[str, Any]] = field(default_factory=list)
    _processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _offset: int = 0

    def launch(self) -> None:
        """Start what a user starts."""
        self.launches += 1
        self._processes = []
        with (self.folder / "output.txt").open("ab") as output:
            for number, command in enumerate(self.contestant.commands(self.folder)):
                variables = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", MARK: self.mark}
                environment = {**os.environ, **variables, **self.contestant.environment(number)}
                self._processes.append(
                    subprocess.Popen(
                        command,
                        env=environment,
                        cwd=self.folder,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                    )
                )

    @property
    def ended(self) -> bool:
        """Whether a process has ended that should not."""
        return any(process.poll() is not None for process in self._processes)

    def read(self) -> list[dict[str, Any]]:
        """Return the events that were noted since the last call."""
        path = self.folder / NOTES
        if not path.exists():
            return []
        with path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        new = [json.loads(line) for line in whole.splitlines()]
        self.events += new
        return new

    @property
    def updates(self) -> list[dict[str, Any]]:
        """The updates that were noted."""
        return [event for event in self.events if event["event"] == "update"]

    def last_step(self) -> int:
        """Return the furthest update that was noted."""
        self.read()
        return max((event["step"] for event in self.updates), default=0)

    def wait(self, is_over: Callable[[dict[str, Any]], bool], seconds: float) -> dict[str, Any] | None:
        """Return the first new update for which this is true; None if a process or the time has ended before."""
        until = time.time() + seconds
        while time.time() < until:
            for event in self.read():
                if event["event"] == "update" and is_over(event):
                    return event
            if self.ended:
                return None
            time.sleep(0.005)
        return None

    def processes(self) -> list[int]:
        """Return all processes of this run, however they were started."""
        marked = f"{MARK}={self.mark}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdigit() and marked in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return found

    def rank(self, number: int) -> int | None:
        """Return the process of a rank, if there is one now."""
        starts = [event for event in self.events if event["event"] == "start" and event["rank"] == number]
        if starts and Path(f"/proc/{starts[-1]['pid']}").exists():
            return int(starts[-1]["pid"])
        log = f"/logs/rank-{number}.log"  # to which a rank of Lockstep prints
        for pid in sorted(self.processes(), key=started_at):  # one that waits for its turn is younger
            with suppress(OSError):
                if os.readlink(f"/proc/{pid}/fd/1").endswith(log):
                    return pid
        return None

    def end(self) -> int:
        """Stop the run as a user does; return how many processes are left a while later, which are killed."""
        for process in reversed(self._processes):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(30.0)
        until = time.time() + LEFT_S
        while (left := self.processes()) and time.time() < until:
            time.sleep(0.1)
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self._processes:
            process.wait()
        return len(left)


@contextmanager
def running(name: str, contestant: Contestant) -> Iterator[Run]:
    """Yield a run that trains, in a folder that is deleted."""
    with tempfile.TemporaryDirectory(prefix="recovery-") as folder:
        run = Run(contestant, Path(folder))
        write_text(Path(folder) / TEXT)
        run.launch()
        try:
            if run.wait(lambda event: event["step"] >= CALM, 2 * GIVES_UP_S) is None:
                output = (Path(folder) / "output.txt").read_text(errors="replace").strip().splitlines()
                raise SystemExit(f"{name} doesn't train: {' | '.join(output[-5:])}")
            yield run
        finally:
            run.end()


def write_text(path: Path) -> None:
    """Write the text that the scripts train on: the source of the standard library, as the recipe has it."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    path.write_bytes(b"".join(file.read_bytes() for file in files))


# --- kills ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kill:
    """A kill, and what followed.

    Attributes:
        seconds: To the end of the first update beyond all that were made before; None: it didn't come.
        whole: The same for an update of all ranks.
        redone: Updates that were made again.
        attempts: How often ranks were started until then.
        relaunched: Whether a process had to be started that a user starts.
    """

    rank: int
    seconds: float | None
    whole: float | None
    redone: int
    attempts: int
    relaunched: bool


def kill(run: Run, rank: int) -> Kill:
    """Kill a rank, and wait until the run has got further."""
    pid = run.rank(rank)
    assert pid is not None, f"rank {rank} isn't there"
    attempts = attempts_of(run, rank)
    os.kill(pid, signal.SIGKILL)
    killed = time.time()
    while Path(f"/proc/{pid}/stat").exists() and "Z" not in state_of(pid):
        time.sleep(0.0005)
    time.sleep(IN_FLIGHT_S)
    last, before, relaunched = run.last_step(), len(run.events), False
    whole = run.wait(lambda event: event["step"] > last and event["ranks"] == RANKS, GIVES_UP_S)
    if whole is None:
        relaunched = True
        run.end()
        run.launch()
        whole = run.wait(lambda event: event["step"] > last and event["ranks"] == RANKS, GIVES_UP_S)
    after = [event for event in run.events[before:] if event["event"] == "update"]
    new = next((event for event in after if event["step"] > last), None)
    earlier = [event for event in run.events[:before] if event["event"] == "update"]
    redone = max((steps_again(rank, earlier, after) for rank in range(RANKS)), default=0)
    return Kill(
        rank,
        new["time"] - killed if new is not None else None,
        whole["time"] - killed if whole is not None else None,
        redone,
        attempts_of(run, rank) - attempts,
        relaunched,
    )


def steps_again(rank: int, earlier: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> int:
    """Return how many updates a rank has noted for the second time."""
    before, again = ([event["step"] for event in events if event["rank"] == rank] for events in (earlier, after))
    return max(0, before[-1] + 1 - min(again)) if before and again else 0


def started_at(pid: int) -> int:
    """Return when a process was started, in ticks of the clock; if it has ended, long ago."""
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return 0


def state_of(pid: int) -> str:
    """Return the letter of a process's state; Z if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def kill_again_and_again(name: str, contestant: Contestant, kills: int, seed: int) -> dict[str, Any]:
    """Return the figures of a contestant whose ranks are killed this often."""
    draws = random.Random(seed)
    with running(name, contestant) as run:
        done = []
        for number in range(kills):
            done.append(kill(run, draws.randrange(RANKS)))
            if done[-1].whole is None:
                break
            print(f"  {name:20} kill {number + 1:3} of rank {done[-1].rank}: {done[-1].seconds:.3f} s, "
                  f"{done[-1].whole:.3f} s, {done[-1].redone} redone{', launched again' * done[-1].relaunched}",
                  file=sys.stderr, flush=True)  # fmt: skip
            furthest = run.last_step()
            run.wait(lambda event, until=furthest + CALM: event["step"] >= until, GIVES_UP_S)
            time.sleep(draws.uniform(0.0, JITTER_S))
        losses = losses_of(run.updates)
        left = run.end()
        figures = {"kills": [vars(each) for each in done], "left": left, "updates": len(losses)}
    if name == "torchft":  # updates of one rank alone have other samples
        return figures
    with running(name, contestant) as undisturbed:
        undisturbed.wait(lambda event: event["step"] >= max(losses), 3600.0)
        expected = losses_of(undisturbed.updates)
    return {**figures, "differ": sum(expected.get(step) != values for step, values in losses.items())}


def losses_of(updates: Sequence[Mapping[str, Any]]) -> dict[int, set[float]]:
    """Return the losses that were noted of each update, on rank 0: several if one was made again and differed."""
    losses: dict[int, set[float]] = {}
    for event in updates:
        if event["rank"] == 0:
            losses.setdefault(event["step"], set()).add(event["loss"])
    return losses


def attempts_of(run: Run, rank: int) -> int:
    """Return how often a rank has been started, or ranks by Lockstep's launcher, as it has recorded."""
    logs = run.folder / "run" / "logs"
    if logs.exists():
        return len((logs / "ends.jsonl").read_text().splitlines()) if (logs / "ends.jsonl").exists() else 0
    return sum(event["event"] == "start" and event["rank"] == rank for event in run.events)


# --- goodput --------------------------------------------------------------------------------------------------------


def goodput(name: str, contestant: Contestant, seconds: float, every: float, seed: int) -> dict[str, Any]:
    """Return the figures of a contestant of which a rank is killed at an interval of seconds."""
    draws = random.Random(seed)
    with running(name, contestant) as run:
        began, first = time.time(), run.last_step()
        kills: list[float] = []
        while time.time() < began + seconds:
            time.sleep(0.1)  # rarely: what this process computes, the ranks lack
            if run.ended:
                run.end()
                run.launch()
            if began + seconds > time.time() >= began + every * (len(kills) + 1):
                run.read()
                if (pid := run.rank(draws.randrange(RANKS))) is not None:
                    os.kill(pid, signal.SIGKILL)
                kills.append(time.time())
        ended, last = time.time(), run.last_step()
        ends = new_updates(run)
        made = [end for end in ends if began < end <= ended]
        median = statistics.median(after - before for before, after in pairwise(made))
    lost = losses_by_kills(kills, ends, median, ended)
    return {"goodput": 1.0 - sum(lost) / (ended - began), "lost_s": sum(lost) / len(kills),
            "update_s": median, "by_median": len(made) * median / (ended - began), "kills": len(kills),
            "relaunched": run.launches - 1, "updates": last - first, "alone": last - first - len(made)}  # fmt: skip


def new_updates(run: Run) -> list[float]:
    """Return when each update of all ranks ended that was made for the first time, in order."""
    furthest, ends = 0, []
    for event in sorted(run.updates, key=lambda event: float(event["time"])):
        if event["ranks"] == RANKS and event["step"] > furthest:
            furthest = event["step"]
            ends.append(float(event["time"]))
    return ends


def losses_by_kills(kills: Sequence[float], ends: Sequence[float], median: float, ended: float) -> list[float]:
    """Return the seconds that kills have cost, given when new updates ended; kills before one is over count with it.

    From the last update before a kill to some seconds after the next new one, without what the new updates would have
    taken at the pace of the seconds after that: a machine is faster in some minutes than in others.
    """
    lost, over = [], 0.0
    for kill in kills:
        if kill <= over:
            continue
        begin = max(end for end in ends if end <= kill)
        first = min((end for end in ends if end > kill), default=ended)
        over = max((end for end in ends if first <= end <= first + AFTERMATH_S), default=ended)
        calm = [end for end in ends if over <= end <= over + AFTERMATH_S and not any(over < k <= end for k in kills)]
        usual = (calm[-1] - calm[0]) / (len(calm) - 1) if len(calm) > CALM else median
        lost.append(over - begin - usual * sum(begin < end <= over for end in ends))
    return lost


# --- the command ----------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["kills", "goodput"])
    parser.add_argument("--kills", type=int, default=KILLS)
    parser.add_argument("--peer-kills", type=int, metavar="N", help="of each other contestant; default --kills")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--every", type=float, default=EVERY, help="seconds between two kills, for goodput")
    parser.add_argument("--torchft", metavar="PYTHON", help="an interpreter that can import torchft")
    parser.add_argument("--only", action="append", metavar="NAME", help="this contestant; may be repeated")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # runs that have been started are ended
    chosen = contestants(arguments.torchft)
    if arguments.what == "goodput":
        del chosen[OWN_STORE]  # it recovers as the other torchrun does
    if arguments.only:
        chosen = {name: chosen[name] for name in arguments.only}
    machine = about_here(PACKAGES)
    rows = {}
    for name, contestant in chosen.items():
        if arguments.what == "kills":
            kills = arguments.kills if name == "lockstep" else arguments.peer_kills or arguments.kills
            rows[name] = kill_again_and_again(name, contestant, kills, arguments.seed)
        else:
            rows[name] = goodput(name, contestant, arguments.seconds, arguments.every, arguments.seed)
            print(f"  {name:20} {rows[name]}", file=sys.stderr, flush=True)
    results = {"command": command_of(arguments), "machine": machine, "rows": rows}
    whole = arguments.kills >= KILLS if arguments.what == "kills" else arguments.seconds >= SECONDS
    name = {"kills": "recovery", "goodput": "goodput"}[arguments.what]
    if whole:
        save(name, beside_earlier(name, results) if arguments.only else results)
    print((table if arguments.what == "kills" else goodput_table)(results))


def beside_earlier(name: str, results: Mapping[str, Any]) -> dict[str, Any]:
    """Return the saved results with these rows replaced."""
    earlier: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    later = {row: f"`{results['command']} --only {row}`, {results['machine']['date']}" for row in results["rows"]}
    return {
        **earlier,
        "rows": {**earlier["rows"], **results["rows"]},
        "later": {**earlier.get("later", {}), **later},
    }


def command_of(arguments: argparse.Namespace) -> str:
    """Return the command, for the page."""
    number = f"--kills {arguments.kills}" if arguments.what == "kills" else f"--seconds {arguments.seconds:g}"
    peers = f" --peer-kills {arguments.peer_kills}" if arguments.what == "kills" and arguments.peer_kills else ""
    torchft = " --torchft PYTHON" * bool(arguments.torchft)
    return f"python benchmarks/recovery.py {arguments.what} {number}{peers}{torchft}"


def table(results: Mapping[str, Any]) -> str:
    """Return the table of kills."""
    columns = ["", "recovered at the first attempt", "s to the next update: median", "p90", "p99", "most",
               "s until all ranks train", "updates made again: median", "most", "processes left",
               "losses that differ"]  # fmt: skip
    lines = []
    for name, row in results["rows"].items():
        kills = row["kills"]
        first = sum(kill["attempts"] == 1 and not kill["relaunched"] for kill in kills)
        redone = [kill["redone"] for kill in kills]
        differ = f"{row['differ']} of {row['updates']:,}" if "differ" in row else "not comparable"
        lines.append(
            [
                name,
                f"{first} of {len(kills)}",
                *(f"{value:.2f}" for value in quantiles_of(kills, "seconds")),
                f"{quantiles_of(kills, 'whole')[0]:.2f}",
                f"{statistics.median(redone):g}",
                str(max(redone)),
                str(row["left"]),
                differ,
            ]
        )
    return f"{markdown(columns, lines)}\n\n{provenance_of(results)}"


def quantiles_of(kills: Sequence[Mapping[str, Any]], what: str) -> list[float]:
    """Return the median, the 90th and 99th percentile and the maximum; a kill without recovery counts as the limit."""
    seconds = sorted(kill[what] if kill[what] is not None else GIVES_UP_S for kill in kills)
    return [seconds[min(len(seconds) - 1, int(share * len(seconds)))] for share in (0.5, 0.9, 0.99, 1.0)]


def goodput_table(results: Mapping[str, Any]) -> str:
    """Return the table of goodput."""
    columns = ["", "goodput", "s lost by a kill", "kills", "new updates", "made by one rank alone", "launched again",
               "updates x their median / time"]  # fmt: skip
    lines = [
        [name, f"{row['goodput']:.1%}", f"{row['lost_s']:.2f}", str(row["kills"]), f"{row['updates'] - row['alone']:,}",
         f"{row['alone']:,}", str(row["relaunched"]), f"{row['by_median']:.1%}"]
        for name, row in results["rows"].items()
    ]  # fmt: skip
    return f"{markdown(columns, lines)}\n\n{provenance_of(results)}"


def provenance_of(results: Mapping[str, Any]) -> str:
    """Return the line under a table."""
    here = results["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in here["versions"].items())
    later = "".join(f" The row {row} was measured later: {how}." for row, how in results.get("later", {}).items())
    return (
        f"`{results['command']}`, {here['date']}, {here['cores']} cores of {here['processor']} (load before: "
        f"{here['load_before']}), Python {here['python']}, {versions}.{later}"
    )


if __name__ == "__main__":
    main()
