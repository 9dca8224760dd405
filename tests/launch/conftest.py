from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass
class Launched:
    """A launcher that a test has started."""

    pid: int
    out_path: Path
    err_path: Path
    fork_server: ForkServer

    @property
    def out(self) -> str:
        return self.out_path.read_text()

    @property
    def err(self) -> str:
        return self.err_path.read_text()

    def wait(self) -> int:
        return self.fork_server.ask({"wait": self.pid})["code"]


class ForkServer:
    """Starts launchers, each forked from a process that has imported torch."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("fork_server.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def start(self, scenario: str, *, out: Path | None = None, **arguments: object) -> Launched:
        self._count += 1
        out = out or self._folder / f"out-{self._count}"
        err = self._folder / f"err-{self._count}"
        request = {"scenario": scenario, "arguments": arguments, "out": str(out), "err": str(err)}
        return Launched(self.ask(request)["pid"], out, err, self)

    def run(self, scenario: str, **arguments: object) -> tuple[int, str, str]:
        launched = self.start(scenario, **arguments)
        return launched.wait(), launched.out, launched.err

    def ask(self, request: dict[str, object]) -> dict[str, int]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer: dict[str, int] = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        print(json.dumps({"quit": True}), file=self._process.stdin, flush=True)  # a child of the test may have it open
        self._process.communicate()


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    server = ForkServer(tmp_path_factory.mktemp("launches"))
    yield server
    server.close()
