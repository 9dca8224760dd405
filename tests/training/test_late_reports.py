"""Reports that come one update late, as from an accelerator, change nothing of what a run does, and none is missing.

The stand-in keeps the vote's numbers in tensors and reads them one update late, as on a GPU; its device is the CPU.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from kit import small
from kit.worlds import in_world

import lockstep
from lockstep.checkpoint.local import LocalStorage
from lockstep.checkpoint.reading import read_manifest
from lockstep.core.records import Batch, Request, StepReport
from lockstep.distributed.consensus import DeviceConsensus, VoteResult
from lockstep.loop.readback import Readback
from lockstep.monitor.metric_log import MetricLog
from lockstep.training import assemble

_EVENTS = "logged", "evaluation", "saved", "epoch_done"
_CLOCKS = {"seconds", "lost_seconds", "bytes", "grad_norm", "loss", "steps_per_second"}


class Logging(small.CrossEntropy):
    """Logs at some of its calls."""

    def __init__(self, calls: Iterable[int], fails_at: int = -1) -> None:
        self._calls, self._call, self._fails_at = set(calls), 0, fails_at

    def loss_sum(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        self._call += 1
        if self._call in self._calls:
            lockstep.log.mean("call", torch.tensor(float(self._call)), 1)
            lockstep.log.scalar("last", self._call)
        if self._call == self._fails_at:
            raise ValueError("an objective that fails")
        return super().loss_sum(outputs, batch)


class Seeing:
    """A monitor that keeps the steps that it sees, and acts at one of them."""

    def __init__(self, at: int, act: Any) -> None:
        self.steps: list[int] = []
        self._at, self._act = at, act

    def start(self, info: object) -> None: ...
    def restarted(self, report: object) -> None: ...
    def saved(self, report: object) -> None: ...
    def finish(self, error: object) -> None: ...
    def evaluated(self, report: object) -> Iterable[Request]:
        return ()

    def see(self, report: StepReport) -> Iterable[Request]:
        self.steps.append(report.step)
        return self._act() if report.step == self._at else ()


def _late(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(assemble, "Readback", lambda device, late: Readback(device, late=True))
    patch.setattr(assemble, "consensus_of", lambda world, loss_sum: DeviceConsensus(world.axis, world.device, loss_sum))


def _train(folder: Path, *, late: bool, error: type[BaseException] | None = None, **options: Any) -> None:
    objective, monitors = options.pop("objective", None), options.pop("monitors", ())
    config = {"run": {"steps": 8, "folder": str(folder)}, "monitor": _monitor(1), "checkpoint": {"every": "3 steps"}}
    with pytest.MonkeyPatch.context() as patch:
        if late:
            _late(patch)
        try:
            lockstep.train(
                small.config(**{**config, **options}), objective=objective or small.CrossEntropy(), monitors=monitors
            )
        except BaseException as raised:
            if error is None or not isinstance(raised, error):
                raise
            return
    assert error is None, "the run should have failed"


def _monitor(every: int) -> dict[str, Any]:
    return {"every": every, "tensorboard": False, "progress": "none"}


def _records(run: Path) -> list[list[Any]]:
    """Return the steps of metrics.jsonl, and the events without their times."""
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = (run / "events.jsonl").read_text().splitlines() if (run / "events.jsonl").exists() else []
    events = [{key: value for key, value in json.loads(line).items() if key not in _CLOCKS} for line in lines]
    kinds = [[event for event in events if kind in event] for kind in _EVENTS]  # saves end whenever they do
    order = [next(iter(event)) for event in events if "saved" not in event]
    losses = [record["loss"] and pytest.approx(record["loss"], rel=1e-6) for record in metrics]
    return [[record["step"] for record in metrics], losses, order, *kinds]


def _ledgers(run: Path) -> list[Any]:
    storage = LocalStorage(run / "checkpoints")
    manifests = [read_manifest(storage, name) for name in storage.names()]
    return [(manifest.step, manifest.state["ledger"]) for manifest in manifests]


_SCHEDULES: dict[str, dict[str, Any]] = {
    "each update": {"evaluation": {"every": "1 steps"}, "checkpoint": {"every": "1 steps", "keep_last": 20}},
    "now and then": {"evaluation": {"every": "3 steps"}, "checkpoint": {"every": "4 steps", "keep_last": 20}},
    "epochs": {"evaluation": {"every": "0.5 epochs"}, "checkpoint": {"every": "1 epochs", "keep_last": 20}},
    "logged always": {"objective": range(100)},
    "logged always, every third recorded": {"objective": range(100), "monitor": _monitor(3)},
    "logged once": {"objective": [4]},
    "logged at times": {"objective": [1, 4, 5], "monitor": _monitor(2)},
    "logged where it is recorded": {"objective": [3], "monitor": _monitor(3)},
}


@pytest.mark.parametrize("schedule", _SCHEDULES)
def test_what_is_scheduled_follows_the_same_updates(schedule: str, tmp_path: Path) -> None:
    for late in (False, True):
        options = dict(_SCHEDULES[schedule])
        if "objective" in options:
            options["objective"] = Logging(options["objective"])
        _train(tmp_path / str(late), late=late, **options)
    host, device = (_records(tmp_path / name) for name in ("False", "True"))
    assert device == host
    assert _ledgers(tmp_path / "True") == _ledgers(tmp_path / "False")


def _trained(folder: Path) -> list[list[Any]]:
    every = {"evaluation": {"every": "2 steps"}}
    with small.in_group():
        for late in (False, True):
            _train(folder / str(late), late=late, objective=Logging(range(2, 9)), **every)
    return [_records(folder / name) for name in ("False", "True")]


def test_two_ranks_agree_with_the_host_too(tmp_path: Path) -> None:
    host, device = in_world(2, _trained, tmp_path)[0]
    assert [device[0], *device[2:]] == [host[0], *host[2:]]
    assert device[0] == list(range(1, 9))


def test_a_resumed_run_evaluates_and_saves_after_its_first_update(tmp_path: Path) -> None:
    for late in (False, True):
        run = tmp_path / str(late)
        every = {"evaluation": {"every": "5 steps"}, "checkpoint": {"every": "5 steps", "keep_last": 20}}
        _train(run, late=late, **every, run={"steps": 4, "folder": str(run)})
        _train(run, late=late, **every)
    host, device = (_records(tmp_path / name) for name in ("False", "True"))
    assert device == host
    assert [event["step"] for event in device[4]] == [4, 5, 8]
    assert _ledgers(tmp_path / "True") == _ledgers(tmp_path / "False")


def _signals() -> list[Request]:
    os.kill(os.getpid(), signal.SIGTERM)
    return []


def _interrupts() -> list[Request]:
    raise KeyboardInterrupt


RESUMES: list[bool] = []


class Failing(Exception):
    pass


class Data:
    """Fails in the fifth update's samples."""

    def __init__(self) -> None:
        self._points, self._calls = small.points(), 0

    def __len__(self) -> int:
        return len(self._points)

    def __getitem__(self, index: int) -> Any:
        self._calls += 1
        if self._calls >= 45 and not RESUMES:
            raise Failing("a sample that can't be read")
        return self._points[index]


_ENDS: dict[str, tuple[type[BaseException], dict[str, Any]]] = {
    "a signal": (lockstep.core.errors.Paused, {"act": _signals}),
    "Ctrl-C": (KeyboardInterrupt, {"act": _interrupts}),
    "an objective's error": (ValueError, {"fails_at": 5}),
    "unreadable data": (lockstep.RunFailed, {"data": "Data"}),
}


@pytest.mark.parametrize("late", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("end", _ENDS)
def test_the_history_has_every_update_before_the_run_ends_and_after_it_resumes(
    end: str, late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error, how = _ENDS[end]
    run, options = tmp_path / "run", {}
    seeing = Seeing(3 if "act" in how else -1, how.get("act"))
    if "data" in how:
        options["data"] = {"train": {"kind": "custom", "target": f"{__name__}:Data"}}
    _train(run, late=late, error=error, monitors=[seeing], objective=Logging((), how.get("fails_at", -1)), **options)
    newest = LocalStorage(run / "checkpoints").names()[-1]
    stopped = read_manifest(LocalStorage(run / "checkpoints"), newest).step
    assert seeing.steps == list(range(1, stopped + 1))
    assert _records(run)[0] == seeing.steps
    monkeypatch.setattr(sys.modules[__name__], "RESUMES", [True])
    _train(run, late=late, **options)
    assert _records(run)[0] == list(range(1, 9))
    if "data" not in options:
        _train(tmp_path / "undisturbed", late=False)
        assert _records(run)[1] == _records(tmp_path / "undisturbed")[1]


@pytest.mark.parametrize("late", [False, True], ids=["host", "device"])
def test_the_update_at_which_a_run_gives_up_is_in_its_history(
    late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.resilience.verdicts.DISCARD_LIMIT", 3)
    seeing = Seeing(-1, None)
    _train(
        tmp_path / "run", late=late, error=lockstep.RunFailed, monitors=[seeing], objective=small.NanAt(range(2, 100))
    )
    assert seeing.steps == list(range(1, 6 + late))
    assert _records(tmp_path / "run")[0] == seeing.steps


def test_a_device_that_never_answers_does_not_keep_a_failed_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Never:
        def query(self) -> bool:
            return False

        def synchronize(self) -> None:
            raise AssertionError("waited for a device that hangs")

    readback = Readback(torch.device("cpu"), late=True)
    monkeypatch.setattr(readback, "_to_host", lambda numbers: (numbers, Never()))
    outcome = VoteResult(0.0, 0.0, 0.0, 0.0, torch.zeros(16, dtype=torch.float64))
    readback.push(outcome, (0.0, True, 1.0, 1.0), cast("Any", None))
    assert list(readback.last(0.01)) == []


def test_entries_that_were_taken_come_before_later_ones() -> None:
    log = MetricLog()
    log.scalar("last", 1.0)
    log.mean("mean", 2.0, 1)
    log.histogram("values", torch.tensor([1.0]))
    earlier = log.take()
    assert log.empty
    log.scalar("last", 3.0)
    log.mean("mean", 4.0, 1)
    log.histogram("values", torch.tensor([2.0]))
    log.text("text", "later")
    log.put_back(earlier)
    entries = log.drain()
    assert (entries.scalars, entries.means, entries.texts) == ({"last": 3.0}, {"mean": (6.0, 2.0)}, {"text": "later"})
    assert entries.histograms["values"].count == 2
