"""Decides whether a config may be acted on, before anything is imported, set, opened or written.

    a file of the user, overrides, Python     yes
    a run that this user has started here     yes; the values hidden in its config are restored
    any other run                             what reaches out of its folder is listed; --trust-run allows it

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
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.config.reading import Table, to_python
from lockstep.config.schema import Config
from lockstep.config.shape import ANYTHING, ValueShape, fields
from lockstep.config.writing import hidden_in, plain_yaml, to_plain, to_public
from lockstep.core.errors import ConfigError, Problem
from lockstep.core.extensions import locate
from lockstep.core.files import MAX_JSON_BYTES, read_bounded, write_atomically
from lockstep.core.secrets import is_harmless_variable, is_hidden
from lockstep.core.terminal import plain_line
from lockstep.core.tracking import TRACKERS
from lockstep.stores.addresses import is_address
from lockstep.strategies.section import Section

if TYPE_CHECKING:
    from lockstep.config.loading import LoadedConfig

GIVEN = "given"  # stands in a config for an object that is passed in Python
CONFIG = "config.yaml"
ENVIRONMENT = "environment.json"

Keys = tuple[str, ...]


# --- what reaches out of a run's folder ---------------------------------------------------------------------------


def _asks(path: Keys, value: object) -> str | None:
    return "" if isinstance(value, str) else None


def _nothing(path: Keys, value: object) -> None:
    """Accept names inside the run, and text that is only shown."""


def _word(path: Keys, value: object) -> str | None:
    """Accept what can't be a path or an address."""
    return "" if isinstance(value, str) and ("/" in value or value.startswith(("~", ".."))) else None


def _code(path: Keys, value: object) -> str | None:
    return None if value == GIVEN else ""


def _strategy(path: Keys, value: object) -> str | None:
    return "" if ":" in str(value) else None


def _file(path: Keys, value: object) -> str:
    return "it is outside of the run's folder"


def _variable(path: Keys, value: object) -> str | None:
    return None if is_harmless_variable(path[-1]) else "a variable can make a process run code"


def _address(path: Keys, value: object) -> str | None:
    return None if value in ("127.0.0.1", "::1", "localhost") else "other hosts can connect"


_LOADS = re.compile(r"auto_map|custom_pipelines|kernel_config|use_kernels|\w*backbone\w*|\w*name_or_path")


def _architecture(path: Keys, value: object) -> str | None:
    """Accept numbers and words; an `attn_implementation` with a / is a repository of kernels."""
    is_word = not isinstance(value, str) or re.fullmatch(r"[\w., -]*", value) is not None
    return None if is_word and not any(map(_LOADS.fullmatch, path)) else "transformers loads by it"


_RULES: Mapping[Callable[[Keys, object], str | None], str] = {
    _code: "model.target objective.target optim.target data.train.target data.train.collate checkpoint.storage.target "
    "monitor.trackers.target monitors.target transforms.target",
    _asks: "model.arguments.* objective.arguments.* optim.arguments.* data.train.arguments.* monitors.arguments.* "
    "checkpoint.storage.arguments.* monitor.trackers.arguments.* transforms.arguments.* recovery.notice "
    "launch.rendezvous launch.interface",
    _strategy: "parallel.strategy",
    _architecture: "model.architecture.*",
    _variable: "launch.environment.*",
    _file: "model.init_from model.pretrained data.train.name data.train.tokenizer data.train.folder run.folder "
    "checkpoint.folder parallel.deepspeed.config",  # or a name on the hub, or an address
    _address: "monitor.prometheus.address",
    _word: "launch.job_id data.train.split data.train.configuration parallel.deepspeed.config.* "
    "parallel.tensor_parallel.plan.*",
    _nothing: "description evaluation.prompt model.freeze model.inputs.* data.train.text data.train.text_pair "
    "data.train.label optim.rules.match parallel.pipeline_parallel.split parallel.fsdp.wrap checkpoint.best "
    "memory.activation_checkpointing.modules monitor.early_stopping.metric profile.steps "
    "launch.nodes",
}
REACHES = {key: rule for rule, keys in _RULES.items() for key in keys.split()}
"""Each key of the schema that takes a text, with the rule for its values: None, or a remark if they reach out.

`*` stands for a free name, and `data.train` for the evaluation sets, too.
"""
_WRITTEN_TO = ("run.folder", "checkpoint.folder")


@dataclass(frozen=True, slots=True)
class Reach:
    """A value of a config that reaches out of the run's folder.

    Attributes:
        path: Of its key, with the numbers of list items.
        key: As in `REACHES`.
        remark: May be empty.
    """

    path: Keys
    key: str
    value: Any
    remark: str

    @property
    def place(self) -> str:
        """The key, for messages."""
        return ".".join(self.path).replace(".[", "[")


def reaching(config: Config, run: Path | None = None) -> Iterator[Reach]:
    """Yield what reaches out of a run's folder; None: as if every path did."""
    for path, key, value in _texts(config, ANYTHING, (), ""):
        rule = REACHES.get(key, _asks)
        if rule is _file and run is not None and not outside(value, run):
            continue
        if (remark := rule(path, value)) is not None:
            yield Reach(path, key, value, remark)


def code_in(config: Config) -> dict[str, str]:
    """Return the target of each key that names code to import."""
    code = [each for each in reaching(config) if REACHES.get(each.key) in (_code, _strategy)]
    return {
        demand.place: demand.value
        for demand in code
        if demand.key != "monitor.trackers.target" or demand.value not in TRACKERS
    }


def outside(place: str, run: Path) -> bool:
    """Return whether a path or address is outside of the run's folder."""
    return is_address(place) or not Path(place).expanduser().absolute().resolve().is_relative_to(run.resolve())


def _texts(value: Any, at: ValueShape, path: Keys, key: str) -> Iterator[tuple[Keys, str, Any]]:
    """Yield path, key and value of all that isn't a number, a switch or a word of a fixed list."""
    if isinstance(value, Section):
        for name, inner in value:
            shape = fields(type(value)).get(name, ANYTHING)
            yield from _texts(inner, shape, (*path, name), f"{key}.{name}" if key else name)
    elif isinstance(value, Mapping):
        below = "data.train" if key == "data.evaluation" else f"{key.removesuffix('.*')}.*"
        for name, inner in value.items():
            yield from _texts(inner, at.values or ANYTHING, (*path, str(name)), below)
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from _texts(inner, at.items or ANYTHING, (*path, f"[{number}]"), key)
    elif value is not None and (at.text or at.anything or key in REACHES):
        yield path, key, value


# --- approval -----------------------------------------------------------------------------------------------------


def approved(loaded: LoadedConfig, *, trusted: bool, writes: bool = False) -> Config:
    """Return the config, if all of it may be used.

    Args:
        trusted: The user trusts the author of the run.
        writes: A run will be written to the config's folders.

    Raises:
        ConfigError: The run is foreign and reaches out of its folder; or a hidden value is unknown.
    """
    if reasons := [] if trusted else list(_unapproved(loaded, writes)):
        shown = "".join(f"\n  {place}: {plain_line(demand)}" for place, demand in reasons)
        runs = ", ".join(dict.fromkeys(plain_line(run.name) for run in loaded.runs))
        why = _why_forgetful()
        whose = f"of a run that isn't known as yours ({why})" if why else "of a run that you have not started here"
        raise ConfigError(
            f"{runs} is the config {whose}, and it runs code or reaches out of the run's folder:{shown}\n"
            "Pass --trust-run if you trust the author of the run (in Python: trust_run=True)"
        )
    return _with_hidden_values(loaded)


def _unapproved(loaded: LoadedConfig, writes: bool) -> Iterator[tuple[str, str]]:
    for run in loaded.runs:
        code = code_in(loaded.config)
        for demand in reaching(loaded.config, run.run):
            if not run.holds(_origin(loaded, demand.path)) or (demand.key in _WRITTEN_TO and not writes):
                continue
            if run.known is None:
                yield demand.place, f"{demand.value} ({demand.remark})" if demand.remark else str(demand.value)
            elif demand.place in code and (moved := _moved(demand.value, run.known)):
                yield demand.place, moved


def _origin(loaded: LoadedConfig, path: Keys) -> str | None:
    keys = (".".join(path[:end]) for end in range(len(path), 0, -1))
    return next((loaded.origins[key] for key in keys if key in loaded.origins), None)


def _moved(target: str, known: KnownRun) -> str | None:
    """Return the message for code that has moved since this user started the run."""
    then, now = known.code.get(target, ""), locate(target)
    return f"{target} (it was {then or 'not found'} when you started the run, and is {now})" if then != now else None


_VARIABLES = ("launch", "environment")


def _with_hidden_values(loaded: LoadedConfig) -> Config:
    """Return the config with its hidden values, without hidden variables that this process has."""
    from lockstep.config.loading import validate

    known = {path: value for run in loaded.runs if run.known is not None for path, value in run.known.hidden.items()}
    unknown: list[Keys] = []

    def restored(value: Any, path: Keys) -> Any:
        if isinstance(value, dict):
            kept = {name: item for name, item in value.items() if not left_out(item, (*path, name))}
            return {name: restored(item, (*path, name)) for name, item in kept.items()}
        if isinstance(value, list):
            return [restored(item, (*path, str(number))) for number, item in enumerate(value)]
        if is_hidden(value) and path not in known:
            unknown.append(path)
        return known.get(path, value) if is_hidden(value) else value

    def left_out(value: Any, path: Keys) -> bool:
        return is_hidden(value) and path not in known and path[:-1] == _VARIABLES and path[-1] in os.environ

    plain = to_plain(loaded.config)
    values = restored(plain, ())
    if unknown:
        raise ConfigError(list(map(_unknown, unknown)))
    return loaded.config if values == plain else validate(values).config


def _unknown(path: Keys) -> Problem:
    key = ".".join(path)
    variable = f"set {path[2]} in your environment, or " if path[:2] == _VARIABLES else ""
    why = "is a secret, whose value isn't kept in a run's folder and isn't known here"
    return Problem("", key, f"{why}; {variable}give --{key} VALUE")


# --- the runs of this user ----------------------------------------------------------------------------------------

_WRITTEN_WITH_IT = (ENVIRONMENT, "metrics.jsonl", "events.jsonl", "summary.json")
_LOCK = "run.lock"
_ID = re.compile(r"[0-9a-f]{32}")
_MOST_CONFIGS = 4  # per run: resuming it under other overrides makes another


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


def recorded(config: Config, run_id: str) -> str:
    """Return the text of a run's config.yaml, without secrets, and record that this user has started the run."""
    public = to_public(config)
    if not _ID.fullmatch(run_id):  # of a checkpoint that another program has written
        return plain_yaml(public)
    configs = _configs_of(run_id)
    digest = _digest(public)
    others = {name: record for name, record in configs.items() if name != digest}
    code = {target: locate(target) for target in code_in(config).values()}
    kept = {**others, digest: {"code": code, "hidden": [[list(path), value] for path, value in hidden_in(config)]}}
    if kept != configs:  # else a run that resumes is known already
        _remember(run_id, {"configs": dict(list(kept.items())[-_MOST_CONFIGS:])})
    return plain_yaml(public)


def unremembered(config: Config, run: Path) -> list[str]:
    """Return the note that this start won't be known later, if the run will need that."""
    problem = _why_forgetful()
    if problem is None or not (hidden_in(config) or any(reaching(config, run))):
        return []
    return [f"{problem}; nobody can know later that you have started this run, so resume its folder with --trust-run"]


def known_as(run_id: str, values: object) -> KnownRun | None:
    """Return the record of a run that this user has started here under this config."""
    record = _configs_of(run_id).get(_digest(values)) if _ID.fullmatch(run_id) else None
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


def _digest(values: object) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()


_MOST_RUNS = 1000


def _remember(run_id: str, record: Mapping[str, Any]) -> None:
    """Store the record of a run, if possible, and forget the oldest of too many."""
    with suppress(OSError):
        if (folder := _known_runs()) is not None:
            write_atomically(folder / f"{run_id}.json", json.dumps(record), durable=False)
            for path in sorted(folder.iterdir(), key=lambda path: path.lstat().st_mtime)[:-_MOST_RUNS]:
                path.unlink()


def _configs_of(run_id: str) -> dict[str, Any]:
    """Return the records of a run by the digests of its configs; empty if other users could have written them."""
    try:
        folder = _known_runs(make=False)
        content = {} if folder is None else json.loads(read_bounded(folder / f"{run_id}.json", MAX_JSON_BYTES))
        configs = content.get("configs")
    except (OSError, ValueError, AttributeError, RecursionError):
        return {}
    return configs if isinstance(configs, dict) else {}


def _why_forgetful() -> str | None:
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
