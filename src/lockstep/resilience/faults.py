"""Faults that are planted in ranks, for `lockstep chaos`: at a phase of an update a rank fails or hangs.

    LOCKSTEP_FAULTS=plan.json   {"faults": [{"kind": "kill", "rank": 1, "step": 7, "phase": "backward"}, ...]}
    plan.jsonl                  what happened: each fault as it has its effect, the first update of each round, and the
                                update with a fault

A fault fires once, in whichever round its rank enters the phase of that update first.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.core.errors import ConfigError
from lockstep.core.files import append_line
from lockstep.core.phase_clock import Phase
from lockstep.core.planted import UnreadableSamples, plant_unreadable
from lockstep.resilience.disk_faults import (
    DISK_KINDS,
    FLIP,
    SAMPLE,
    flip_byte,
    newest_of_two,
    plant_in_disk,
)
from lockstep.resilience.memory_faults import Trained, plant_in
from lockstep.resilience.number_faults import DIVERGE, NAN, NUMBER_FAULTS

if TYPE_CHECKING:
    from lockstep.distributed.process_group import World

FAULTS = "LOCKSTEP_FAULTS"
PHASES = ("data", "forward", "backward", "communication", "optimizer", "host")
"""Phases of an update that every rank enters, under strategies with several ranks."""
STOP, OOM = "stop", "oom"
_EXIT_CODE = 9
_PATIENCE_S = 60.0
_SLICE_S = 0.01


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of a run, at the first beginning of a phase in an update.

    Attributes:
        kind: One of `KINDS`.
        step: The update, from 1; for `flip` the first from then on after two checkpoints.
        above: For `oom`: the largest micro-batch that fits.
        folder: For `flip`: the checkpoints' folder.
    """

    kind: str
    rank: int
    step: int
    phase: str
    above: int = 0
    folder: str = ""


class PlantedFault(Exception):
    """The exception of a fault of kind `raise`."""


def _note(plan: Path, event: str, **values: Any) -> None:
    """Append an event of a run with a plan, with its time."""
    append_line(plan.with_suffix(".jsonl"), json.dumps({"event": event, **values, "time": time.time()}))


def write_plan(plan: Path, faults: Sequence[Fault]) -> None:
    """Write a plan, for the environment variable `LOCKSTEP_FAULTS` of a run."""
    plan.write_text(json.dumps({"faults": [asdict(fault) for fault in faults]}), encoding="utf-8")


def events_of(plan: Path) -> list[dict[str, Any]]:
    """Return what has happened: {"event": "fired" or "updated", "rank", "step", "time" of the epoch}."""
    try:
        return [json.loads(line) for line in plan.with_suffix(".jsonl").read_text(encoding="utf-8").split("\n") if line]
    except FileNotFoundError:
        return []


def plant(
    world: World, steps: int, environ: Mapping[str, str] = os.environ, trained_in: Callable[[], Trained] | None = None
) -> None:
    """Plant the faults of the environment's plan, if any, in this rank after `steps` updates of the run."""
    name = environ.get(FAULTS)
    if not name:
        return
    plan = Path(name)
    try:
        faults = [Fault(**fault) for fault in json.loads(plan.read_text(encoding="utf-8"))["faults"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{FAULTS} names {name}, which is no plan of faults: {error}") from error
    if any(fault.kind == FLIP for fault in faults):
        plan.with_suffix(f".process-{world.rank}").write_text(str(os.getpid()), encoding="utf-8")
    trap = _Trap(plan, world, steps, [fault for fault in faults if fault.rank == world.rank])
    clock = world.clock
    enter = clock.enter

    def entered(phase: Phase) -> Phase:
        before = enter(phase)
        trap.entered(phase, clock.position().updates, ends_update=(before, phase) == (Phase.OPTIMIZER, Phase.HOST))
        return before

    clock.enter = entered  # type: ignore[method-assign]
    if trained_in is not None:
        trap.plant(trained_in())


class _Trap:
    def __init__(self, plan: Path, world: World, steps: int, faults: Sequence[Fault]) -> None:
        self._plan = plan
        self._world = world
        self._steps = steps
        self._faults = faults
        self._first = world.rank == 0
        self._fired_in = 0
        self._trained: Trained | None = None

    def plant(self, trained: Trained) -> None:
        """Plant the faults that come with the model's forwards and backwards, or with the data."""
        self._trained = trained
        for number, fault in enumerate(self._faults):
            if fault.kind == OOM:
                plant_in(trained, fault.phase, partial(self._runs_out, number, trained.samples))
            if fault.kind == SAMPLE:
                fails = partial(_fires_once, self._plan, self._world.rank, number, fault.step)
                plant_unreadable(UnreadableSamples(*trained.positions(fault.step), fails))
                self._fired_in = fault.step

    def entered(self, phase: Phase, updates: int, *, ends_update: bool) -> None:
        """See a phase begin, after some updates of this process; `ends_update`: after the optimizer's step."""
        step, name = self._steps + updates + 1, phase.name.lower()
        if updates and (self._first or 0 < self._fired_in < step):
            self._first = False
            self._fired_in = self._fired_in if self._fired_in >= step else 0
            self._note("updated", step - 1)
        for number, fault in enumerate(self._faults):
            if (
                fault.phase == name
                and fault.kind not in _PLANTED_AHEAD
                and (fault.kind != DIVERGE or ends_update)
                and _is_due(fault, step)
                and _is_first(self._plan, self._world.rank, number)
            ):
                self._begin(fault, step)

    def _begin(self, fault: Fault, step: int) -> None:
        if fault.kind in DISK_KINDS:
            plant_in_disk(fault.kind, partial(self._note, "fired", step))
        elif fault.kind == FLIP:
            _flip(fault, self._plan, partial(self._note, "fired", step))
        elif fault.kind not in NUMBER_FAULTS:
            self._note("fired", step)
            _act(fault, self._world)
        elif self._trained is not None:
            module = self._trained.first_module if fault.kind == NAN else self._trained.model
            NUMBER_FAULTS[fault.kind](module, lambda: self._note("fired", self._step()))

    def _runs_out(self, number: int, samples: Callable[[bool], int], training: bool) -> bool:
        """Return whether memory runs out, in a forward or backward of training (true) or of an evaluation."""
        fault, step = self._faults[number], self._step() - 1 + training
        if step < fault.step or samples(training) <= fault.above:
            return False
        if _is_first(self._plan, self._world.rank, number):
            self._note("fired", step)
        return True

    def _step(self) -> int:
        return self._steps + self._world.clock.position().updates + 1

    def _note(self, event: str, step: int) -> None:
        if event == "fired":
            self._fired_in = step
        _note(self._plan, event, rank=self._world.rank, step=step)


def _fires_once(plan: Path, rank: int, number: int, step: int) -> bool:
    """Note the first time that a fault of a rank fires, in whichever process; return whether this is it."""
    is_first = _is_first(plan, rank, number)
    if is_first:
        _note(plan, "fired", rank=rank, step=step)
    return is_first


def _is_first(plan: Path, rank: int, number: int) -> bool:
    try:
        plan.with_suffix(f".{rank}-{number}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _is_due(fault: Fault, step: int) -> bool:
    if fault.kind == FLIP:
        return step >= fault.step and newest_of_two(Path(fault.folder)) is not None
    return step == fault.step


def _flip(fault: Fault, plan: Path, fired: Callable[[], None]) -> None:
    """Change a byte of the newest checkpoint, and kill all ranks at once: one that is left would save a newer one."""
    file = newest_of_two(Path(fault.folder))
    if file is None:
        return
    flip_byte(file)
    fired()
    processes = [int(file.read_text(encoding="utf-8")) for file in plan.parent.glob(f"{plan.stem}.process-*")]
    for process in sorted(processes, key=lambda process: process == os.getpid()):
        os.kill(process, signal.SIGKILL)


def _act(fault: Fault, world: World) -> None:
    match fault.kind:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            sys.exit(_EXIT_CODE)
        case "raise":
            raise PlantedFault(f"planted in {fault.phase} of update {fault.step}")
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "hang":
            while True:
                time.sleep(_SLICE_S)
        case "gil":
            library = ctypes.PyDLL(None)  # its functions keep the interpreter's lock
            while True:
                library.sleep(int(_PATIENCE_S))
        case "collective":
            world.axis.gather(None)


_PLANTED_AHEAD = (OOM, SAMPLE)
_OF_RANK = ("kill", "exit", "raise", STOP, "hang", "gil", "collective")
KINDS = (*_OF_RANK, SAMPLE, FLIP, *DISK_KINDS, OOM, *NUMBER_FAULTS)
