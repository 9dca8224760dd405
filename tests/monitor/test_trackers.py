"""Trackers: what each records, read back by its own reader; one that fails or hangs leaves the run alone."""

from __future__ import annotations

import contextlib
import io
import json
import os
import struct
import threading
import time
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kit.reports import FACTS, report
from kit.worlds import in_process
from PIL import Image as Pillow

from lockstep.core.errors import ConfigError, RunFailed
from lockstep.core.extensions import import_target
from lockstep.core.media import LoggedImage, LoggedTable
from lockstep.core.records import EvaluationReport, RestartReport, SaveReport
from lockstep.core.tracking import TrackedRun, Tracker, refuse_unknown
from lockstep.monitor.histogram import Histogram
from lockstep.monitor.metric_log import Logged
from lockstep.monitor.monitors import BackgroundWriter, Monitors
from lockstep.monitor.trackers import TrackerMonitor

MEDIA = ("picture", "errors", "weights", "sample")
PIXELS = bytes(range(2 * 3 * 3))
LOGGED = Logged(
    {"hits": 0.5},
    {"weights": Histogram({200: 3, 210: 1}, 0.1, 2.0, 3.0)},
    {"sample": "def f"},
    {"picture": LoggedImage(3, 2, 3, PIXELS), "errors": LoggedTable(("text", "label"), (("a", 1), (None, 2.5)))},
)


def run_twice(tracker: object, folder: Path) -> None:
    """Record a run that fails after step 12 and resumes from step 8; `tracker` makes one for each attempt."""
    run = TrackedRun("0123456789abcdef" * 2, "digits", str(folder), {"optim": {"lr": 0.1}}, {"python": "3"})
    for attempt, steps in ((1, range(1, 13)), (2, range(9, 17))):
        monitor = TrackerMonitor(tracker(), "it", run, lambda step: f"/checkpoints/{step}", every=4)  # type: ignore[operator]
        monitors = Monitors([BackgroundWriter(monitor, end_seconds=60.0)], every=4)
        monitors.start(replace(FACTS, resumed_from=8 if attempt == 2 else None))
        if attempt == 2:
            monitors.restarted(RestartReport(2, 8, 64 * 8))
        for step in steps:
            monitors.see(report(step, loss=float(attempt) + step))
            if step == 8:
                monitors.saved(SaveReport(8, 100, 0.1, 0.0))
        monitors.evaluated(EvaluationReport("held-out", steps[-1], {"loss": 0.25}, 10, 0.1))
        monitors.logged(steps[-1], LOGGED)
        monitors.finish(RunFailed("the disk is full") if attempt == 1 else None)


class Recorder(Tracker):
    calls: list[tuple[object, ...]]

    def __init__(self, calls: list[tuple[object, ...]]) -> None:
        self.calls = calls

    def start(self, run: TrackedRun) -> str:
        self.calls.append(("start", run.tracker_id, run.resumed_from))
        return run.tracker_id or "mine-1"

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self.calls.append(("scalars", step, *sorted(values)[:1]))

    def checkpoint(self, step: int, reference: str) -> None:
        self.calls.append(("checkpoint", step, reference))

    def rolled_back(self, step: int, attempt: int) -> None:
        self.calls.append(("rolled back", step, attempt))

    def finish(self, failure: str | None) -> None:
        self.calls.append(("finish", failure))


def test_a_resumed_run_continues_the_record_and_marks_what_is_repeated(tmp_path: Path) -> None:
    calls: list[tuple[object, ...]] = []
    run_twice(lambda: Recorder(calls), tmp_path / "trackers")
    starts = [call for call in calls if call[0] in ("start", "rolled back", "finish", "checkpoint")]
    assert starts == [
        ("start", None, None),
        ("checkpoint", 8, "/checkpoints/8"),
        ("finish", "RunFailed: the disk is full"),
        ("start", "mine-1", 8),
        ("rolled back", 8, 2),
        ("finish", None),
    ]
    points = [call[1] for call in calls if call[0] == "scalars" and call[2] == "speed/samples_per_second"]
    assert points == [1, 4, 8, 12, 12, 16]
    assert json.loads((tmp_path / "trackers" / "it.json").read_text()) == {"run": "mine-1"}


def test_an_argument_that_a_tracker_does_not_have_is_refused_with_the_nearest() -> None:
    def init(project: str = "", entity: str = "") -> None: ...

    refuse_unknown("wandb.init", ["project", "entity"], init)
    refuse_unknown("trackio.init", ["anything"], lambda **options: None)
    with pytest.raises(ConfigError, match=r"wandb.init has no argument entry; did you mean entity\?"):
        refuse_unknown("wandb.init", ["project", "entry"], init)


def test_a_tracker_that_hangs_or_fails_does_not_stop_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    released = threading.Event()

    class Hangs(Recorder):
        def scalars(self, step: int, values: Mapping[str, float]) -> None:
            released.wait(30)

    class Fails(Recorder):
        def start(self, run: TrackedRun) -> str:
            raise ConnectionError("no route to host")

    run = TrackedRun("id", "digits", str(tmp_path), {}, {})
    monitors = Monitors(
        [
            BackgroundWriter(TrackerMonitor(tracker, name, run, str, 1), 0.1, name=f"tracker {name}")
            for name, tracker in (("hangs", Hangs([])), ("fails", Fails([])))
        ]
    )
    began = time.perf_counter()
    monitors.start(FACTS)
    for step in range(1, 1001):
        monitors.see(report(step))
    assert time.perf_counter() - began < 1.0
    monitors.finish(None)
    assert time.perf_counter() - began < 2.0
    released.set()
    messages = sorted(record.message for record in caplog.records)
    assert messages == [
        "tracker fails failed and is left out from now on: no route to host",
        "tracker hangs has not ended within 0.1 s: its last reports are lost",
    ]


def test_mlflow_reads_one_run_with_both_attempts(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow-skinny isn't installed")
    from lockstep.monitor.mlflow_tracker import MlflowTracker

    run_twice(MlflowTracker, tmp_path / "trackers")
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "trackers" / "mlflow").as_uri())
    experiment = client.get_experiment_by_name("lockstep")
    (run,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(point.step, point.value) for point in history] == [
        (1, 2.0), (4, 5.0), (8, 9.0), (12, 13.0), (12, 14.0), (16, 18.0)
    ]  # fmt: skip
    assert {point.step: point.value for point in history}[12] == 14.0, "the repeated update counts"
    assert run.info.status == "FINISHED"
    assert run.data.params["optim.lr"] == "0.1"
    assert run.data.metrics["hits"] == 0.5
    assert run.data.metrics["evaluation/held-out/loss"] == 0.25
    assert run.data.tags["lockstep.checkpoint"] == "/checkpoints/8"
    assert run.data.tags["lockstep.attempt.2"] == "repeats what follows step 8"
    files = {file.path for file in client.list_artifacts(run.info.run_id, "histograms/weights")}
    assert files == {"histograms/weights/00000012.json", "histograms/weights/00000016.json"}
    artifacts = Path(client.download_artifacts(run.info.run_id, "", str(tmp_path)))
    picture = Pillow.open(artifacts / "images" / "picture" / "00000016.png")
    assert (picture.size, picture.tobytes()) == ((3, 2), PIXELS)
    table = json.loads((artifacts / "tables" / "errors" / "00000016.json").read_text())
    assert table == {"columns": ["text", "label"], "data": [["a", 1], [None, 2.5]]}
    assert (artifacts / "texts" / "sample" / "00000016.txt").read_text() == "def f"
    assert json.loads((artifacts / "environment.json").read_text()) == {"python": "3"}


def wandb_records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a .wandb file: after a head of 7 bytes, LevelDB's log format (blocks of 32 KiB)."""
    assert data[:4] == b":W&B"
    at, record = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or its last part
            yield record
            record = b""


def test_wandb_without_a_network_writes_one_run(tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb", reason="wandb isn't installed")
    from wandb.proto import wandb_internal_pb2

    from lockstep.monitor.wandb_tracker import WandbTracker

    folder = tmp_path / "trackers"
    run_twice(lambda: WandbTracker(mode="offline"), folder)
    wandb.teardown()  # the files are complete once W&B's own process has ended, as at the end of this one
    files = sorted((folder / "wandb").glob("offline-run-*/*.wandb"), key=lambda file: file.stat().st_mtime)
    identifiers, losses, config, media = set(), [], {}, {}
    for file in files:
        for data in wandb_records(file.read_bytes()):
            record = wandb_internal_pb2.Record.FromString(data)
            if record.run.run_id:
                identifiers.add(record.run.run_id)
                config |= {item.key: item.value_json for item in record.run.config.update}
            row = {item.key or ".".join(item.nested_key): item.value_json for item in record.history.item}
            media |= {name: json.loads(value) for name, value in row.items() if name.partition(".")[0] in MEDIA}
            if "train/loss" in row:
                losses.append(tuple(float(row[name]) for name in ("step", "train/loss", "run/attempt")))
    assert len(files) == 2
    assert identifiers == {"0123456789abcdef" * 2}, "wandb sync makes one run of both"
    assert losses == [(1, 2, 1), (4, 5, 1), (8, 9, 1), (12, 13, 1), (12, 14, 2), (16, 18, 2)]
    assert json.loads(config["optim"]) == {"lr": 0.1}
    assert json.loads(config["environment"]) == {"python": "3"}
    kinds = {name: media[f"{name}._type"] for name in MEDIA}
    assert kinds == {"picture": "image-file", "errors": "table-file", "weights": "histogram", "sample": "table-file"}
    picture = Pillow.open(next((files[1].parent / "files").glob("media/images/picture*.png")))
    assert (picture.size, picture.tobytes()) == ((3, 2), PIXELS)
    table = json.loads(next((files[1].parent / "files").glob("media/table/errors*.json")).read_text())
    assert (table["columns"], table["data"]) == (["text", "label"], [["a", 1], [None, 2.5]])
    assert sum(media["weights.values"]) == 4


def _recorded_by_trackio(folder: Path) -> dict[str, Any]:
    os.environ["TRACKIO_DIR"] = str(folder / "trackio")  # read when trackio is imported
    from lockstep.monitor.trackio_tracker import TrackioTracker

    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        run_twice(TrackioTracker, folder / "trackers")
    import trackio

    (run,) = trackio.Api().runs("lockstep")
    rows = trackio.SQLiteStorage.get_logs("lockstep", run.name)
    return {"name": run.name, "config": run.config, "rows": rows, "printed": output.getvalue()}


def test_trackio_reads_one_run_with_both_attempts(tmp_path: Path) -> None:
    pytest.importorskip("trackio", reason="trackio isn't installed")
    recorded = in_process(_recorded_by_trackio, tmp_path)
    rows = recorded["rows"]
    assert recorded["name"] == "digits-01234567"
    assert recorded["config"]["optim"] == {"lr": 0.1}
    assert recorded["config"]["environment"] == {"python": "3"}
    assert recorded["printed"] == "", "standard output is the run's"
    points = [(row["step"], row["train/loss"], row["run/attempt"]) for row in rows if "train/loss" in row]
    assert points == [(1, 2, 1), (4, 5, 1), (8, 9, 1), (12, 13, 1), (12, 14, 2), (16, 18, 2)]
    last: dict[str, Any] = {}
    for row in rows:
        last |= row
    assert last["run/resumed_from"] == 8
    assert last["checkpoint"] == "/checkpoints/8"
    assert sum(last["weights"]["values"]) == 4
    assert last["sample"] == {"_type": "trackio.markdown", "_value": "def f"}
    assert last["errors"]["_value"] == [{"text": "a", "label": 1}, {"text": None, "label": 2.5}]
    picture = Pillow.open(tmp_path / "trackio" / "media" / last["picture"]["file_path"])
    assert (picture.size, picture.tobytes()) == ((3, 2), PIXELS)


COMET = Path(__file__).parents[2] / "examples" / "comet_tracker.py"


def test_comet_without_a_network_writes_one_experiment(tmp_path: Path) -> None:
    pytest.importorskip("comet_ml", reason="comet_ml isn't installed")
    in_process(_recorded_by_comet, tmp_path / "trackers")
    experiments, losses, others, uploads, parameters = set(), [], {}, [], {}
    for file in sorted((tmp_path / "trackers" / "comet").glob("*.zip"), key=lambda file: file.stat().st_mtime):
        with zipfile.ZipFile(file) as archive:
            experiments.add(json.loads(archive.read("experiment.json"))["offline_id"])
            messages = [json.loads(line)["payload"] for line in archive.read("messages.json").splitlines()]
        metrics = [message["metric"] for message in messages if "metric" in message]
        losses += [(part["step"], part["metricValue"]) for part in metrics if part["metricName"] == "train/loss"]
        others |= {message["key"]: message["value"] for message in messages if "key" in message}
        uploads += [message["upload_type"] for message in messages if "upload_type" in message]
        params = [message["param"] for message in messages if "param" in message]
        parameters |= {part["paramName"]: part["paramValue"] for part in params}
    assert len(experiments) == 1
    assert losses == [(1, 2), (4, 5), (8, 9), (12, 13), (12, 14), (16, 18)]
    assert others["attempt 2"] == "repeats what follows step 8"
    assert (others["checkpoint"], others["environment.python"], others["failure"]) == ("/checkpoints/8", "3", "none")
    assert set(uploads) == {"asset", "histogram3d", "text-sample", "visualization"}
    assert parameters["optim|lr"] == 0.1


def _recorded_by_comet(folder: Path) -> None:
    run_twice(import_target(f"{COMET}:Comet"), folder)


AIM = Path(__file__).parents[2] / "examples" / "aim_tracker.py"


def test_aim_reads_one_run_whose_repeated_steps_are_the_later_ones(tmp_path: Path) -> None:
    pytest.importorskip("aim", reason="aim isn't installed")
    recorded = in_process(_recorded_by_aim, tmp_path / "trackers")
    assert recorded["losses"] == [(1, 2), (4, 5), (8, 9), (12, 14), (16, 18)]
    assert recorded["values"]["config"]["optim"]["lr"] == 0.1
    assert recorded["values"]["environment"]["python"] == "3"
    assert recorded["values"]["attempt 2"] == "repeats what follows step 8"
    assert (recorded["values"]["checkpoint"], recorded["values"]["failure"]) == ("/checkpoints/8", "none")
    assert recorded["texts"] == {"sample": "def f", "errors": "| text | label |\n| --- | --- |\n| a | 1 |\n|  | 2.5 |"}
    assert recorded["picture"] == ((3, 2), PIXELS)
    assert recorded["counts"] == 4


def _recorded_by_aim(folder: Path) -> dict[str, Any]:
    import aim
    from aim.storage.context import Context

    run_twice(import_target(f"{AIM}:Aim"), folder)
    (run,) = aim.Repo.from_path(str(folder / "aim")).iter_runs()
    empty = Context({})
    steps, (values, *_) = run.get_metric("train/loss", empty).data.items_list()
    picture = run.get_image_sequence("picture", empty).values.last_value().to_pil_image()
    return {
        "losses": list(zip(steps, values, strict=True)),
        "values": run[...],
        "texts": {name: run.get_text_sequence(name, empty).values.last_value().data for name in ("sample", "errors")},
        "picture": (picture.size, picture.tobytes()),
        "counts": run.get_distribution_sequence("weights", empty).values.last_value().weights.sum(),
    }
