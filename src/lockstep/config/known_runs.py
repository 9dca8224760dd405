"""The run that a config belongs to, and whether this user has started that run here.

    RUN/config.yaml, RUN/environment.json      written when a run starts, without secrets; anybody may have made them
    the user's state folder, runs/ID.json      written with them: the config's hash, where the code that it names lies,
                                               and the values that were hidden

A run whose id and config agree with what was remembered is this user's own: its code runs without a question, and its
hidden values come back. Any other is somebody else's.
"""

from __future__ import annotations

import hashlib
import json
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
_WRITTEN_BESIDE = (ENVIRONMENT, "metrics.jsonl", "events.jsonl", "summary.json")
_LOCK = "run.lock"
_KIND = "runs"
_ID = re.compile(r"[0-9a-f]{32}")
_MOST_CONFIGS = 4  # of a run: one that is resumed under other overrides has another


@dataclass(frozen=True, slots=True)
class KnownRun:
    """The record of a run that this user has started.

    Attributes:
        code: where each piece of code that the config names lay.
        hidden: values by path in the config, which the run's folder doesn't hold.
    """

    code: Mapping[str, str] = field(default_factory=dict)
    hidden: Mapping[tuple[str, ...], str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunConfig:
    """A config file of a run's folder.

    Attributes:
        name: of the file, as origins have it.
        run: the folder.
        known: None: somebody else's, as far as anybody can tell.
    """

    name: str
    run: Path
    known: KnownRun | None

    def holds(self, origin: str) -> bool:
        """Return whether a value with this origin was written in this file."""
        return re.fullmatch(re.escape(self.name) + r"(:\d+:\d+)?", origin) is not None


def run_around(file: Path) -> Path | None:
    """The run's folder that a file lies in, however deep, by its own path or behind links; None: in none.

    A folder with no more than a config.yaml may be anybody's project, and is none.
    """
    ways = (Path(file).absolute(), Path(file).resolve())
    return next((above for way in ways for above in way.parents if _looks_like_a_run(above)), None)


def _looks_like_a_run(folder: Path) -> bool:
    if _is_there(folder / _LOCK):
        return True
    return _is_there(folder / CONFIG) and any(_is_there(folder / name) for name in _WRITTEN_BESIDE)


def _is_there(path: Path) -> bool:
    try:
        path.lstat()
    except OSError:
        return False
    return True


# --- remembering --------------------------------------------------------------------------------------------------


def recorded(config: Config, run_id: str) -> str:
    """The text of a run's config.yaml, without secrets. This user knows the run by what it says from now on."""
    public = to_public(config)
    if not _ID.fullmatch(run_id):  # of a checkpoint that somebody else has made
        return plain_yaml(public)
    record = user_state.recall(_KIND, run_id) or {}
    configs = record.get("configs")
    kept = dict(configs) if isinstance(configs, dict) else {}
    digest = _digest(public)
    kept.pop(digest, None)
    code = {target: locate(target) for _, target in code_in(config)}
    kept[digest] = {"code": code, "hidden": [[list(path), value] for path, value in hidden_in(config)]}
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
        tree: what the file says.
        named: the run's folder was named, and the file lies in it.
    """
    run = file.absolute().parent if named else run_around(file)
    return _config_of_run(file, run, tree) if run is not None else None


def _config_of_run(file: Path, run: Path, tree: Table) -> RunConfig:
    run_id = id_of_run(run) if file.resolve() == (run / CONFIG).resolve() else None
    known = known_as(run_id, to_python(tree)) if run_id is not None else None
    return RunConfig(str(file), run, known)


def id_of_run(run: Path) -> str | None:
    """The id of the run in this folder, which its checkpoints carry, too; None: it has none yet."""
    try:
        run_id = json.loads(read_bounded(run / ENVIRONMENT, MAX_JSON_BYTES)).get("run")
    except (OSError, ValueError, AttributeError, RecursionError):
        return None
    return run_id if isinstance(run_id, str) and run_id else None


def _digest(values: object) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()
