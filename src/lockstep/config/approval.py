"""Decides whether a config may be acted on, before anything is imported, set or written.

a file of the user, overrides, Python            yes
a run that this user has started here            yes; the values hidden in its config are restored
any other run                                    its demands are listed; --trust-run (trust_run=True) allows them
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
from lockstep.stores.addresses import is_address

if TYPE_CHECKING:
    from lockstep.config.loading import LoadedConfig
    from lockstep.config.schema import Config

_VARIABLES = ("launch", "environment")


def approved(loaded: LoadedConfig, *, trusted: bool, writes: bool = False) -> Config:
    """Return the config, all of which may be used.

    Args:
        trusted: The user trusts the author of the run.
        writes: A run will be written to the config's folders.

    Raises:
        ConfigError: It is of a run that this user has not started here, and names code, sets variables, or writes
            outside of the run's folder; or a value is hidden in it, and unknown.
    """
    if reasons := [] if trusted else _unapproved(loaded, writes):
        shown = "".join(f"\n  {key}: {printable(demand)}" for key, demand in reasons)
        runs = ", ".join(dict.fromkeys(printable(run.name) for run in loaded.runs))
        raise ConfigError(
            f"{runs} is the config of a run that you have not started here, and it demands what can run code or "
            f"reach your files:{shown}\n"
            "Pass --trust-run if you trust the author of the run (in Python: trust_run=True)"
        )
    return _with_hidden_values(loaded)


def outside(folder: str, run: Path) -> bool:
    """Return whether a folder that a run's config names is outside of the run's folder."""
    return is_address(folder) or not Path(folder).absolute().resolve().is_relative_to(run.resolve())


def _unapproved(loaded: LoadedConfig, writes: bool) -> list[tuple[str, str]]:
    foreign = [run for run in loaded.runs if run.known is None]
    targets = dict(code_in(loaded.config))
    reasons = []
    for key, demand in demands(loaded.config):
        origin = loaded.origins.get(key)  # a whole mapping has none
        if any(origin is None or run.holds(origin) for run in foreign):
            reasons.append((key, demand))
        elif key in targets and (moved := _moved(targets[key], origin or "", loaded.runs)):
            reasons.append((key, moved))
    if writes:
        folders = {"run.folder": loaded.config.run.folder, "checkpoint.folder": loaded.config.checkpoint.folder}
        for key, folder in folders.items():
            for run in foreign:
                if folder is not None and run.holds(loaded.origins.get(key, "")) and outside(folder, run.run):
                    reasons.append((key, f"{folder} (it is outside of the run's folder)"))
    return reasons


def _moved(target: str, origin: str, runs: tuple[RunConfig, ...]) -> str | None:
    """Return the message for code that has moved since this user started the run: it may be other people's now."""
    for run in runs:
        if run.known is not None and run.holds(origin):
            then, now = run.known.code.get(target, ""), locate(target)
            message = f"{target} (it was {then or 'not found'} when you started the run, and is {now})"
            return message if then != now else None
    return None


# --- hidden values ------------------------------------------------------------------------------------------------


def _with_hidden_values(loaded: LoadedConfig) -> Config:
    """Return the config with the values that were hidden when it was written.

    Variables that this process has are left out, since ranks inherit them.
    """
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
    *parents, last = path
    for key in parents:
        holder = holder[int(key) if isinstance(holder, list) else key]
    holder[int(last) if isinstance(holder, list) else last] = value


def _still_hidden(values: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    if isinstance(values, dict | list):
        for key, value in values.items() if isinstance(values, dict) else enumerate(values):
            yield from _still_hidden(value, (*path, str(key)))
    elif is_hidden(values):
        yield path


def _unknown(path: tuple[str, ...]) -> Problem:
    key = ".".join(path)
    variable = f"set {path[2]} in your environment, or " if path[:2] == _VARIABLES else ""
    why = "is a secret, whose value isn't kept in a run's folder and isn't known here"
    return Problem("", key, f"{why}; {variable}give --{key} VALUE")
