"""The memory that ranks write their heartbeats into, and their launcher reads."""

from __future__ import annotations

import multiprocessing
import multiprocessing.heap
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from lockstep.core.heartbeat import CALLS, UPDATES, Heartbeat, shared_heartbeat


def _write(beat: Heartbeat) -> None:
    beat.numbers[UPDATES] = 7.0
    os.write(beat.files.stacks, b"a stack")


def _closed(beats: list[Heartbeat]) -> None:
    for beat in beats:
        beat.close()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_process_of_a_rank_writes_its_row_and_its_files(method: str) -> None:
    beats = [shared_heartbeat() for _ in range(2)]
    context: Any = multiprocessing.get_context(method)
    process = context.Process(target=_write, args=(beats[1],))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert [beat.numbers[UPDATES] for beat in beats] == [0.0, 7.0]
    assert [os.pread(beat.files.stacks, 100, 0) for beat in beats] == [b"", b"a stack"]
    _closed(beats)


def test_it_needs_no_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither /dev/shm, which a container may have read-only or not at all, nor a folder for temporary files."""

    def refused(*arguments: object) -> None:
        raise FileNotFoundError("/dev/shm")

    monkeypatch.setattr(multiprocessing.heap, "Arena", refused)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    beats = [shared_heartbeat() for _ in range(2)]
    beats[1].numbers[CALLS] = 3.0
    assert [beat.numbers[CALLS] for beat in beats] == [0.0, 3.0]
    _closed(beats)
