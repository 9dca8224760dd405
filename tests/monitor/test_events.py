"""metrics.jsonl and events.jsonl: exact lines, valid JSON whatever the numbers, and a full disk."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.reports import FACTS, report

from lockstep.core.records import EvaluationReport, Verdict
from lockstep.monitor import jsonl
from lockstep.monitor.events import EventLog
from lockstep.monitor.metric_log import MetricLog, merge
from lockstep.monitor.monitors import EpochReport


def _lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line, parse_constant=_refuse) for line in path.read_text().splitlines()]


def _refuse(constant: str) -> object:
    raise AssertionError(f"{constant} is not JSON")


def test_a_line_every_n_steps_and_the_last(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "metrics.jsonl", every=10)
    log.start(FACTS)
    for step in range(1, 26):
        log.see(report(step))
    log.finish(None)
    lines = _lines(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 10, 20, 25]
    assert lines[2] == {
        "step": 20,
        "samples": 1280,
        "tokens": 327680,
        "epoch": 0,
        "loss": 1.05,
        "count": 100.0,
        "grad_norm": 0.5,
        "lr": 0.001,
        "kept": True,
        "verdict": "kept",
        "discarded": 0,
        "spike": None,
        "loss_scale": 1.0,
        "seconds": 2.0,
        "samples_per_second": pytest.approx(640),
        "tokens_per_second": pytest.approx(163840),
    }


def test_each_line_is_there_at_once(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "metrics.jsonl", every=1)
    for step in range(1, 4):
        log.see(report(step))
        assert len(_lines(tmp_path / "metrics.jsonl")) == step
    log.finish(None)


def test_losses_keep_all_their_digits(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "metrics.jsonl", every=1)
    log.see(report(1, loss=2.302585092994046))
    log.finish(None)
    assert '"loss": 2.302585092994046,' in (tmp_path / "metrics.jsonl").read_text()


def test_discarded_updates_are_written_whatever_their_step(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "metrics.jsonl", every=10)
    log.see(report(1))
    log.see(report(3, loss=math.nan, grad_norm=math.inf, verdict=Verdict.NON_FINITE, discarded=1))
    log.see(report(10))
    log.finish(None)
    first, bad, good = _lines(tmp_path / "metrics.jsonl")
    assert first["step"] == 1
    assert (bad["step"], bad["kept"], bad["verdict"], bad["loss"], bad["grad_norm"]) == (
        3,
        False,
        "non_finite",
        None,
        None,
    )
    assert bad["not_finite"] == {"loss": "nan", "grad_norm": "inf"}
    assert good["step"] == 10
    assert "not_finite" not in good


def test_evaluations_epochs_and_logged_values_have_lines_of_their_own(tmp_path: Path) -> None:
    metric_log = MetricLog()
    metric_log.mean("hits", 3, 4)
    metric_log.text("sample", "def \udc80")
    metric_log.histogram("logits", torch.tensor([1.0, 1.0, -2.0]))
    log = EventLog(tmp_path / "metrics.jsonl", every=10)
    log.evaluated(EvaluationReport("held-out", 10, {"loss": 2.0, "bits_per_byte": math.inf, "step": 5.0}, 99, 0.5))
    log.epoch(EpochReport(0, 12, 1.5, 768, 3.5, True))
    log.logged(20, merge([metric_log.drain()]))
    log.finish(None)
    evaluation, epoch, logged = _lines(tmp_path / "events.jsonl")
    assert evaluation == {
        "evaluation": "held-out",
        "step": 10,
        "samples": 99,
        "seconds": 0.5,
        "loss": 2.0,
        "bits_per_byte": None,
        "metric.step": 5.0,
        "not_finite": {"bits_per_byte": "inf"},
    }
    assert epoch == {"epoch_done": 0, "step": 12, "samples": 768, "loss": 1.5, "seconds": 3.5, "whole": True}
    assert logged["step"] == 20
    values = logged["logged"]
    assert isinstance(values, dict)
    assert (values["hits"], values["sample"], values["logits"]["count"]) == (0.75, "def \udc80", 3)


def test_rates_leave_out_evaluations(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "metrics.jsonl", every=10)
    log.see(report(1))
    log.see(report(10))
    log.evaluated(EvaluationReport("held-out", 10, {"loss": 2.0}, 99, 60.0))
    log.see(report(20, seconds=62.0))
    log.finish(None)
    assert _lines(tmp_path / "metrics.jsonl")[-1]["samples_per_second"] == pytest.approx(640)


def test_a_full_disk_costs_lines_not_the_training(caplog: pytest.LogCaptureFixture) -> None:
    log = EventLog(Path("/dev/full"), every=1)
    for step in range(1, 6):
        log.see(report(step))
    log.finish(None)
    assert sum(file.lost for file in log.files) == 5
    for file in log.files:
        file.close()
    assert [record.message for record in caplog.records] == [
        "can't write /dev/full: [Errno 28] No space left on device; the run continues without those lines",
        "/dev/full lacks 5 lines",
    ]


def test_a_file_that_can_not_be_opened_costs_lines(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    log = EventLog(tmp_path / "metrics.jsonl", every=1)
    log.see(report(1))
    log.finish(None)
    assert sum(file.lost for file in log.files) == 1


NEARLY_FULL = """
import resource, signal, sys
from pathlib import Path
from lockstep.monitor.jsonl import LineFile
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (25, resource.RLIM_INFINITY))
file = LineFile(Path(sys.argv[1]))
print([file.write(b'{"line": %d}\\n' % number) for number in (1, 2, 3)], file.lost)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(file.write(b'{"line": 4}\\n'), file.lost)
"""


def test_a_line_that_fits_in_part_is_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    done = subprocess.run(
        [sys.executable, "-c", NEARLY_FULL, str(path)], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "[True, True, False] 1\nTrue 1\n"
    assert path.read_text() == '{"line": 1}\n{"line": 2}\n{"line": 4}\n'


values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=3)
)


@given(st.dictionaries(st.text(), values, max_size=4))
def test_every_record_is_one_line_of_valid_json(record: dict[str, object]) -> None:
    text = jsonl.line(record)
    assert text.endswith(b"\n")
    assert text.count(b"\n") == 1
    read = json.loads(text, parse_constant=_refuse)
    not_finite = read.pop("not_finite", {}) if "not_finite" not in record else {}
    assert read == jsonl.finite(record)
    assert bool(not_finite) == (jsonl.finite(record) != record)
