"""An update that is repeated leaves nothing of the attempts before: not in what user code logs, nor in later updates."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import small
from training.test_rollback import BAD, BAD_UPDATE, SIZE, config

import lockstep
from lockstep import log
from lockstep.core.records import Batch
from lockstep.monitor.metric_log import LogEntries, MetricLog, recording
from lockstep.resilience.number_faults import make_nan
from lockstep.training.session import components_of


class Logging(small.CrossEntropy):
    """Logs in each micro-batch."""

    def loss_sum(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        loss = super().loss_sum(outputs, batch)
        log.mean("loss of a sample", loss, len(outputs))
        log.mean("samples", len(outputs), 1)
        log.scalar("last", loss)
        log.histogram("outputs", outputs)
        return loss


def _logged(asked: dict[str, Any], nan_in: int | None = None) -> list[LogEntries]:
    """What is logged in each update of a run, of which one attempt at an update may be NaN."""
    entries = []
    with recording(MetricLog()) as logged, lockstep.session(asked, objective=Logging()) as session:
        for batch in session.batches():
            log.mean("before", batch.step, 1)
            if batch.step == nan_in:
                make_nan(components_of(session).sharding.state.model)
            session.accumulate(batch)
            session.commit()
            entries.append(logged.drain())
    return entries


def test_a_repeated_update_logs_what_the_undisturbed_one_does(tmp_path: Path) -> None:
    asked = config(tmp_path / "run", "single", {"nonfinite": "retry"}, arguments={}, steps=5)
    assert _logged(asked, nan_in=3) == _logged(asked)


@pytest.mark.parametrize("policy", ["skip", "retry"])
def test_a_search_logs_nothing_but_the_update_without_the_sample(tmp_path: Path, policy: str) -> None:
    asked = config(tmp_path / "run", "single", {"nonfinite": policy, "bisect": True}, steps=BAD_UPDATE + 1)
    entries = _logged(asked)
    assert [entry.means["samples"][0] for entry in entries] == [*[SIZE] * (BAD_UPDATE - 1), SIZE - 1, SIZE]
    assert all(math.isfinite(entry.means["loss of a sample"][0]) for entry in entries)
    assert not any(entry.histograms["outputs"].not_finite for entry in entries)
    assert [entry.means["before"] for entry in entries] == [(step, 1.0) for step in range(BAD_UPDATE + 1)]
    left_out = {**asked, "data": {**asked["data"], "leave_out": [[BAD, BAD]]}}
    assert entries == _logged(left_out)
