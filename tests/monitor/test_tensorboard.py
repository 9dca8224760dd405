"""Event files, read back with TensorBoard's own reader, which checks every checksum."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kit.reports import FACTS, report
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lockstep.core.records import EvaluationReport, Verdict
from lockstep.core.tracking import TrackedRun
from lockstep.monitor.metric_log import MetricLog, merge
from lockstep.monitor.monitors import EpochReport
from lockstep.monitor.tensorboard import TensorBoard
from lockstep.monitor.trackers import TrackerMonitor


def _board(folder: Path, every: int) -> TrackerMonitor:
    run = TrackedRun("4711", "stdlib-lm", str(folder), {}, {})
    return TrackerMonitor(TensorBoard(folder), "tensorboard", run, str, every, seconds=0.1)


def _read(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0, "tensors": 0})
    events.Reload()
    return events


def _scalars(events: EventAccumulator, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_scalars_of_the_scheduled_steps(tmp_path: Path) -> None:
    board = _board(tmp_path, every=10)
    board.start(replace(FACTS, peak_flops=1e12, flops_per_token=1e6))
    for step in range(1, 26):
        board.see(report(step))
    board.finish(None)
    events = _read(tmp_path)
    assert _scalars(events, "train/loss") == [
        (1, pytest.approx(2.0)),
        (10, pytest.approx(1.1)),
        (20, pytest.approx(1.05)),
        (25, pytest.approx(1.04)),
    ]
    assert _scalars(events, "train/lr")[0] == (1, pytest.approx(0.001))
    assert dict(_scalars(events, "speed/tokens_per_second"))[20] == pytest.approx(163840)
    assert dict(_scalars(events, "speed/mfu"))[20] == pytest.approx(163840 * 1e6 / 2e12)
    assert events.file_version == 2.0


def test_steps_that_a_resumed_run_repeats_are_dropped(tmp_path: Path) -> None:
    for steps, loss, resumed in ((range(1, 6), 2.0, None), (range(4, 7), 1.0, 3)):
        board = _board(tmp_path, every=1)
        board.start(replace(FACTS, resumed_from=resumed))
        for step in steps:
            board.see(report(step, seconds=float(step), loss=loss))
        board.finish(None)
    assert _scalars(_read(tmp_path), "train/loss") == [
        *((step, 2.0) for step in (1, 2, 3)),
        (4, 1.0),
        (5, 1.0),
        (6, 1.0),
    ]


def test_at_most_ten_points_a_second_but_every_discarded_update(tmp_path: Path) -> None:
    board = _board(tmp_path, every=1)
    for step in range(1, 1001):
        verdict = Verdict.NON_FINITE if step == 555 else Verdict.KEPT
        board.see(report(step, seconds=step / 1000, loss=math.nan if step == 555 else 1.0, verdict=verdict))
    board.finish(None)
    points = _scalars(_read(tmp_path), "train/loss")
    assert 10 <= len(points) <= 13
    assert math.isnan(dict(points)[555])
    assert points[-1][0] == 1000


def test_evaluations_epochs_histograms_and_texts(tmp_path: Path) -> None:
    metric_log = MetricLog()
    metric_log.scalar("mine", 3.0)
    metric_log.histogram("weights", torch.tensor([-1.0, 0.5, 0.5, 2.0]))
    metric_log.text("sample", "def f(): …")
    board = _board(tmp_path, every=10)
    board.evaluated(EvaluationReport("held-out", 10, {"bits_per_byte": 2.5}, 99, 0.5))
    board.epoch(EpochReport(0, 12, 1.5, 768, 3.5, True))
    board.logged(20, merge([metric_log.drain()]))
    board.finish(None)
    events = _read(tmp_path)
    assert _scalars(events, "evaluation/held-out/bits_per_byte") == [(10, 2.5)]
    assert _scalars(events, "epoch/loss") == [(12, 1.5)]
    assert _scalars(events, "mine") == [(20, 3.0)]
    (histogram,) = events.Histograms("weights")
    value = histogram.histogram_value
    assert (histogram.step, value.min, value.max, value.num) == (20, -1.0, 2.0, 4)
    assert sum(value.bucket) == 4
    assert list(value.bucket_limit) == sorted(value.bucket_limit)
    (text,) = events.Tensors("sample")
    assert text.tensor_proto.string_val[0].decode() == "def f(): …"
    assert events.SummaryMetadata("sample").plugin_data.plugin_name == "text"


def test_an_empty_histogram_is_readable(tmp_path: Path) -> None:
    metric_log = MetricLog()
    metric_log.histogram("weights", torch.tensor([math.nan]))
    board = _board(tmp_path, every=10)
    board.logged(20, merge([metric_log.drain()]))
    board.finish(None)
    (histogram,) = _read(tmp_path).Histograms("weights")
    assert histogram.histogram_value.num == 0


def test_importing_and_starting_imports_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; import lockstep.monitor.tensorboard as t, lockstep.monitor.console\n"
        f"t.TensorBoard(Path({str(tmp_path)!r})); lockstep.monitor.console.Console(10, 'plain')\n"
        "print([name for name in ('torch', 'numpy', 'rich', 'tensorboard', 'google.protobuf') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"
