"""The command `lockstep`, or a script, in a process of its own, which finds imported what takes seconds to import.

Some tests start Python itself: then nothing is there that hasn't been asked for.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import multiprocessing as mp
import os
import runpy
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from kit.worlds import served

_PATIENCE_S = 180


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


def run_lockstep(*words: object, cwd: Path | None = None, **environment: str | None) -> Done:
    """What a user would see of it, without a terminal. `environment`: further variables; None: without that one."""
    return _done(_command, ["lockstep", *map(str, words)], cwd or Path.cwd(), environment)


def run_with_hub(*words: object, cwd: Path, **environment: str | None) -> Done:
    """As `run_lockstep`, where variables of the hub's libraries count, which read them when they are imported."""
    return _done(_command_with_hub, ["lockstep", *map(str, words)], cwd, environment)


_started: list[Running] = []


@atexit.register  # multiprocessing would wait for what is left
def kill_started() -> None:
    """Kill the commands that tests have started and that still run: these tests have failed."""
    while _started:
        _started.pop().kill()


class Running:
    """A running command in its own process group."""

    def __init__(self, process: Any, folder: Path) -> None:
        self._process, self._folder = process, folder
        _started.append(self)

    @property
    def pid(self) -> int:
        return cast("int", self._process.pid)

    @property
    def output(self) -> str:
        return (self._folder / "err").read_text()

    @property
    def ranks(self) -> list[int]:
        """Processes of the launcher's children, in the order of their start."""
        return [int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]

    @property
    def lives(self) -> bool:
        return self._process.exitcode is None

    def send(self, number: signal.Signals, *, group: bool = False) -> None:
        (os.killpg if group else os.kill)(self.pid, number)

    def wait_for(self, moment: Callable[[], object]) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while not moment():
            assert self.lives, f"ended with {self._process.exitcode}: {self.output}"
            if time.monotonic() > deadline:
                self.kill()  # other tests need the processors
                raise AssertionError(f"it doesn't come: {self.output}")
            time.sleep(0.005)

    def kill(self) -> None:
        """Kill it with its process group; nothing happens if it has ended."""
        if self.lives:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def end(self) -> int:
        """Wait for it, end its processes, and return the exit code."""
        self._process.join(_PATIENCE_S)
        code = self._process.exitcode
        if code is None:
            self.kill()
            raise AssertionError(f"it hangs: {self.output}")
        deadline = time.monotonic() + 5
        while left := processes_of_group(self.pid):
            assert time.monotonic() < deadline, f"leaves processes: {left}"
            time.sleep(0.01)
        return cast("int", code)


def start_lockstep(*words: object, cwd: Path, terminal: str | None = None) -> Running:
    """As `run_lockstep`, without waiting. `terminal`: the file of the terminal that it leads; None: no terminal."""
    out, err = cwd / "out", cwd / "err"
    for file in (out, err):
        file.write_text("")
    words_ = ["lockstep", *map(str, words)]
    streams = (str(out), str(err)) if terminal is None else (terminal, terminal, terminal)
    process = served().Process(target=partial(_lead, words_, str(cwd), _environment(), *streams))
    process.start()
    return Running(process, cwd)


def processes_of_group(group: int) -> list[int]:
    """That still run; one that has ended and is not yet reaped does not."""
    return [int(pid) for pid in os.listdir("/proc") if pid.isdecimal() and _group_of(pid) == group]


def _group_of(pid: str) -> int | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[2])


def run_script(script: Path, *words: object, cwd: Path, **environment: str | None) -> Done:
    """As `python script words`, with further variables, as of `run_lockstep`."""
    return _done(_script, [str(script), *map(str, words)], cwd, environment)


def _done(
    main: Callable[[], None], words: list[str], folder: Path, further: Mapping[str, str | None] | None = None
) -> Done:
    environment = {name: value for name, value in {**_environment(), **(further or {})}.items() if value is not None}
    with tempfile.TemporaryDirectory() as place:
        out, err = Path(place, "out"), Path(place, "err")
        process = served().Process(target=partial(_be, main, words, str(folder), environment, str(out), str(err)))
        process.start()
        process.join(_PATIENCE_S)
        if process.exitcode is None:
            process.kill()
            raise AssertionError(f"{' '.join(words)} hangs")
        return Done(process.exitcode, out.read_text(), err.read_text())


def _environment() -> dict[str, str]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("LOCKSTEP_")}
    return {**plain, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}


def _lead(words: list[str], folder: str, environment: Mapping[str, str], *streams: str) -> None:
    os.setsid()  # the first terminal that the process opens is the one that it leads
    _be(_command, words, folder, environment, *streams)


def _be(
    main: Callable[[], None],
    words: list[str],
    folder: str,
    environment: Mapping[str, str],
    out: str,
    err: str,
    into: str = os.devnull,
) -> None:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for stream, file in ((0, into), (1, out), (2, err)):
        os.dup2(os.open(file, os.O_RDONLY if stream == 0 else os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    sys.stdout, sys.stderr = (os.fdopen(stream, "w", closefd=False) for stream in (1, 2))
    sys.argv = words
    cast("Any", mp.current_process())._config["daemon"] = False
    mp.set_start_method(cast("Any", None), force=True)  # a command has Python's default, and not its fork server's
    main()


def _command() -> None:
    from lockstep.__main__ import command

    command()


def _command_with_hub() -> None:
    from huggingface_hub import constants, hf_api

    before = dict(vars(constants))
    importlib.reload(constants)
    changed = {name: value for name, value in vars(constants).items() if name.isupper() and value != before.get(name)}
    for module in tuple(sys.modules.values()):
        if module.__name__.startswith(("huggingface_hub", "transformers")):
            for name in changed.keys() & vars(module).keys():
                setattr(module, name, changed[name])
    hf_api.api.endpoint = constants.ENDPOINT
    if "datasets.config" in sys.modules:
        importlib.reload(sys.modules["datasets.config"])
    _command()


def _script() -> None:
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
