"""A logger per rank: its files, their rotation, and the rank on the console."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from lockstep.loops import rank_logger


@pytest.fixture(autouse=True)
def _rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")


@pytest.mark.parametrize(("console", "prints"), [(3, True), (0, False), (None, False)])
def test_a_line_has_time_level_and_rank_and_is_printed_on_one(
    console: int | None, prints: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = rank_logger("own", tmp_path / "logs", console=console)
    log.warning("loss %.1f", 2.5)
    log.debug("not at this level")
    line = (tmp_path / "logs" / "rank-3.log").read_text()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} WARNING rank 3/8 own: loss 2.5\n", line)
    assert capsys.readouterr().err == (line if prints else "")


def test_a_file_is_rotated(tmp_path: Path) -> None:
    log = rank_logger("rotated", tmp_path, console=None, max_bytes=200, backups=2)
    for step in range(50):
        log.info("step %d", step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-3.log", "rank-3.log.1", "rank-3.log.2"]
    assert all(path.stat().st_size <= 200 for path in tmp_path.iterdir())


def test_a_second_call_replaces_the_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rank_logger("again", tmp_path, console=3)
    log = rank_logger("again", level=logging.DEBUG, console=3)
    log.debug("once")
    assert capsys.readouterr().err.count("once") == 1
    assert (tmp_path / "rank-3.log").read_text() == ""
