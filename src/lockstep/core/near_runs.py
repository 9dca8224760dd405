"""Suggests the run whose folder is named like a misspelled one.

runs/digts    --> runs/digits, beside it        digits, rusn/digits   --> runs/digits
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

from lockstep.core.closest import closest_match
from lockstep.core.errors import ConfigError

_FILES = ("config.yaml", "run.lock")
_RUNS = Path("runs")
_MOST = 2000  # entries of a folder that are looked at


def did_you_mean_run(path: Path) -> str:
    """Return `; did you mean runs/digits?` to end a message about a path that is no run's, or nothing."""
    near = nearest_run(path)
    return f"; did you mean {near}?" if near is not None else ""


def not_a_run(path: Path) -> ConfigError:
    """Return the error about a path at which there is no run."""
    return ConfigError(
        f"{path} is not the folder of a run: it has neither {' nor '.join(_FILES)}{did_you_mean_run(path)}"
    )


def nearest_run(path: Path) -> Path | None:
    """Return the run whose name is most similar to that of a path, beside it or where runs are by default."""
    for folder in dict.fromkeys((path.parent, _RUNS, Path())):
        by_name = {run.name: run for run in _runs_in(folder)}
        name = closest_match(path.name, by_name)
        if name is not None and by_name[name] != path:
            return by_name[name]
    return None


def _runs_in(folder: Path) -> Iterator[Path]:
    with suppress(OSError):
        for entry in islice(folder.iterdir(), _MOST):
            if any((entry / name).is_file() for name in _FILES):
                yield entry
