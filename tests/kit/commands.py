"""The command `lockstep`, or a script, in a process of its own, which finds imported what takes seconds to import.

Some tests start Python itself: then nothing is there that hasn't been asked for.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import runpy
import sys
import tempfile
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


def run_lockstep(*words: object, cwd: Path | None = None) -> Done:
    """What a user would see of it, without a terminal."""
    return _done(_command, ["lockstep", *map(str, words)], cwd or Path.cwd())


def run_script(script: Path, *words: object, cwd: Path) -> Done:
    """As `python script words`."""
    return _done(_script, [str(script), *map(str, words)], cwd)


def _done(main: Callable[[], None], words: list[str], folder: Path) -> Done:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("LOCKSTEP_")}
    environment = {**plain, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}
    with tempfile.TemporaryDirectory() as place:
        out, err = Path(place, "out"), Path(place, "err")
        process = served().Process(target=partial(_be, main, words, str(folder), environment, str(out), str(err)))
        process.start()
        process.join(_PATIENCE_S)
        if process.exitcode is None:
            process.kill()
            raise AssertionError(f"{' '.join(words)} hangs")
        return Done(process.exitcode, out.read_text(), err.read_text())


def _be(
    main: Callable[[], None], words: list[str], folder: str, environment: Mapping[str, str], out: str, err: str
) -> None:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for stream, file in ((0, os.devnull), (1, out), (2, err)):
        os.dup2(os.open(file, os.O_RDONLY if stream == 0 else os.O_WRONLY | os.O_CREAT), stream)
    sys.stdout, sys.stderr = (os.fdopen(stream, "w", closefd=False) for stream in (1, 2))
    sys.argv = words
    cast("Any", mp.current_process())._config["daemon"] = False
    main()


def _command() -> None:
    from lockstep.cli.main import command

    command()


def _script() -> None:
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
