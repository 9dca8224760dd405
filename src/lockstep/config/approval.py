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
    asked = [] if trusted else _unapproved(loaded, writes)
    if asked:
        shown = "".join(f"\n  {key}: {printable(what)}" for key, what in asked)
        runs = ", ".join(dict.fromkeys(printable(one.name) for one in loaded.runs))
        raise ConfigError(
            f"{runs} is the config of a run that you have not started here, and it asks for what can run code or "
            f"reach your files:{shown}\n"
            "--trust-run lets it, if you trust whoever made the run (in Python: trust_run=True)"
        )
    return _with_hidden_values(loaded)


def outside(folder: str, run: Path) -> bool:
    """Whether a folder that a run's config names lies elsewhere than in the run's."""
    return not Path(folder).absolute().resolve().is_relative_to(run.resolve())


def _unapproved(loaded: LoadedConfig, writes: bool) -> list[tuple[str, str]]:
    foreign = [one for one in loaded.runs if one.known is None]
    targets = dict(code_in(loaded.config))
    found = []
    for key, what in demands(loaded.config):
        origin = loaded.origins.get(key)  # of a whole mapping there is none
        if any(origin is None or one.holds(origin) for one in foreign):
            found.append((key, what))
        elif key in targets and (moved := _moved(targets[key], origin or "", loaded.runs)):
            found.append((key, moved))
    return [*found, *(_folders(loaded, foreign) if writes else ())]


def _moved(target: str, origin: str, runs: tuple[RunConfig, ...]) -> str | None:
    """What to say of code that isn't where it was when this user started the run: then it may be anybody's."""
    for one in runs:
        if one.known is not None and one.holds(origin):
            then, now = one.known.code.get(target, ""), locate(target)
            return (
                f"{target} (it was {then or 'not found'} when you started the run, and is {now})"
                if then != now
                else None
            )
    return None


def _folders(loaded: LoadedConfig, foreign: list[RunConfig]) -> Iterator[tuple[str, str]]:
    folders = {"run.folder": loaded.config.run.folder, "checkpoint.folder": loaded.config.checkpoint.folder}
    for key, folder in folders.items():
        for one in foreign:
            if folder is not None and one.holds(loaded.origins.get(key, "")) and outside(folder, one.run):
                yield key, f"{folder} (it lies outside of the run's folder)"


# --- hidden values ------------------------------------------------------------------------------------------------

_VARIABLES = ("launch", "environment")


def _with_hidden_values(loaded: LoadedConfig) -> Config:
    """The config with what was hidden when it was written; variables that this process has anyhow are left out, since
    ranks get them with its environment."""
    plain = to_plain(loaded.config)
    known = {path: value for one in loaded.runs if one.known is not None for path, value in one.known.hidden.items()}
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
