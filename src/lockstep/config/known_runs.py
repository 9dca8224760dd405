"""Finds the run that a config belongs to, and whether this user has started that run here.

    RUN/config.yaml, RUN/environment.json      written when a run starts, without secrets; other users can forge them
    the user's state folder, runs/ID.json      written with them: the config's hash, the locations of the code that it
                                               names, and the values that were hidden

A run whose id and config agree with this record was started by this user: its code runs without a question, and its
hidden values are restored. Any other run is foreign.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.config.foreign_code import code_in
from lockstep.config.reading import Table, to_python
from lockstep.config.schema import Config
from lockstep.config.writing import hidden_in, plain_yaml, to_public
from lockstep.core import user_state
from lockstep.core.extensions import locate
from lockstep.core.files import MAX_JSON_BYTES, read_bounded

CONFIG = "config.yaml"
ENVIRONMENT = "environment.json"
_WRITTEN_WITH_IT = (ENVIRONMENT, "metrics.jsonl", "events.jsonl", "summary.json")
_LOCK = "run.lock"
_KIND = "runs"
_ID = re.compile(r"[0-9a-f]{32}")
_MOST_CONFIGS = 4  # per run: resuming it under other overrides makes another


@dataclass(frozen=True, slots=True)
class KnownRun:
    """The record of a run that this user has started.

    Attributes:
        code: Location of each target that the config names.
        hidden: Values by path in the config, which the run's folder doesn't hold.
    """

    code: Mapping[str, str] = field(default_factory=dict)
    hidden: Mapping[tuple[str, ...], str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunConfig:
    """A config file of a run's folder.

    Attributes:
        name: The file, as in origins.
        run: The folder.
        known: The record of the run; None: it is foreign.
    """

    name: str
    run: Path
    known: KnownRun | None

    def holds(self, origin: str) -> bool:
        """Return whether a value with this origin was written in this file."""
        return re.fullmatch(re.escape(self.name) + r"(:\d+:\d+)?", origin) is not None


def run_around(file: Path) -> Path | None:
    """Return the run's folder that contains a file at any depth, by its path or through links; None if none does.

    A folder with no more than a config.yaml may be a project, and doesn't count.
    """
    ways = (Path(file).absolute(), Path(file).resolve())
    return next((above for way in ways for above in way.parents if _looks_like_a_run(above)), None)


def _looks_like_a_run(folder: Path) -> bool:
    written = any(os.path.lexists(folder / name) for name in _WRITTEN_WITH_IT)
    return os.path.lexists(folder / _LOCK) or (os.path.lexists(folder / CONFIG) and written)


# --- records ------------------------------------------------------------------------------------------------------


def recorded(config: Config, run_id: str) -> str:
    """Return the text of a run's config.yaml, without secrets, and record that this user has started the run."""
    public = to_public(config)
    if not _ID.fullmatch(run_id):  # of a checkpoint that another program has written
        return plain_yaml(public)
    record = user_state.recall(_KIND, run_id) or {}
    configs = record.get("configs")
    kept = dict(configs) if isinstance(configs, dict) else {}
    digest = _digest(public)
    kept.pop(digest, None)
    code = {target: locate(target) for _, target in code_in(config)}
    kept[digest] = {"code": code, "hidden": [[list(path), value] for path, value in hidden_in(config)]}
    if kept != configs:  # else a run that resumes is known already
        user_state.remember(_KIND, run_id, {"configs": dict(list(kept.items())[-_MOST_CONFIGS:])})
    return plain_yaml(public)


def known_as(run_id: str, values: object) -> KnownRun | None:
    """Return the record of a run that this user has started here under a config with these values."""
    if not _ID.fullmatch(run_id):
        return None
    configs = (user_state.recall(_KIND, run_id) or {}).get("configs")
    record = configs.get(_digest(values)) if isinstance(configs, dict) else None
    if not isinstance(record, dict):
        return None
    return KnownRun(record.get("code", {}), {tuple(path): value for path, value in record.get("hidden", ())})


def run_of(file: Path, tree: Table, *, named: bool) -> RunConfig | None:
    """Return a config file as that of a run; None if it belongs to none.

    Args:
        tree: Content of the file.
        named: The run's folder was named, and the file is in it.
    """
    run = file.absolute().parent if named else run_around(file)
    if run is None:
        return None
    run_id = id_of_run(run) if file.resolve() == (run / CONFIG).resolve() else None
    known = known_as(run_id, to_python(tree)) if run_id is not None else None
    return RunConfig(str(file), run, known)


def id_of_run(run: Path) -> str | None:
    """Return the id of the run in this folder, which is also in its checkpoints; None: it has none yet."""
    try:
        run_id = json.loads(read_bounded(run / ENVIRONMENT, MAX_JSON_BYTES)).get("run")
    except (OSError, ValueError, AttributeError, RecursionError):
        return None
    return run_id if isinstance(run_id, str) and run_id else None


def _digest(values: object) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()
