"""An update that is repeated leaves nothing of the attempts before, in what user code logs and in later updates."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import small
from kit.worlds import in_world
from training.test_rollback import (
    BAD,
    BAD_UPDATE,
    SIZE,
    assert_same_end,
    config,
    left_out,
    losses,
    of_session,
    ranks_of,
    trained,
    without,
)  # fmt: skip

import lockstep
from lockstep import log
from lockstep.core.records import Batch
from lockstep.data import loader
from lockstep.monitor.metric_log import LogEntries
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
    with lockstep.session(asked, objective=Logging()) as session:
        for batch in session.batches():
            log.mean("before", batch.step, 1)
            if batch.step == nan_in:
                make_nan(components_of(session).sharding.state.model, lambda: None)
            session.accumulate(batch)
            session.commit()
            entries.append(log.current().drain())
    return entries


def test_a_repeated_update_logs_what_the_undisturbed_one_does(tmp_path: Path) -> None:
    asked = config(tmp_path / "run", "single", {"bisect": True}, arguments={}, steps=5)
    assert _logged(asked, nan_in=3) == _logged(asked)


@pytest.mark.parametrize("policy", ["skip"])
def test_a_search_logs_nothing_but_the_update_without_the_sample(tmp_path: Path, policy: str) -> None:
    asked = config(tmp_path / "run", "single", {"nonfinite": policy, "bisect": True}, steps=BAD_UPDATE + 1)
    entries = _logged(asked)
    assert [entry.means["samples"][0] for entry in entries] == [*[SIZE] * (BAD_UPDATE - 1), SIZE - 1, SIZE]
    assert all(math.isfinite(entry.means["loss of a sample"][0]) for entry in entries)
    assert not any(entry.histograms["outputs"].not_finite for entry in entries)
    assert [entry.means["before"] for entry in entries] == [(step, 1.0) for step in range(BAD_UPDATE + 1)]
    left_out = {**asked, "data": {**asked["data"], "leave_out": [[BAD, BAD]]}}
    assert entries == _logged(left_out)


POWERSGD = {"strategy": "ddp", "ddp": {"compression": "powersgd", "powersgd": {"rank": 1, "start_step": 2}}}


def test_a_search_leaves_the_errors_of_compressed_gradients_as_they_were(tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    in_world(2, trained, config(run, "ddp", {"bisect": True}, parallel=POWERSGD))
    in_world(2, trained, config(other, "ddp", {}, parallel=POWERSGD, data=without([BAD])))
    assert_same_end(run, other)
    assert left_out(run) == [BAD]


# --- samples that are left out while the next update is fetched already --------------------------------------------


def _ahead(items: Iterator[Any], device: torch.device, pin: bool) -> Iterator[Any]:
    """Yield one item while the next is on its way, as to an accelerator."""
    pending = next(items)
    for item in items:
        yield pending
        pending = item
    yield pending


def _trained(asked: dict[str, Any], on_device: bool) -> None:
    if on_device:
        loader.to_device = _ahead
    assert trained(asked) == ""


TINY: dict[str, Any] = {
    "arguments": {"nan": [5], "samples": 8},
    "batch": {"global_size": 8, "micro_size": 2},
    "steps": 4,
}
"""An epoch is an update, so that each update has the bad sample."""


@pytest.mark.parametrize(("strategy", "on_device"), [("single", False), ("single", True), ("ddp", True)])
def test_a_sample_that_is_found_is_left_out_of_updates_that_were_fetched_already(
    tmp_path: Path, strategy: str, on_device: bool
) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    searched = config(run, strategy, {"bisect": True}, **TINY)
    known = config(other, strategy, {}, **TINY, data=without([5]))
    for asked in (searched, known):
        in_world(ranks_of(strategy), _trained, asked, on_device)
    assert_same_end(run, other)
    assert all(kept for *_, kept in losses(run))
    assert left_out(run) == [5]


def test_counts_of_an_update_that_was_fetched_again_are_those_of_the_host(tmp_path: Path) -> None:
    asked = config(tmp_path / "run", "single", {"bisect": True}, **TINY)
    reports, _ = of_session(asked, on_device=True)
    assert (reports, "") == of_session(asked, on_device=False)
    assert [kept for _, _, kept, _, _ in reports[:4]] == [True] * 4
