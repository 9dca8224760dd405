"""`drills/kill_drill.py` whose runs are forked: each finds imported what takes seconds to import.

The first word is the address of the server that they are forked from; the others are the drill's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from kit import commands
from kit.worlds import served, share_fork_server

sys.path.insert(0, str(Path(__file__).parents[2] / "drills"))

import attempts
import kill_drill


class Forked:
    """What a drill asks of a `subprocess.Popen`."""

    def __init__(self, words: Sequence[str], log: Path) -> None:
        lead = partial(commands._lead, [*words], str(log.parent), dict(os.environ), str(log), str(log))
        self._process = served().Process(target=lead)
        log.write_text("")
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int | None:
        self._process.join(timeout)
        return self.poll()


if __name__ == "__main__":
    share_fork_server(sys.argv.pop(1))
    attempts.start = Forked
    kill_drill.main()
