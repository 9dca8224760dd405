"""Runs a recipe undisturbed, then again and again with a fault in each run, and compares how they end."""

from __future__ import annotations

import json
import os
import random
import shutil
import time
import traceback
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lockstep.chaos import references
from lockstep.chaos.drawing import balanced, draw_fault, updates_between_saves
from lockstep.chaos.kinds import ONE_SAMPLE, applicable, prepared
from lockstep.chaos.launchers import StopRequest, run_launcher
from lockstep.checkpoint.comparison import OpenCheckpoint, compare
from lockstep.checkpoint.reading import read_manifest
from lockstep.config.every import Every
from lockstep.core.errors import ConfigError, Failure, RunFailed, Stopped, VerificationError, message_of
from lockstep.launch.devices import threads_per_rank
from lockstep.launch.local import import_ahead
from lockstep.loop.ledger import audit
from lockstep.monitor.attempts import read_attempts
from lockstep.monitor.events import EVENTS
from lockstep.monitor.folder import METRICS
from lockstep.plan.schedule import LENGTHS
from lockstep.resilience.disk_faults import DISK_KINDS, FLIP, SAMPLE
from lockstep.resilience.faults import FAULTS, OOM, STOP, Fault, events_of, write_plan
from lockstep.resilience.number_faults import NAN
from lockstep.resuming.locations import choose, find
from lockstep.training.ahead import imports_ahead
from lockstep.training.job import Job
from lockstep.training.start_run import launch_job

if TYPE_CHECKING:
    from lockstep.config.schema import Config

_RESTARTS = 3
_KEPT = 2  # checkpoints
_END_AFTER_S = 4.0  # a planted hang doesn't resolve itself
_OTHER_S, _COMPILING_S = 15.0, 60.0  # nor one in a save; a compilation takes longer
_LEAST_LIMIT_S, _SLOWER = 600.0, 20  # a round that takes longer than this, and than 20 undisturbed runs, hangs
_MAY_DIFFER = (
    "data.leave_out",
    *("recovery.snapshot_every", "recovery.compare_every"),
    *(f"recovery.bad_numbers.{key}" for key in ("nonfinite", "rollback_steps")),
)
"""Keys that may differ between the configs of a round and its reference."""
_LAST_LINES = 5  # of a failed run's output, in a message
_OF_NO_METRIC = ("evaluation", "step", "samples", "seconds")


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of `lockstep chaos`; no `kinds`: all that apply. `keep`: the folders of rounds that passed."""

    kinds: tuple[str, ...]
    rounds: int
    steps: int
    seed: int
    ranks: int
    folder: Path
    keep: bool = False


@dataclass(frozen=True, slots=True)
class ChaosRow:
    """A round: its fault, and what became of the run.

    Attributes:
        fired: Whether the fault has had its effect.
        recovery_seconds: From the fault to the end of the first update after it.
        steps_redone: Updates that had been made before the fault, and were made again.
        equal: Whether the last checkpoint, losses and evaluations equal the undisturbed run's, or the reference's.
        distance: Largest relative difference of a loss from the undisturbed run's.
        updates_unrecorded: Number of updates that metrics.jsonl lacks, without the last three before rank 0 fails.
        ledger_complete: Whether the run was trained on every sample of its order once.
        output: The file with what the run printed.
        failure: Why the round couldn't be run or compared; empty: it was.
    """

    fault: str
    rank: int
    step: int
    phase: str
    output: str
    fired: bool = False
    code: int = 0
    recovery_seconds: float | None = None
    steps_redone: int | None = None
    equal: bool = False
    updates_unrecorded: int = 0
    ledger_complete: bool = False
    distance: float = 0.0
    failure: str = ""

    @property
    def passed(self) -> bool:
        done = self.fired and not self.code and not self.failure
        return done and self.equal and not self.updates_unrecorded and self.ledger_complete


def run_rounds(job: Job, settings: Settings, stop: StopRequest) -> Iterator[ChaosRow]:
    """Run all rounds; yield a row for each. Raises RunFailed if the undisturbed run fails, Stopped after a signal."""
    kinds = applicable(job.config, settings.kinds, settings.ranks, settings.steps)
    rounds = _Rounds(job, settings, stop)
    import_ahead(imports_ahead(job.config))
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_per_rank(settings.ranks)))
    torch.set_num_threads(1)  # this process will be forked
    rounds.train_undisturbed()
    rounds.prepare(kinds)
    if not settings.kinds and not references.half_of(rounds.undisturbed):
        kinds = tuple(kind for kind in kinds if kind != OOM)
    draws = random.Random(settings.seed)
    rows = []
    for number, kind in zip(range(1, settings.rounds + 1), balanced(draws, kinds), strict=False):
        rows.append(rounds.run(number, kind, draws))
        yield rows[-1]
    if not settings.keep and all(row.passed for row in rows):
        shutil.rmtree(settings.folder)


def free_folder(chosen: Path | None, recipe: str) -> Path:
    """Make and return the folder of all runs. Raises ConfigError if the chosen one has content."""
    folder = chosen or Path("runs") / f"chaos-{Path(recipe).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise ConfigError(f"--folder {folder} has content; name a new or an empty one")
    return folder.absolute()


class _Rounds:
    def __init__(self, job: Job, settings: Settings, stop: StopRequest) -> None:
        self._job = job
        self._settings = settings
        self._stop = stop
        self._limit_s = 100 * _LEAST_LIMIT_S  # until the undisturbed run has shown how long one takes
        self.undisturbed = settings.folder / "undisturbed" / "run"

    def prepare(self, kinds: Collection[str]) -> None:
        """Let rounds have the settings that these kinds of faults need, which leave an undisturbed run as it is."""
        self._job = replace(self._job, config=prepared(self._job.config, kinds))

    def train_undisturbed(self) -> None:
        """Train the run without faults. Raises RunFailed if it fails."""
        began = time.monotonic()
        self.undisturbed.parent.mkdir()
        code = self._train(self._job_in(self.undisturbed))
        if code:
            text = output_of(self.undisturbed.parent).read_text(encoding="utf-8", errors="replace")
            last = "\n".join(text.strip().splitlines()[-_LAST_LINES:])
            raise RunFailed(f"the undisturbed run ended with exit code {code}:\n{last}")
        self._limit_s = max(_LEAST_LIMIT_S, _SLOWER * (time.monotonic() - began))

    def run(self, number: int, kind: str, draws: random.Random) -> ChaosRow:
        """Run a round, and delete its folder if it has passed."""
        folder = self._settings.folder / f"round-{number}"
        folder.mkdir()
        plan = folder / "faults.json"
        fault = draw_fault(draws, kind, self._settings.ranks, self._settings.steps, plan)
        try:
            if kind == OOM:
                fault = replace(fault, above=references.half_of(self.undisturbed))
                if not fault.above:
                    raise RunFailed(f"--faults {OOM} {ONE_SAMPLE}")
            row = self._disturbed(fault, plan)
        except Stopped:
            raise
        except Exception as error:
            if not isinstance(error, Failure):
                traceback.print_exc()
            text = message_of(error) if isinstance(error, Failure) else repr(error)
            row = ChaosRow(fault.kind, fault.rank, fault.step, fault.phase, str(output_of(folder)), failure=text)
        if row.passed and not self._settings.keep:
            shutil.rmtree(folder)
        return row

    def _disturbed(self, fault: Fault, plan: Path) -> ChaosRow:
        folder = plan.parent
        write_plan(plan, [fault])
        job = self._job_in(folder / "run", snapshots=fault.kind != FLIP)
        code = self._train(job, plan)
        expected = self.undisturbed
        if not code and references.needs_one(fault.kind, folder / "run", self.undisturbed):
            of_reference = self._job_in(folder / "reference" / "run")
            expected = references.reference(fault.kind, of_reference, folder / "run", self._train)
        return _row(fault, plan, code, self.undisturbed, expected)

    def _train(self, job: Job, plan: Path | None = None) -> int:
        output = output_of(Path(job.config.run.folder or "").parent)
        environment = {FAULTS: str(plan)} if plan is not None else {}

        def launch() -> int:
            return launch_job(job, self._settings.ranks)[1].show()

        return run_launcher(launch, output, environment, self._stop, self._limit_s)

    def _job_in(self, run: Path, *, snapshots: bool = True) -> Job:
        """Return the job of a run; without snapshots in memory, it resumes from a checkpoint."""
        config = config_of_round(self._job.config, run, self._settings.steps)
        if not snapshots:
            config = config.with_values(recovery={"snapshot_every": None})
        return replace(self._job, config=config)


def output_of(folder: Path) -> Path:
    """Return the file with what the run of a round has printed."""
    return folder / "output.txt"


def config_of_round(config: Config, run: Path, steps: int) -> Config:
    """Return the config of a round, with the settings that all rounds have."""
    other = _COMPILING_S if config.model.compile else _OTHER_S
    limits = {"enabled": True, "end_after": _END_AFTER_S, "other": other}
    watchdog = config.recovery.watchdog.model_copy(update=limits)
    between_saves, evaluated = Every(updates_between_saves(steps), "steps"), config.evaluation.every
    is_by_clock = evaluated is not None and evaluated.unit == "minutes"  # no two runs evaluate after the same updates
    restarts, kept = max(_RESTARTS, config.recovery.restarts), max(_KEPT, config.checkpoint.keep_last)
    off = {"trackers": (), "tensorboard": False, "prometheus": None, "early_stopping": None}
    sections: dict[str, dict[str, Any]] = {
        "run": {**dict.fromkeys(LENGTHS), "steps": steps, "folder": str(run)},
        "recovery": {"restarts": restarts, "budgets": type(config.recovery.budgets)(), "watchdog": watchdog},
        "checkpoint": {"every": between_saves, "keep_last": kept, "folder": None, "storage": None},
        "monitor": {"every": 1, "progress": "none", **off},
        "evaluation": {"every": between_saves if is_by_clock else evaluated},
    }
    return config.with_values(**sections)


def _row(fault: Fault, plan: Path, code: int, undisturbed: Path, reference: Path) -> ChaosRow:
    """Return the row of a round that is compared with the undisturbed run, or from where it resumed with another."""
    run, events = plan.with_name("run"), events_of(plan)
    fired = next((event for event in events if event["event"] == "fired"), None)
    updated = [event for event in events if event["event"] == "updated"]
    if fault.kind == SAMPLE:  # may be read many updates ahead
        updated = [event for event in updated if event["step"] >= fault.step]
    again = next((event for event in updated if fired is not None and event["time"] > fired["time"]), None)
    has_fired = equal = ledger_complete = False
    losses: dict[int, Any] = {}
    expected = usual = _losses(undisturbed)
    with suppress(Failure, OSError, ValueError, KeyError):
        has_fired = fired is not None and has_effect(fault.kind, run)
        losses = _losses(run)
        expected = {**usual, **_losses(reference)}
        equal = _have_equal_state(run, reference) and all(expected[step] == loss for step, loss in losses.items())
        exact = reference == undisturbed or fault.kind == NAN
        evaluated, other, own = (_evaluations(each, exact=exact) for each in (undisturbed, reference, run))
        equal = equal and {**evaluated, **other} == own
        ledger_complete = _is_complete(run)
    unwritten = range(fault.step - 2, fault.step + 1) if fault.rank == 0 else ()
    unrecorded = len(expected.keys() - losses.keys() - {*unwritten})
    seconds = again["time"] - fired["time"] if again is not None and fired is not None else None
    redone = max(0, fault.step - again["step"]) if again is not None else None
    what = (fault.kind, fault.rank, fault.step, fault.phase, str(output_of(plan.parent)))
    distance = references.distance(losses, usual)
    return ChaosRow(*what, has_fired, code, seconds, redone, equal, unrecorded, ledger_complete, distance)


def _have_equal_state(run: Path, undisturbed: Path) -> bool:
    places = [find(path) for path in (run, undisturbed)]
    first, second = (OpenCheckpoint(place.storage, choose(place, None)) for place in places)
    compared = compare(first, second)
    config = {key: values for key, values in compared.config.items() if key not in _MAY_DIFFER}
    state = {key: values for key, values in compared.state.items() if not key.startswith("data.")}  # left-out samples
    return replace(compared, config=config, state=state).equal


def _losses(run: Path) -> dict[int, Any]:
    """Return the losses by step. Raises OSError, ValueError, KeyError."""
    lines = [json.loads(line) for line in (run / METRICS).read_text(encoding="utf-8").splitlines()]
    return {line["step"]: line["loss"] for line in lines}


def _evaluations(run: Path, *, exact: bool) -> dict[tuple[str, int], list[object]]:
    """Return what was recorded of each set and step: metrics, or only their names unless they must be equal."""
    recorded: dict[tuple[str, int], list[object]] = defaultdict(list)
    file = run / EVENTS
    for event in map(json.loads, file.read_text(encoding="utf-8").splitlines() if file.exists() else ()):
        if "evaluation" in event:
            metrics = {name: value for name, value in event.items() if name not in _OF_NO_METRIC}
            recorded[event["evaluation"], event["step"]].append(metrics if exact else sorted(metrics))
    return recorded


def _is_complete(run: Path) -> bool:
    place = find(run)
    manifest = read_manifest(place.storage, choose(place, None))
    try:
        return audit(manifest.state, manifest.samples).complete
    except VerificationError:
        return False


def has_effect(kind: str, run: Path) -> bool:
    """Return whether the run in a folder shows the effect of a fault that has fired. Raises OSError, ValueError."""
    if kind in (STOP, SAMPLE, *DISK_KINDS):
        return True
    if kind == NAN:
        lines = (run / EVENTS).read_text(encoding="utf-8").splitlines()
        return any(json.loads(line).get("bad_numbers") == "rolled back" for line in lines)
    return len(read_attempts(run)) > 1 and (kind != FLIP or any(run.glob("checkpoints/broken-step-*")))
