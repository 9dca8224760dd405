"""Decides whether a config may be acted on: before anything is imported, set or written.

a file of the user's own, overrides, Python      yes
a run's that this user has started here          yes; what was hidden in its config is back
any other run's                                  what it demands is listed; --trust-run (trust_run=True) lets it
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.config.foreign_code import code_in, demands, printable
from lockstep.config.known_runs import RunConfig
from lockstep.config.loading import validate
from lockstep.config.writing import to_plain
from lockstep.core.errors import ConfigError, Problem
from lockstep.core.extensions import locate
from lockstep.core.secrets import is_hidden

if TYPE_CHECKING:
    from lockstep.config.loading import LoadedConfig
    from lockstep.config.schema import Config


def approved(loaded: LoadedConfig, *, trusted: bool, writes: bool = False) -> Config:
    """The config, of which everything may be used.

    Args:
        trusted: the user has said that whoever made the run is trusted.
        writes: a run is going to be written where the config says.

    Raises:
        ConfigError: it is of a run that this user has not started here, and names code, sets variables, or writes
            outside of the run's folder; or a value was hidden in it, and nobody knows it.
    """
    reasons = [] if trusted else _unapproved(loaded, writes)
    if reasons:
        shown = "".join(f"\n  {key}: {printable(what)}" for key, what in reasons)
        runs = ", ".join(dict.fromkeys(printable(run.name) for run in loaded.runs))
        raise ConfigError(
            f"{runs} is the config of a run that you have not started here, and it asks for what can run code or "
            f"reach your files:{shown}\n"
            "--trust-run lets it, if you trust whoever made the run (in Python: trust_run=True)"
        )
    return _with_hidden_values(loaded)


def outside(folder: str, run: Path) -> bool:
    """Return whether a folder that a run's config names is outside of the run's folder."""
    return not Path(folder).absolute().resolve().is_relative_to(run.resolve())


def _unapproved(loaded: LoadedConfig, writes: bool) -> list[tuple[str, str]]:
    foreign = [run for run in loaded.runs if run.known is None]
    targets = dict(code_in(loaded.config))
    reasons = []
    for key, what in demands(loaded.config):
        origin = loaded.origins.get(key)  # of a whole mapping there is none
        if any(origin is None or run.holds(origin) for run in foreign):
            reasons.append((key, what))
        elif key in targets and (moved := _moved(targets[key], origin or "", loaded.runs)):
            reasons.append((key, moved))
    return [*reasons, *(_folders(loaded, foreign) if writes else ())]


def _moved(target: str, origin: str, runs: tuple[RunConfig, ...]) -> str | None:
    """Return the message for code that has moved since this user started the run: it may be somebody else's now."""
    for run in runs:
        if run.known is not None and run.holds(origin):
            then, now = run.known.code.get(target, ""), locate(target)
            return (
                f"{target} (it was {then or 'not found'} when you started the run, and is {now})"
                if then != now
                else None
            )
    return None


def _folders(loaded: LoadedConfig, foreign: list[RunConfig]) -> Iterator[tuple[str, str]]:
    folders = {"run.folder": loaded.config.run.folder, "checkpoint.folder": loaded.config.checkpoint.folder}
    for key, folder in folders.items():
        for run in foreign:
            if folder is not None and run.holds(loaded.origins.get(key, "")) and outside(folder, run.run):
                yield key, f"{folder} (it lies outside of the run's folder)"


# --- hidden values ------------------------------------------------------------------------------------------------

_VARIABLES = ("launch", "environment")


def _with_hidden_values(loaded: LoadedConfig) -> Config:
    """The config with what was hidden when it was written; variables that this process has anyhow are left out, since
    ranks get them with its environment."""
    plain = to_plain(loaded.config)
    known = {path: value for run in loaded.runs if run.known is not None for path, value in run.known.hidden.items()}
    paths = list(_still_hidden(plain, ()))
    if not paths:
        return loaded.config
    problems = []
    for path in paths:
        if path in known:
            _put(plain, path, known[path])
        elif path[:2] == _VARIABLES and path[2] in os.environ:
            del plain["launch"]["environment"][path[2]]
        else:
            problems.append(_unknown(path))
    if problems:
        raise ConfigError(problems)
    return validate(plain).config


def _put(holder: Any, path: tuple[str, ...], value: str) -> None:
    *way, last = path
    for key in way:
        holder = holder[int(key) if isinstance(holder, list) else key]
    holder[int(last) if isinstance(holder, list) else last] = value


def _still_hidden(values: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    if isinstance(values, dict):
        for key, value in values.items():
            yield from _still_hidden(value, (*path, str(key)))
    elif isinstance(values, list):
        for number, value in enumerate(values):
            yield from _still_hidden(value, (*path, str(number)))
    elif is_hidden(values):
        yield path


def _unknown(path: tuple[str, ...]) -> Problem:
    place = ".".join(path)
    way = f"give --{place} VALUE"
    if path[:2] == _VARIABLES:
        way = f"set {path[2]} in your environment, or {way}"
    return Problem("", place, f"is a secret, whose value isn't kept in a run's folder and isn't known here; {way}")
