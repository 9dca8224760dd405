"""A worker that dies is reported with a remedy, wherever the main thread is when torch raises its error."""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import signal
import time
from typing import Any

import pytest
from index_sources import IndexSource, make_loader
from kit.worlds import in_world
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from lockstep.core.control_groups import Kills
from lockstep.core.errors import RunFailed
from lockstep.core.progress import Progress
from lockstep.data import fetching


def _kill_the_worker() -> None:
    (worker,) = multiprocessing.active_children()
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)


def _worker_killed_between_updates(seconds: float) -> str:
    """Return the message that the main thread gets while it is outside of the loader."""
    loader = make_loader(IndexSource(100), workers=1, shuffle=False)
    updates = loader.updates(Progress())
    next(updates)
    try:
        _kill_the_worker()
        time.sleep(seconds)
        for _ in updates:
            pass
    except RunFailed as error:
        return str(error)
    return ""


@pytest.mark.parametrize("seconds", [10.0, 0.0], ids=["outside of the loader", "inside"])
def test_a_dead_worker_is_reported_wherever_the_main_thread_is(seconds: float) -> None:
    message = in_world(1, _worker_killed_between_updates, seconds)[0]
    # the second is torch's message if its loader notices the death before the signal is handled
    how = r"\(pid \d+\) is killed by signal: Killed|\(pid\(s\) \d+\) exited unexpectedly"
    when = r"( while it read .*)?"  # of this update or of later ones
    why = r"(Reason|If it was killed): (by a person or a scheduler|out of memory).*"
    assert re.fullmatch(rf"a data worker died{when}: .*({how})\. {why}", message)


KILLED = "DataLoader worker (pid 7) is killed by signal: Killed. "
IN_THE_RANK = ". Set data.loader.workers: 0 to fetch in the rank's own process, which shows the error"


@pytest.mark.parametrize(
    ("error", "kills", "reason"),
    [
        (
            KILLED,
            Kills(0, 3),
            ". Reason: by a person or a scheduler; the kernel has counted no out-of-memory kill here",
        ),
        (
            KILLED,
            Kills(1, 4),
            ". Reason: out of memory (the kernel's OOM killer, in this control group). Set fewer data.loader.workers, "
            "or a smaller data.loader.prefetch",
        ),
        ("DataLoader worker (pid 7) is killed by signal: Segmentation fault. ", Kills(1, 4), IN_THE_RANK),
    ],
)
def test_the_reason_of_a_death_follows_the_kernels_counts(
    error: str, kills: Kills, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "kernel_kills", lambda: kills)
    message = str(fetching._death(RuntimeError(error), Kills(0, 3)))
    assert message.endswith(f": {error.strip(' .')}{reason}")


def _users_own_worker_killed() -> str:
    loader = make_loader(IndexSource(100), workers=1, shuffle=False)
    next(loader.updates(Progress()))
    loader.close()
    answers = iter(DataLoader(range(10), num_workers=1))  # type: ignore[arg-type]
    next(answers)
    try:
        _kill_the_worker()
        time.sleep(10.0)
    except RuntimeError as error:
        return str(error)
    return ""


def test_the_death_of_a_users_own_worker_is_not_translated() -> None:
    assert in_world(1, _users_own_worker_killed)[0].startswith("DataLoader worker (pid ")


def _killed_after_the_end() -> int:
    loader = make_loader(IndexSource(100), workers=1, shuffle=False)
    next(loader.updates(Progress()))
    kept = [thing for thing in gc.get_objects() if isinstance(thing, _BaseDataLoaderIter)]  # as by a traceback
    loader.close()
    _kill_the_worker()
    time.sleep(1.0)  # torch's handler would raise in here
    return len(kept)


def test_a_worker_that_dies_after_the_end_is_no_failure() -> None:
    assert in_world(1, _killed_after_the_end) == [1]


class _OneSampleFails(IndexSource):
    def fetch(self, indices: Any) -> Any:
        if 9 in indices:
            raise RunFailed("sample 9 can't be read")
        if 13 in indices:
            time.sleep(600.0)
        return super().fetch(indices)


def test_after_a_failure_no_worker_is_left() -> None:
    """Though the failure, which holds all frames, is kept, and one worker still reads."""
    loader = make_loader(_OneSampleFails(100), workers=2, shuffle=False)
    began = time.monotonic()
    with pytest.raises(RunFailed, match="sample 9") as kept:
        for _ in loader.updates(Progress()):
            pass
    assert multiprocessing.active_children() == []
    assert time.monotonic() - began < 60.0
    assert kept.tb is not None


class _Exits(IndexSource):
    def fetch(self, indices: Any) -> Any:
        if 9 in indices:
            raise SystemExit(4)
        return super().fetch(indices)


def test_a_worker_that_exits_is_named_with_its_samples_and_its_code() -> None:
    loader = make_loader(_Exits(100), workers=1, shuffle=False)
    how = r"a data worker died while it read one of samples 8, 9, .*: DataLoader worker .* with exit code 4$"
    with pytest.raises(RunFailed, match=how):
        for _ in loader.updates(Progress()):
            pass
