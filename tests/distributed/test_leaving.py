"""A rank that fails reports why and ends, also where a collective waits for ranks that never come."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from kit import stand_in
from kit.worlds import in_world

from lockstep.core.errors import Paused, RunFailed, reports_failures
from lockstep.distributed import process_group

ENDS: dict[str, BaseException] = {
    "an error": ValueError("boom"),
    "a failure": RunFailed("no disk"),
    "Ctrl-C": KeyboardInterrupt(),
    "sys.exit(0)": SystemExit(0),
    "sys.exit(3)": SystemExit(3),
}


def _fail_in_a_collective(backend: str, end: str, left: Path) -> tuple[str, float, list[str], bool]:
    """Rank 0 raises while rank 1 never joins a sum; return the exception, seconds, reports, and what is left."""
    reports: list[str] = []
    began = time.monotonic()
    raised = ""
    try:
        with reports_failures(lambda error: reports.append(repr(error))), stand_in.joined(backend) as world:
            dist.barrier() if backend == "gloo" else world.axis.barrier()
            began = time.monotonic()
            if world.rank == 0:
                pending = dist.all_reduce(torch.ones(1), async_op=True)
                assert pending is not None
                raise ENDS[end]
            while not left.exists() and time.monotonic() < began + 6.0:
                time.sleep(0.02)
    except BaseException as error:
        raised = repr(error)
        left.touch()
    return raised, time.monotonic() - began, reports, dist.is_initialized()


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("backend", ["gloo", stand_in.NAME])
def test_a_rank_that_fails_ends_at_once(backend: str, end: str, tmp_path: Path) -> None:
    """Before, it waited for the other rank in destroy_process_group, and reported nothing."""
    raised, seconds, reports, initialized = in_world(2, _fail_in_a_collective, backend, end, tmp_path / "left")[0]
    assert raised == repr(ENDS[end])
    assert seconds < 4.0
    assert reports == ([] if backend == "gloo" else [raised])
    assert not initialized


def _orderly(end: str) -> tuple[list[bool], int, bool]:
    """All ranks leave together, by an exception or at the end of the block."""
    reports: list[str] = []
    try:
        with reports_failures(lambda error: reports.append(repr(error))), stand_in.joined() as world:
            world.axis.barrier()
            if end == "paused":
                raise Paused("stopped at step 3")
    except Paused:
        pass
    return [group.aborted for group in stand_in.StandIn.made], len(reports), dist.is_initialized()


@pytest.mark.parametrize("end", ["paused", "done"])
def test_ranks_that_end_together_abort_nothing(end: str) -> None:
    assert in_world(2, _orderly, end) == [([False], 0, False)] * 2


def _abort_hangs() -> tuple[list[str], float, list[str]]:
    """The abort of the backend never returns."""
    process_group._ABORT_LIMIT = 0.5
    stand_in.StandIn.abort = lambda self: time.sleep(60.0)  # type: ignore[method-assign]
    order: list[str] = []
    messages: list[str] = []
    logging.getLogger("lockstep").addHandler(_Lines(messages))
    began = time.monotonic()
    try:
        with reports_failures(lambda error: order.append("reported")), stand_in.joined():
            raise ValueError("boom")
    except ValueError:
        order.append("raised")
    seconds = time.monotonic() - began
    try:
        with stand_in.joined():
            pass
    except RunFailed as error:
        order.append(str(error))
    return order, seconds, messages


class _Lines(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())


def test_an_abort_that_hangs_is_left_behind() -> None:
    order, seconds, messages = in_world(1, _abort_hangs)[0]
    assert order[:2] == ["reported", "raised"]
    assert order[2:] == ["the process group of a run that failed in this process could not be closed; start a new one"]
    assert messages == ["rank 0: the process group could not be closed within 0.5 s"]
    assert seconds < 10.0
