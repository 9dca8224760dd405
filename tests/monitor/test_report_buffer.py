"""The buffer of reports: lines that a killed rank had not yet written are added."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from kit.reports import report

from lockstep.core.errors import RunFailed
from lockstep.core.media import LoggedTable
from lockstep.core.records import EvaluationReport
from lockstep.monitor import report_buffer
from lockstep.monitor.events import EventLog
from lockstep.monitor.folder import RunFolder
from lockstep.monitor.histogram import HistogramCounts
from lockstep.monitor.jsonl import LineFile
from lockstep.monitor.metric_log import Logged
from lockstep.monitor.report_buffer import ReportBuffer
from lockstep.training import resumed_history


def killed_at(tmp_path: Path, step: int, written: int, every: int = 1) -> tuple[Path, Path]:
    """The folder of a run whose first rank has shown `step` reports and written some of them; and its buffer's."""
    run, memory = tmp_path / "run", tmp_path / "memory"
    memory.mkdir(parents=True)
    log, kept = EventLog(run / "metrics.jsonl", every), ReportBuffer(memory)
    for number in range(1, step + 1):
        reports = [log, kept] if number <= written else [kept]
        for target in reports:
            target.see(report(number, loss=float("nan") if number == 4 else 1 / number))
            target.evaluated(EvaluationReport("held-out", number, {"loss": 2.5}, 8, 0.125))
            target.logged(number, Logged(values={"accuracy": 0.5}, texts={"sample": "ö"}))
    return run, memory


def lines(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize("written", [0, 3, 6])
def test_missing_lines_are_added_up_to_the_step(tmp_path: Path, written: int) -> None:
    run, memory = killed_at(tmp_path / "killed", 8, written)
    expected, _ = killed_at(tmp_path / "whole", 6, 6)
    report_buffer.mend(run, memory, 6, 1)
    report_buffer.mend(run, memory, 6, 1)
    rates = ("samples_per_second", "tokens_per_second", "seconds")
    for name in ("metrics.jsonl", "events.jsonl"):
        rows, wanted = (
            [{key: value for key, value in line.items() if key not in rates} for line in lines(folder / name)]
            for folder in (run, expected)
        )
        assert rows == wanted


def test_what_was_logged_beside_a_table_and_a_histogram_is_not_added_again(tmp_path: Path) -> None:
    run, memory = killed_at(tmp_path, 1, 1)
    log, kept = EventLog(run / "metrics.jsonl", 1), ReportBuffer(memory)
    histogram = HistogramCounts.of(torch.ones(3)).read()
    table = LoggedTable(("text",), (("a",),))
    for step in (2, 3):
        for target in (log, kept) if step == 2 else (kept,):
            target.see(report(step))
            target.logged(step, Logged({"accuracy": 0.5}, {"logits": histogram}, {"sample": "a"}, {"errors": table}))
    written = (run / "events.jsonl").read_bytes()
    report_buffer.mend(run, memory, 3, 1)
    added = (run / "events.jsonl").read_bytes().removeprefix(written)
    assert json.loads(added) == {"logged": {"accuracy": 0.5, "sample": "a"}, "step": 3}


def test_lines_of_another_program_change_nothing(tmp_path: Path) -> None:
    run, memory = killed_at(tmp_path, 4, 2)
    foreign = '{"note": 1}\n[3]\n{"step": "x"}\nnull\nhand-written\n{"evaluation": {}, "step": []}\n{"logged": 7}\n'
    for name in ("metrics.jsonl", "events.jsonl"):
        with (run / name).open("a") as file:
            file.write(foreign)
    report_buffer.mend(run, memory, 4, 1)
    text = (run / "metrics.jsonl").read_text().replace(foreign, "")
    assert [json.loads(line)["step"] for line in text.splitlines()] == [1, 2, 3, 4]
    assert (run / "events.jsonl").read_text().count('"evaluation": "held-out"') == 4


def test_only_the_lines_that_are_due(tmp_path: Path) -> None:
    run, memory = killed_at(tmp_path, 25, 0, every=10)
    report_buffer.mend(run, memory, 25, 10)
    assert [line["step"] for line in lines(run / "metrics.jsonl")] == [1, 10, 20]


def test_the_report_that_comes_with_the_state(tmp_path: Path) -> None:
    """The first rank failed in update 6, which another one had finished."""
    run, memory = killed_at(tmp_path, 5, 4)
    last = report_buffer.entry_of(report(6, loss=0.5))
    for folder in (memory, None):
        report_buffer.mend(run, folder, 6, 1, [last])
        assert [line["step"] for line in lines(run / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    assert lines(run / "metrics.jsonl")[-1]["loss"] == 0.5


def test_the_evaluation_that_comes_with_the_state(tmp_path: Path) -> None:
    """The first rank may have failed before it could write it; another one needed other seconds for it."""
    run, memory = killed_at(tmp_path, 5, 5)
    last = [
        report_buffer.entry_of_evaluation(EvaluationReport("held-out", step, {"loss": 2.5}, 8, 7.0)) for step in (5, 6)
    ]
    for folder in (memory, None):
        report_buffer.mend(run, folder, 6, 1, last)
        evaluations = [line for line in lines(run / "events.jsonl") if "evaluation" in line]
        assert [(line["step"], line["seconds"]) for line in evaluations][-2:] == [(5, 0.125), (6, 7.0)]
        assert len(evaluations) == 6


def test_a_torn_line_is_left_out(tmp_path: Path) -> None:
    run, memory = killed_at(tmp_path, 3, 0)
    with (memory / "reports.jsonl").open("a") as file:
        file.write('{"see": [4, 25')
    report_buffer.mend(run, memory, 9, 1)
    assert [line["step"] for line in lines(run / "metrics.jsonl")] == [1, 2, 3]


def test_a_line_that_is_torn_in_the_files_is_replaced(tmp_path: Path) -> None:
    run, memory = killed_at(tmp_path / "killed", 6, 6)
    expected, _ = killed_at(tmp_path / "whole", 6, 6)
    for name in ("metrics.jsonl", "events.jsonl"):
        (run / name).write_bytes((run / name).read_bytes()[:-9])
    report_buffer.mend(run, memory, 6, 1)
    for name in ("metrics.jsonl", "events.jsonl"):
        assert [line["step"] for line in lines(run / name)] == [line["step"] for line in lines(expected / name)]


def test_lines_that_a_full_disk_does_not_take_stay_in_the_buffer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, memory = killed_at(tmp_path, 6, 3)
    before = {name: (run / name).read_bytes() for name in ("metrics.jsonl", "events.jsonl")}
    write = LineFile._write

    def full(file: LineFile, text: bytes) -> None:
        if file.path.parent == run:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(file, text)

    checkpoints = SimpleNamespace(resumed_environment={}, evaluations=SimpleNamespace(comes_first=False))
    with monkeypatch.context() as patch:
        patch.setattr(LineFile, "_write", full)
        with pytest.raises(RunFailed, match=r"can't add to the history in .*: No space left on device"):
            resumed_history.rewind(RunFolder(run), 6, cast("Any", checkpoints), memory, 1)
    assert {name: (run / name).read_bytes() for name in before} == before
    resumed_history.rewind(RunFolder(run), 6, cast("Any", checkpoints), memory, 1)
    assert [line["step"] for line in lines(run / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]


def test_lines_are_added_although_memory_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, memory = killed_at(tmp_path, 6, 3)
    write = LineFile._write

    def full(file: LineFile, text: bytes) -> None:
        if memory in file.path.parents:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(file, text)

    monkeypatch.setattr(LineFile, "_write", full)
    report_buffer.mend(run, memory, 6, 1)
    assert [line["step"] for line in lines(run / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]


def test_two_files_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_buffer, "_MOST_BYTES", 3000)
    run, memory = killed_at(tmp_path, 40, 30)
    report_buffer.mend(run, memory, 40, 1)
    assert [line["step"] for line in lines(run / "metrics.jsonl")][-4:] == [37, 38, 39, 40]
    report_buffer.clear(memory)
    assert not any(memory.iterdir())
