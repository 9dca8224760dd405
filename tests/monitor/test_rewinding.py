"""A run's history is rewound to the step that it resumes from."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.monitor import history


@given(
    steps=st.lists(st.integers(0, 400), max_size=60).map(sorted),
    swapped=st.sets(st.integers(0, 58), max_size=4),
    step=st.integers(0, 400),
    is_torn=st.booleans(),
)
def test_the_lines_after_a_step_are_moved(steps: list[int], swapped: set[int], step: int, is_torn: bool) -> None:
    entries = [*enumerate(steps)]
    for place in swapped:
        if place + 1 < len(entries) and entries[place + 1][1] - entries[place][1] < 50:  # late, but not that late
            entries[place], entries[place + 1] = entries[place + 1], entries[place]
    lines = [json.dumps({"step": each, "number": number}).encode() + b"\n" for number, each in entries]
    torn = [b'{"step": 1'] if is_torn else []
    stays = [line for line, (_, each) in zip(lines, entries, strict=True) if each <= step]
    with tempfile.TemporaryDirectory() as folder:
        run, archive = Path(folder), Path(folder) / "earlier" / "1"
        (run / "metrics.jsonl").write_bytes(b"".join(lines + torn))
        history.rewind(run, step, archive)
        assert (run / "metrics.jsonl").read_bytes() == b"".join(stays)
        moved = archive / "metrics.jsonl"
        removed = [line for line in lines if line not in stays] + torn
        assert (moved.read_bytes() if moved.exists() else b"") == b"".join(removed)


def test_only_the_end_of_a_long_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ranks.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in range(50_000)))
    read, parsed = list[bytes](), history.parsed
    monkeypatch.setattr(history, "parsed", lambda line: (read.append(line), parsed(line))[1])
    history.rewind(tmp_path, 49_990, tmp_path / "earlier")
    assert (tmp_path / "ranks.jsonl").read_text().endswith('{"step": 49990}\n')
    assert len(read) < 200


def test_evaluations_that_are_repeated_are_moved(tmp_path: Path) -> None:
    lines = [
        b'{"evaluation": "held-out", "step": 3, "loss": 2.0}\n',
        b'{"saved": 3, "step": 3}\n',
        b'{"evaluation": "held-out", "step": 6, "loss": 1.0}\n',
        b'{"logged": {"a": 1}, "step": 6}\n',
    ]
    (tmp_path / "events.jsonl").write_bytes(b"".join(lines))
    for _ in range(2):
        history.rewind(tmp_path, 6, tmp_path / "earlier" / "1", repeats_evaluations=True)
        assert (tmp_path / "events.jsonl").read_bytes() == b"".join([*lines[:2], lines[3]])
        assert (tmp_path / "earlier" / "1" / "events.jsonl").read_bytes() == lines[2]
