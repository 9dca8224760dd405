"""A run's history is rewound and checked by its end: what is before it isn't read again at each start."""

from __future__ import annotations

import json
import tempfile
import zlib
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.compat.proto.event_pb2 import Event

from lockstep.monitor import history
from lockstep.monitor.tensorboard import _record, records, step_of


@given(
    steps=st.lists(st.integers(0, 400), max_size=60).map(sorted),
    swapped=st.sets(st.integers(0, 58), max_size=4),
    step=st.integers(0, 400),
    end=st.sampled_from([1, 40, 200, 2**20]),
    is_torn=st.booleans(),
)
def test_the_lines_after_a_step_are_moved_however_little_is_read(
    steps: list[int], swapped: set[int], step: int, end: int, is_torn: bool
) -> None:
    entries = [*enumerate(steps)]
    for place in swapped:
        if place + 1 < len(entries) and abs(entries[place][1] - entries[place + 1][1]) < history._LATE:
            entries[place], entries[place + 1] = entries[place + 1], entries[place]
    lines = [json.dumps({"step": each, "number": number}).encode() + b"\n" for number, each in entries]
    torn = [b'{"step": 1'] if is_torn else []
    stays = [line for line, (_, each) in zip(lines, entries, strict=True) if each <= step]
    with tempfile.TemporaryDirectory() as folder, patch.object(history, "_END", end):
        run, archive = Path(folder), Path(folder) / "earlier" / "1"
        (run / "metrics.jsonl").write_bytes(b"".join(lines + torn))
        history.rewind(run, step, archive)
        assert (run / "metrics.jsonl").read_bytes() == b"".join(stays)
        moved = archive / "metrics.jsonl"
        removed = [line for line in lines if line not in stays] + torn
        assert (moved.read_bytes() if moved.exists() else b"") == b"".join(removed)


def test_evaluations_that_are_repeated_are_moved(tmp_path: Path) -> None:
    lines = [
        b'{"evaluation": "held-out", "step": 3, "loss": 2.0}\n',
        b'{"saved": 3, "step": 3}\n',
        b'{"evaluation": "held-out", "step": 6, "loss": 1.0}\n',
        b'{"logged": {"a": 1}, "step": 6}\n',
    ]
    (tmp_path / "events.jsonl").write_bytes(b"".join(lines))
    for _ in range(2):
        history.remove_evaluations(tmp_path, 6, tmp_path / "earlier" / "1")
        assert (tmp_path / "events.jsonl").read_bytes() == b"".join([*lines[:2], lines[3]])
        assert (tmp_path / "earlier" / "1" / "events.jsonl").read_bytes() == lines[2]


def test_what_was_lost_or_changed_is_reported_with_and_without_a_mark(tmp_path: Path) -> None:
    lines = [b'{"step": %d}\n' % step for step in range(50)]
    whole = b"".join(lines)
    mark = {"metrics.jsonl": [50, len(whole), zlib.crc32(whole)]}
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(whole)
    assert history.faults(tmp_path, mark) == history.faults(tmp_path, None) == []
    file.write_bytes(whole + lines[-1])
    assert history.faults(tmp_path, mark) == history.faults(tmp_path, None) == ["metrics.jsonl has 1 line twice"]
    twice = whole + lines[-1]
    file.write_bytes(twice)
    known = {"metrics.jsonl": [51, len(twice), zlib.crc32(twice)]}
    with patch.object(history, "_END", 100):
        assert history.faults(tmp_path, known) == ["metrics.jsonl has 1 line twice"], "a mark doesn't hide it"
    file.write_bytes(b"".join(lines[:40]))
    assert history.faults(tmp_path, mark) == ["metrics.jsonl lacks 10 of 50 lines that were written before"]
    file.write_bytes(whole.replace(b"7", b"8"))
    assert any("is not what was written" in text or "twice" in text for text in history.faults(tmp_path, mark))


def event(step: int) -> bytes:
    return _record(Event(step=step, wall_time=1.0).SerializeToString())


def steps_in(file: Path) -> list[int | None]:
    return [*map(step_of, records(file.read_bytes()))]


def test_event_files_are_read_again_only_if_they_changed_or_may_have_later_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rewound(step: int) -> list[str]:
        read.clear()
        history.rewind(tmp_path, step, tmp_path / "earlier" / str(step), tmp_path / "memory")
        return [name[-1] for name in read if "tfevents" in name]

    def noted(file: Path, *rest: Any) -> None:
        read.append(file.name)
        rewind_file(file, *rest)

    read: list[str] = []
    rewind_file = history._rewind_file
    monkeypatch.setattr(history, "_rewind_file", noted)
    (tmp_path / "memory").mkdir()
    (tmp_path / "tensorboard").mkdir()
    first, second = (tmp_path / "tensorboard" / f"events.out.tfevents.{number}" for number in (1, 2))
    first.write_bytes(b"".join(map(event, range(6))))
    second.write_bytes(b"".join(map(event, range(6, 10))) + event(10)[:-1])
    assert rewound(8) == ["1", "2"]
    assert steps_in(second) == [6, 7, 8]
    assert rewound(8) == []
    with second.open("ab") as file:
        file.write(event(9))
    assert rewound(8) == ["2"]
    assert rewound(3) == ["1", "2"]
    assert (steps_in(first), steps_in(second)) == ([0, 1, 2, 3], [])
    assert steps_in(tmp_path / "earlier" / "3" / "tensorboard" / first.name) == [4, 5]
