"""Goodput over attempts, from fabricated files whose seconds are known."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

import lockstep.monitor.goodput
from lockstep.monitor.attempts import Attempt, Planned, attempts_text, by_host, read_attempts
from lockstep.monitor.goodput import goodput, step_reached

BEGIN = 1.79e9


def write(file: Path, *lines: dict[str, Any]) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def make_run(folder: Path) -> Path:
    """Three attempts: 100 s, of which 30 are lost; 50 s, all lost before its first save; 60 s to the end."""
    attempts = [
        Attempt(BEGIN, BEGIN + 10),
        Attempt(BEGIN + 130, BEGIN + 135, BEGIN + 110, 70, 70.0),
        Attempt(BEGIN + 200, BEGIN + 205, BEGIN + 185, 70, 70.0),
    ]
    (folder / "attempts.jsonl").write_text(attempts_text(attempts))
    write(folder / "metrics.jsonl", {"step": 120, "seconds": 130.0, "discarded": 12})
    write(
        folder / "events.jsonl",
        {"evaluation": "held-out", "step": 60, "seconds": 8.0},
        {"logged": {"seconds": 1e9}, "step": 61},
        {"saved": 70, "step": 70, "bytes": 1, "seconds": 5.0, "lost_seconds": 2.0},
    )
    write(folder / "ranks.jsonl", {"step": 120, "time": BEGIN + 265})
    (folder / "summary.json").write_text("{}")
    (folder / "logs").mkdir()
    (folder / "logs" / "ends.jsonl").write_text(json.dumps({"time": BEGIN + 270}) + "\n")
    return folder


def test_every_second_of_all_attempts_is_somewhere(tmp_path: Path) -> None:
    useful = goodput(make_run(tmp_path))
    assert useful is not None
    assert useful.wall == 270
    assert useful.attempts == 3
    assert useful.startup == 10 + 5 + 5
    assert useful.downtime == 20 + 15
    assert useful.lost == (100 - 70) + 50
    assert useful.evaluations == 8
    assert useful.saves == 2
    assert useful.discarded == pytest.approx((130 - 8 - 2) * 12 / 120)
    assert useful.trained == pytest.approx(130 - 8 - 2 - 12)
    assert useful.share == pytest.approx(108 / 270)
    losses = useful.losses()
    assert losses["other"] == pytest.approx(5)  # after the last update
    assert useful.trained + sum(losses.values()) == pytest.approx(useful.wall)
    assert list(losses)[:2] == ["updates lost with an attempt", "downtime between attempts"]


def test_what_a_run_that_was_killed_has_not_saved_is_lost(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    (run / "summary.json").unlink()
    (run / "logs" / "ends.jsonl").unlink()
    useful = goodput(run)
    assert useful is not None
    assert useful.wall == 265, "the last sign of life"
    assert useful.lost == (100 - 70) + 50 + (130 - 70), "what follows the checkpoint that it resumed from"
    lines = [{"step": step, "seconds": step + 10.0} for step in range(1, 1201)]
    write(run / "metrics.jsonl", *({**line, "discarded": 0} for line in lines))
    with (run / "events.jsonl").open("a") as events:
        events.write('{"saved": 1100, "step": 1100}\n{"saved": 1150, "step": 1150, "failure": "full"}\n')
    useful = goodput(run)
    assert useful is not None
    assert useful.trained == pytest.approx(1110 - 8 - 2, abs=2)
    (run / "checkpoints" / "step-00000120").mkdir(parents=True)
    (run / "checkpoints" / "step-00001160.draft").mkdir()
    useful = goodput(run)
    assert useful is not None
    assert useful.trained == pytest.approx(1110 - 8 - 2, abs=2)
    (run / "checkpoints" / "step-00001170").mkdir()
    useful = goodput(run)
    assert useful is not None
    assert useful.trained == pytest.approx(1180 - 8 - 2, abs=2)
    (run / "summary.json").write_text("{}")
    useful = goodput(run)
    assert useful is not None
    assert useful.trained == pytest.approx(1210 - 8 - 2)


def test_the_step_reached_is_that_of_the_newest_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the folder has checkpoints, its events, which may be long, aren't read for it."""
    run = make_run(tmp_path)
    (run / "summary.json").unlink()
    with (run / "events.jsonl").open("a") as events:
        events.write('{"saved": 1300, "step": 1300}\n')
    assert step_reached(run) == 1300, "of a run whose checkpoints are elsewhere"
    (run / "checkpoints" / "step-00001400").mkdir(parents=True)
    monkeypatch.setattr(lockstep.monitor.goodput, "_events", None)
    assert step_reached(run) == 1400


def test_what_follows_the_last_update_is_not_taken_from_its_clock(tmp_path: Path) -> None:
    before = goodput(make_run(tmp_path))
    with (tmp_path / "events.jsonl").open("a") as events:
        events.write('{"evaluation": "held-out", "step": 120, "seconds": 4.0}\n')
    after = goodput(tmp_path)
    assert before is not None
    assert after is not None
    assert after.trained == before.trained
    assert after.evaluations == before.evaluations + 4
    assert after.losses()["other"] == pytest.approx(before.losses()["other"] - 4)


def test_what_is_missing_or_damaged_is_unknown(tmp_path: Path) -> None:
    assert goodput(tmp_path) is None
    make_run(tmp_path)
    (tmp_path / "events.jsonl").write_text('{"evaluation": "a", "seconds": "x"}\n{"saved"\n')
    useful = goodput(tmp_path)
    assert useful is not None
    assert (useful.evaluations, useful.saves) == (0, 0)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    assert goodput(tmp_path) is None
    (tmp_path / "attempts.jsonl").write_text('[]\n{"attempt": 1}\n{"launched": "x"}\n')
    assert read_attempts(tmp_path) == ()


def test_an_attempt_is_read_as_it_was_written(tmp_path: Path) -> None:
    hosts = by_host(["a", "a", "b", "b", "a"])
    assert hosts == (("a", 2), ("b", 2), ("a", 1))
    facts = {"ranks": 5, "flops_per_token": 6e9, "peak_flops": 1e15}
    written = Attempt(BEGIN, BEGIN + 1, math.nan, 3, 2.5, hosts, facts, Planned(1, 2, 3, 0.25))
    (tmp_path / "attempts.jsonl").write_text(attempts_text([written]))
    (attempt,) = read_attempts(tmp_path)
    assert attempt.hosts == hosts
    assert (attempt.planned, attempt.planned.held) == (written.planned, 6)
    assert attempt.utilization(2e5) == pytest.approx(0.24)
    assert math.isnan(attempt.ended_before)


@pytest.mark.parametrize("value", [10**400, True, "1", None, [1]], ids=["huge", "bool", "text", "null", "list"])
def test_a_number_that_no_run_writes_is_unknown(tmp_path: Path, value: object) -> None:
    run = make_run(tmp_path)
    assert Attempt(BEGIN, BEGIN, facts={"peak_flops": value}).number("peak_flops") is None
    write(run / "ranks.jsonl", {"step": 120, "time": value})
    write(run / "events.jsonl", {"evaluation": "held-out", "step": 60, "seconds": value})
    for name in ("metrics.jsonl", "events.jsonl"):  # whose times count where the meters have none
        os.utime(run / name, (BEGIN + 265, BEGIN + 265))
    useful = goodput(run)
    assert useful is not None
    assert (useful.wall, useful.evaluations) == (270, 0)
    write(run / "metrics.jsonl", {"step": value, "seconds": value, "discarded": value})
    assert goodput(run) is None
