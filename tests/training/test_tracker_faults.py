"""A tracker that raises, hangs, or whose server refuses: the run's result is bitwise the same, with one warning."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import small
from kit.failures import gives
from kit.worlds import free_port

import lockstep
from lockstep import log
from lockstep.extend import TrackedRun, Tracker
from lockstep.monitor.monitors import BackgroundWriter

CALLS = ("start", "scalars", "histograms", "texts", "images", "tables", "checkpoint", "rolled_back", "finish")
BOUND_S = 0.4
NAMES = ("Faulty", *(f"Faulty-{number}" for number in range(2, 11)))


class Faulty(Tracker):
    """Does `fault` in one of its calls, and nothing in others."""

    def __init__(self, call: str, fault: Callable[[], None]) -> None:
        self._call, self._fault = call, fault

    def _act(self, call: str) -> None:
        if call == self._call:
            self._fault()

    def start(self, run: TrackedRun) -> str:
        self._act("start")
        return "mine"

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._act("scalars")

    def histograms(self, step: int, histograms: Mapping[str, Any]) -> None:
        self._act("histograms")

    def texts(self, step: int, texts: Mapping[str, str]) -> None:
        self._act("texts")

    def images(self, step: int, images: Mapping[str, Any]) -> None:
        self._act("images")

    def tables(self, step: int, tables: Mapping[str, Any]) -> None:
        self._act("tables")

    def checkpoint(self, step: int, reference: str) -> None:
        self._act("checkpoint")

    def rolled_back(self, step: int, attempt: int) -> None:
        self._act("rolled_back")

    def finish(self, failure: str | None) -> None:
        self._act("finish")


class Logging(small.CrossEntropy):
    def loss_sum(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        log.histogram("outputs", outputs)
        log.text("text", "a text")
        log.image("image", torch.zeros(2, 2))
        log.table("table", ["a"], [[1]])
        return super().loss_sum(outputs, batch)


def losses(folder: Path, *trackers: Tracker, **monitor: Any) -> list[tuple[int, float]]:
    """The losses of a run of 4 updates, resumed to 6."""
    for steps in (4, 6):
        config = small.config(
            run={"steps": steps, "folder": str(folder)},
            schedule={"kind": "constant"},
            monitor={"every": 1, "tensorboard": False, "progress": "none", **monitor},
        )
        lockstep.train(config, objective=Logging(), trackers=trackers)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, float]]:
    return losses(tmp_path_factory.mktemp("alone") / "run")


def _disk_is_full() -> None:
    raise OSError(28, "No space left on device")


def _server_refuses() -> None:
    raise ConnectionRefusedError(111, "Connection refused")


@pytest.fixture
def bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        BackgroundWriter.__init__, "__defaults__", (BOUND_S, *BackgroundWriter.__init__.__defaults__[1:])
    )


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [message for message in caplog.messages if "tracker" in message]


@pytest.mark.parametrize("call", CALLS)
def test_a_tracker_that_raises(
    call: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, undisturbed: list[tuple[int, float]]
) -> None:
    fault = _server_refuses if call == "start" else _disk_is_full
    assert losses(tmp_path / "run", Faulty(call, fault)) == undisturbed
    told = _warnings(caplog)
    assert len(told) == (1 if call == "rolled_back" else 2), "once an attempt"
    assert all(text.startswith("tracker Faulty failed ") for text in told)


@pytest.mark.parametrize("call", ["start", "scalars", "finish"])
def test_trackers_that_hang_delay_the_end_by_one_bound(
    call: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, undisturbed: list[tuple[int, float]], bounded: None
) -> None:
    hanging = [Faulty(call, lambda: time.sleep(60)) for _ in NAMES]
    began = time.perf_counter()
    assert losses(tmp_path / "run", *hanging) == undisturbed
    assert time.perf_counter() - began < len(NAMES) * BOUND_S, "two attempts, each with one bound for all of them"
    expected = f"has not ended within {BOUND_S} s: its last reports are lost"
    assert sorted(_warnings(caplog)) == sorted([f"tracker {name} {expected}" for name in NAMES] * 2)


def test_a_server_that_refuses_connections(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    undisturbed: list[tuple[int, float]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("mlflow", reason="mlflow-skinny isn't installed")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    uri = f"http://127.0.0.1:{free_port()}"
    assert losses(tmp_path / "run", trackers=[{"target": "mlflow", "arguments": {"uri": uri}}]) == undisturbed
    told = _warnings(caplog)
    assert len(told) == 2
    assert all(text.startswith("tracker mlflow failed ") and "refused" in text for text in told)


def test_wandb_without_its_server_records_in_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb", reason="wandb isn't installed")
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("WANDB_API_KEY", "0123456789" * 4)
    monkeypatch.setattr("lockstep.monitor.wandb_tracker._INIT_S", 1.0)
    config = small.config(
        run={"steps": 4, "folder": str(tmp_path)},
        monitor={"every": 1, "tensorboard": False, "progress": "none", "trackers": [{"target": "wandb"}]},
    )
    lockstep.train(config)
    wandb.teardown()
    told = [message for message in caplog.messages if "Weights & Biases" in message]
    assert len(told) == 1
    assert gives(told[0], "mode offline")
    (file,) = (tmp_path / "trackers" / "wandb").glob("offline-run-*/*.wandb")
    assert file.read_bytes().count(b"train/loss") >= 4
