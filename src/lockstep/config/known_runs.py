"""The runs that this user has started here: how they are known when their configs are read again.

A run is known by $XDG_STATE_HOME/lockstep/runs/ID.json (by default in ~/.local/state), which only this user can read
and write: the config's hash, where the code is that it names, and hidden values. `config.yaml` and `environment.json`
in the run's folder can be forged.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.config.reading import Table, to_python
from lockstep.core.files import MAX_JSON_BYTES, read_bounded, write_atomically

CONFIG = "config.yaml"
ENVIRONMENT = "environment.json"

Keys = tuple[str, ...]
_WRITTEN_WITH_IT = (ENVIRONMENT, "metrics.jsonl", "events.jsonl", "summary.json")
_LOCK = "run.lock"
RUN_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class KnownRun:
    """The record of a run of this user: location of each target, and hidden values by path."""

    code: Mapping[str, str] = field(default_factory=dict)
    hidden: Mapping[Keys, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunConfig:
    """A config file of a run's folder; `known` None: the run is foreign."""

    name: str
    run: Path
    known: KnownRun | None

    def holds(self, origin: str | None) -> bool:
        """Return whether a value with this origin was, or may have been, written in this file."""
        return origin is None or re.fullmatch(re.escape(self.name) + r"(:\d+:\d+)?", origin) is not None


def run_of(file: Path, tree: Table, *, named: bool) -> RunConfig | None:
    """Return a config file as a run's, if it is one; `named`: the run's folder was named, and the file is in it."""
    run = file.absolute().parent if named else run_around(file)
    if run is None:
        return None
    run_id = id_of_run(run) if file.resolve() == (run / CONFIG).resolve() else None
    known = known_as(run_id, to_python(tree)) if run_id is not None else None
    return RunConfig(str(file), run, known)


def run_around(file: Path) -> Path | None:
    """Return the run's folder that contains a file at any depth, by its path or through links, if any.

    A folder with only a config.yaml may be a project, and doesn't count.
    """
    ways = (Path(file).absolute(), Path(file).resolve())
    return next((above for way in ways for above in way.parents if _looks_like_a_run(above)), None)


def _looks_like_a_run(folder: Path) -> bool:
    written = any(os.path.lexists(folder / name) for name in _WRITTEN_WITH_IT)
    return os.path.lexists(folder / _LOCK) or (os.path.lexists(folder / CONFIG) and written)


def known_as(run_id: str, values: object) -> KnownRun | None:
    """Return the record of a run that this user has started here under this config."""
    record = configs_of(run_id).get(digest_of(values)) if RUN_ID.fullmatch(run_id) else None
    if not isinstance(record, dict):
        return None
    return KnownRun(record.get("code", {}), {tuple(path): value for path, value in record.get("hidden", ())})


def id_of_run(run: Path) -> str | None:
    """Return the id of the run in this folder, if it has one."""
    try:
        run_id = json.loads(read_bounded(run / ENVIRONMENT, MAX_JSON_BYTES)).get("run")
    except (OSError, ValueError, AttributeError, RecursionError):
        return None
    return run_id if isinstance(run_id, str) and run_id else None


def digest_of(values: object) -> str:
    """Return the hash by which a config is known."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()


_MOST_RUNS = 1000


def remember(run_id: str, record: Mapping[str, Any]) -> None:
    """Store the record of a run, if possible, and forget the oldest of too many."""
    with suppress(OSError):
        if (folder := _known_runs()) is not None:
            write_atomically(folder / f"{run_id}.json", json.dumps(record), durable=False)
            for path in sorted(folder.iterdir(), key=lambda path: path.lstat().st_mtime)[:-_MOST_RUNS]:
                path.unlink()


def configs_of(run_id: str) -> dict[str, Any]:
    """Return the records of a run by the digests of its configs; empty if other users could have written them."""
    try:
        folder = _known_runs(make=False)
        content = {} if folder is None else json.loads(read_bounded(folder / f"{run_id}.json", MAX_JSON_BYTES))
        configs = content.get("configs")
    except (OSError, ValueError, AttributeError, RecursionError):
        return {}
    return configs if isinstance(configs, dict) else {}


def why_forgetful() -> str | None:
    """Return why runs can't be remembered here; None if they can."""
    try:
        folder = _known_runs()
    except OSError as error:
        return f"{error.filename} can't be written: {error.strerror}"
    if folder is None:
        return f"{_state_root() or 'HOME'} isn't a folder of this user's alone"
    return None if os.access(folder, os.W_OK) else f"{folder} can't be written"


def _known_runs(*, make: bool = True) -> Path | None:
    """Return the folder of the records; None if another user owns it, or can read or write it."""
    if (root := _state_root()) is None:
        return None
    folder = root / "lockstep" / "runs"
    if make:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    is_private = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077
    return folder if is_private else None


def _state_root() -> Path | None:
    root = os.environ.get("XDG_STATE_HOME", "")
    if os.path.isabs(root):  # the specification ignores a relative one
        return Path(root)
    try:
        return Path.home() / ".local" / "state"
    except RuntimeError:
        return None
