"""What the launcher sends to ranks, once: a message, however long it isn't read, and a signal, over all rounds."""

from __future__ import annotations

import signal
import subprocess
import time
from dataclasses import dataclass
from multiprocessing import Pipe
from typing import TYPE_CHECKING, Any, cast

import pytest

from lockstep.core.failure_kinds import FailureKind
from lockstep.core.stopping import SignalRequests
from lockstep.launch.ends import End
from lockstep.launch.worker_group import RankProcess, watch

if TYPE_CHECKING:
    from lockstep.launch.hang_watch import HangWatch

_DONE = End(FailureKind.DONE, "", time.monotonic())


class _Sleep:
    """A process, as `multiprocessing` shows it."""

    def __init__(self, seconds: float) -> None:
        self._process = subprocess.Popen(["sleep", str(seconds)])
        self.pid = self._process.pid

    @property
    def exitcode(self) -> int | None:
        return self._process.poll()


@dataclass
class _Looks:
    """A watch that looks often, and sees nothing."""

    interval: float = 0.005
    has_named: bool = False
    number: int = 0

    def look(self, members: object) -> None:
        self.number += 1

    def rest(self) -> None:
        pass


@pytest.mark.parametrize(("report", "messages"), [(None, 0), (_DONE, 1)], ids=["while it trains", "when it is done"])
def test_the_only_rank_is_released_once(report: End | None, messages: int) -> None:
    own, of_rank = Pipe()
    if report is not None:
        of_rank.send(report)
    looks, process = _Looks(), _Sleep(0.3)
    watch([RankProcess(cast("Any", process), own)], SignalRequests(), 60.0, hangs=cast("HangWatch", looks))
    received = 0
    while of_rank.poll():
        of_rank.recv()
        received += 1
    assert looks.number > 10
    assert received == messages


def test_a_request_to_save_is_not_repeated_in_the_next_round() -> None:
    requests = SignalRequests()
    requests.save(signal.SIGUSR2, None)
    for code in (-signal.SIGUSR2, 0):
        process, (own, _) = _Sleep(0.1), Pipe()
        watch([RankProcess(cast("Any", process), own)], requests, 60.0, hangs=cast("HangWatch", _Looks()))
        assert process.exitcode == code
