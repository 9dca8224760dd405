"""The report lists why ranks were started again and what it cost, and what was saved and left out."""

from __future__ import annotations

import json
from pathlib import Path

from kit.failures import gives
from kit.pages import make_run, page_of, resumed

from lockstep.report.facts import left_out


def _attempt(number: int, step: int, seconds: float) -> dict[str, object]:
    """An attempt of 4 s, of which 1 s is startup, 2 s after the one before."""
    start = 100.0 + 6 * number
    ended = start - 2 if number else None
    return {"launched": start, "began": start + 1, "ended_before": ended, "step": step, "seconds": seconds,
            "hosts": [["a", 1], ["b", 1]]}  # fmt: skip


def _end(number: int, text: str, kind: str = "killed") -> dict[str, object]:
    """How the attempt with this number ended."""
    ranks = [{"rank": 1, "host": "b", "kind": kind, "text": text, "time": 104.0 + 6 * number}]
    return {"attempt": "", "time": 104.1 + 6 * number, "kind": kind, "text": text, "step": None, "cause": 1,
            "ranks": ranks, "logs": {}, "environment": {}}  # fmt: skip


def test_each_restart_is_listed_with_its_cause_and_cost_also_without_an_update(tmp_path: Path) -> None:
    run = make_run(tmp_path, happenings={10: [resumed(10, 2)]})
    attempts = [_attempt(0, 0, 0.0), _attempt(1, 0, 0.0), _attempt(2, 10, 2.0), _attempt(3, 10, 2.0)]
    ends = [
        _end(0, "rank 1: out of memory in update 1. Set batch.micro_size to 4 (it is 8)."),
        _end(1, "stopped by SIGTERM", "paused"),
        _end(3, "", "done"),
    ]
    (run / "attempts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in attempts))
    (run / "logs" / "ends.jsonl").write_text("".join(json.dumps(line) + "\n" for line in ends))
    text = page_of(run).text
    assert "rank 1: out of memory in update 1 0 2 3.00 s 2.00 s 1.00 s" in text
    assert "stopped by SIGTERM 10 2 1.00 s 2.00 s 1.00 s" in text
    assert "No record: the launcher was killed, or its machine stopped 10 2 3.00 s 2.00 s 1.00 s" in text
    assert "started again 3 times, from step 0, 10, 10." in text
    assert "Restarts 3 " in text
    assert "over 4 attempts" in text


def test_the_state_that_was_saved_at_a_failure_counts_as_saved(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=17, finished=False)
    (run / "checkpoints" / "step-00000017").mkdir(parents=True)
    text = page_of(run).text
    assert gives(text, "save of step 17")
    assert "No save" not in text


def test_samples_that_are_left_out_for_one_reason_are_listed_together(tmp_path: Path) -> None:
    samples = dict.fromkeys(range(30), "bad numbers: update 11 had loss nan") | {99: "OSError: torn"}
    listed = ", ".join(map(str, range(20)))
    assert left_out(samples) == [
        f"Left out 31 samples of the training data: {listed} and 10 more: bad numbers: update 11 had loss nan; "
        "99: OSError: torn."
    ]
    many = {index: f"OSError: {index}" for index in range(25)}
    assert left_out(many)[0].endswith("19: OSError: 19; and 5 more.")
