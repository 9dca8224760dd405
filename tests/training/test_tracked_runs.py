"""A run that is killed, resumed and rolled back is one curve in each tracker, read back by the tracker's own reader."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import small
from kit.failures import gives
from kit.worlds import served
from monitor.test_trackers import wandb_records
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import lockstep
from lockstep import log

COMET = Path(__file__).parents[2] / "examples" / "comet_tracker.py"
TRACKERS = [
    {"target": "mlflow"},
    {"target": "wandb", "arguments": {"mode": "offline"}},
    {"target": "trackio"},
    {"target": f"{COMET}:Comet"},
]


class KilledAt(small.CrossEntropy):
    """Ends its process in update 11, once the trackers have what came before."""

    def __init__(self, folder: Path) -> None:
        self._calls, self._folder = 0, folder

    def loss_sum(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        self._calls += 1
        log.image("picture", torch.full((2, 2), self._calls / 20))
        if self._calls == 11:
            deadline = time.monotonic() + 60
            while not _all_have_10(self._folder) and time.monotonic() < deadline:
                time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss_sum(outputs, batch)


def _all_have_10(folder: Path) -> bool:
    mlflow = list(folder.glob("trackers/mlflow/*/*/metrics/train/loss"))
    files = list(folder.glob("trackers/wandb/offline-run-*/*.wandb"))
    return (
        bool(mlflow)
        and len(mlflow[0].read_text().splitlines()) == 10
        and len(_trackio(folder)) >= 10
        and bool(files)
        and files[0].read_bytes().count(b"train/loss") >= 10
    )


def _trackio(folder: Path) -> list[dict[str, Any]]:
    database = folder.parent / "trackio" / "lockstep.db"
    if not database.exists():
        return []
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
        if not connection.execute("select 1 from sqlite_master where name = 'metrics'").fetchall():
            return []  # it is being made
        rows = connection.execute("select step, metrics from metrics order by id").fetchall()
    return [{"step": step, **metrics} for step, text in rows if "train/loss" in (metrics := json.loads(text))]


def _train(folder: Path, kill: bool) -> None:
    os.environ["TRACKIO_DIR"] = str(folder.parent / "trackio")
    config = small.config(
        run={"steps": 14, "folder": str(folder)},
        checkpoint={"every": "4 steps"},
        monitor={"every": 1, "progress": "none", "trackers": TRACKERS},
    )
    lockstep.train(config, objective=KilledAt(folder) if kill else small.CrossEntropy())


@pytest.mark.drill
def test_a_run_that_was_killed_and_resumed_is_one_curve(tmp_path: Path) -> None:
    for package in ("mlflow", "wandb", "trackio", "comet_ml"):
        pytest.importorskip(package, reason=f"{package} isn't installed")
    run = tmp_path / "run"
    for kill in (True, False):
        process = served().Process(target=_train, args=(run, kill))
        process.start()
        process.join(120)
        assert process.exitcode == (-signal.SIGKILL if kill else 0)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: pytest.approx(line["loss"]) for line in lines}
    assert list(losses) == list(range(1, 15))
    once, twice = [*range(1, 11), *range(9, 15)], [1] * 10 + [2] * 6

    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    points = [(point.step, point.value) for point in events.Scalars("train/loss")]
    assert dict(points) == {step: losses[step] for step, _ in points}
    assert len(dict(points)) == len(points), "what was rolled back is in earlier/1"

    _check_mlflow(run, losses, once)
    rows = _wandb(run)
    assert [row["step"] for row in rows] == once
    assert [row["run/attempt"] for row in rows] == twice
    assert {row["step"]: row["train/loss"] for row in rows} == losses
    rows = _trackio(run)
    assert [row["step"] for row in rows] == once
    assert [row["run/attempt"] for row in rows] == twice
    assert {row["step"]: row["train/loss"] for row in rows} == losses
    messages = _comet(run)
    metrics = [message["metric"] for message in messages if "metric" in message]
    curve = {part["step"]: part["metricValue"] for part in metrics if part["metricName"] == "train/loss"}
    assert curve == {step: losses[step] for step in range(9, 15)}, "a killed attempt leaves no archive"
    others = {message["key"]: message["value"] for message in messages if "key" in message}
    assert gives(others["attempt 2"], "step 8")
    assert others["checkpoint"].endswith("/checkpoints/step-00000014")


def _check_mlflow(run: Path, losses: dict[int, Any], steps: list[int]) -> None:
    import mlflow

    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    client = mlflow.MlflowClient(tracking_uri=(run / "trackers" / "mlflow").as_uri())
    (found,) = client.search_runs([client.get_experiment_by_name("lockstep").experiment_id])
    history = client.get_metric_history(found.info.run_id, "train/loss")
    assert [point.step for point in history] == steps
    assert {point.step: point.value for point in history} == losses
    assert found.info.status == "FINISHED"
    assert gives(found.data.tags["lockstep.attempt.2"], "step 8")
    assert found.data.tags["lockstep.checkpoint"].endswith("/checkpoints/step-00000014")
    assert found.data.params["run.steps"] == "14"


def _wandb(run: Path) -> list[dict[str, float]]:
    """The rows with a loss, of all attempts of the one run."""
    from wandb.proto import wandb_internal_pb2

    rows, identifiers = [], set()
    for file in sorted((run / "trackers" / "wandb").glob("offline-run-*/*.wandb")):
        for data in wandb_records(file.read_bytes()):
            record = wandb_internal_pb2.Record.FromString(data)
            if record.run.run_id:
                identifiers.add(record.run.run_id)
            row = {item.key or ".".join(item.nested_key): item.value_json for item in record.history.item}
            if "train/loss" in row:
                rows.append({name: float(row[name]) for name in ("step", "run/attempt", "train/loss")})
    assert len(identifiers) == 1
    return rows


def _comet(run: Path) -> list[dict[str, Any]]:
    """The messages of Comet's archives."""
    messages = []
    for file in sorted((run / "trackers" / "comet").glob("*.zip")):
        with zipfile.ZipFile(file) as archive:
            messages += [json.loads(line)["payload"] for line in archive.read("messages.json").splitlines()]
    return messages
