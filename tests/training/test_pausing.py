"""Signals that ask for a stop reach ranks when they like; all stop after the same update, saved."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from kit import small
from kit.worlds import in_world

from lockstep.checkpoint.local import LocalStorage
from lockstep.config.loading import validate
from lockstep.core.errors import Paused
from lockstep.core.ranks import RankEnvironment
from lockstep.training.job import Job, run_job


def _stopped(config: dict[str, Any], delays: list[float | None]) -> str:
    """The output of a rank that gets SIGTERM after its delay, counted from the first update; None: never."""
    rank = RankEnvironment.read(os.environ).rank
    metrics = Path(config["run"]["folder"]) / "metrics.jsonl"

    def send() -> None:
        while not (metrics.exists() and metrics.stat().st_size):
            time.sleep(0.01)
        time.sleep(delays[rank] or 0.0)
        os.kill(os.getpid(), signal.SIGTERM)

    if delays[rank] is not None:
        threading.Thread(target=send, daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *_: None)  # the run is over and saved: a late one changes nothing
    try:
        run_job(Job(validate(config).config, "pausing"))
    except Paused as reason:
        return str(reason)
    return "not stopped"


@pytest.mark.parametrize(
    "delays",
    [
        pytest.param([0.0, 0.0, 0.0], id="at once"),
        pytest.param([0.0, 1.0, 2.0], id="a second apart"),
        pytest.param([1.5, 0.0, 0.5], id="the first rank last"),
        pytest.param([None, None, 0.0], id="one alone"),
    ],
)
def test_ranks_agree_on_where_to_stop(delays: list[float | None], tmp_path: Path) -> None:
    run = tmp_path / "run"
    config = small.config(
        run={"folder": str(run), "steps": 10**8},
        monitor={"progress": "none", "tensorboard": False},
        monitors=[{"target": "kit.waiting:Unhurried"}],
    )
    said = in_world(3, _stopped, config, delays)
    steps = {message.split()[3] for message in said}
    assert len(steps) == 1, said
    assert all("and saved" in message for message in said)
    assert LocalStorage(run / "checkpoints").names() == [f"step-{int(steps.pop().replace(',', '')):08d}"]
