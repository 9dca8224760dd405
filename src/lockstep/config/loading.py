"""Loads one checked config from files, environment and command line, with the origin of each value.

    defaults of the schema          lowest
    files, left to right
    LOCKSTEP_SECTION__KEY=value
    --section.key value             highest

Later layers win key by key: see `merging`. One ConfigError reports all problems at once.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lockstep.config import shape
from lockstep.config.fitting import fit
from lockstep.config.known_runs import RunConfig, run_of
from lockstep.config.merging import merge
from lockstep.config.override import Override
from lockstep.config.overrides import from_environment, from_flags
from lockstep.config.reading import Node, Table, from_python, read_file
from lockstep.config.schema import Config
from lockstep.config.validation_errors import problems
from lockstep.core.errors import ConfigError, Problem

DEFAULT = "default"


@dataclass(frozen=True)
class LoadedConfig:
    """A config, with the origin of each value.

    Attributes:
        config: The checked config.
        origins: By dotted key: file:line:column, a flag, an environment variable, `default`, or `Python`.
        notes: What merging has left out, one sentence each.
        runs: The files that are configs of runs.
    """

    config: Config
    origins: Mapping[str, str]
    notes: tuple[str, ...] = ()
    runs: tuple[RunConfig, ...] = ()


def load(
    files: Sequence[Path | str],
    overrides: Sequence[str | Override] = (),
    environ: Mapping[str, str] | None = None,
    *,
    of_runs: Collection[Path] = (),
) -> LoadedConfig:
    """Return the config of these files, merged left to right, under the environment and the overrides.

    Call `approval.approved` before acting on it.

    Args:
        environ: None: the environment of this process.
        of_runs: Files that were named by the folders of their runs; other files in a run's folder are recognized.

    Raises:
        ConfigError: Lists every problem.
    """
    errors: list[Problem] = []
    layers: list[Table] = []
    runs: list[RunConfig] = []
    for file in map(Path, files):
        tree, wrong = read_file(file)
        errors += wrong
        if tree is None:
            continue
        layers.append(tree)
        run = run_of(file, tree, named=file in of_runs)
        runs += [run] if run is not None else []
    if len(layers) < len(files):  # the keys of an unreadable file would be reported as missing
        raise ConfigError(errors)
    return _combine(layers, overrides, os.environ if environ is None else environ, errors, tuple(runs))


def validate(values: Config | Mapping[str, Any], overrides: Sequence[str | Override] = ()) -> LoadedConfig:
    """Return the config of values from Python: a mapping like a file's, or a Config, under overrides.

    Raises:
        ConfigError: Lists every problem.
    """
    plain = values.model_dump(exclude_unset=True) if isinstance(values, Config) else values
    tree = from_python(plain, "Python")
    assert isinstance(tree, Table)
    return _combine([tree], overrides, {}, [])


def _combine(
    layers: Sequence[Table],
    overrides: Sequence[str | Override],
    environ: Mapping[str, str],
    errors: list[Problem],
    runs: tuple[RunConfig, ...] = (),
) -> LoadedConfig:
    tree, notes = Table(), list[str]()
    for layer in layers:
        tree, merge_notes = merge(tree, layer)
        notes += merge_notes
    for layer, wrong in (from_environment(environ, tree), from_flags(overrides, tree)):
        tree, merge_notes = merge(tree, layer)
        notes += merge_notes
        errors += wrong
    config = _check(tree, errors)
    written = {".".join(path): node.where for path, node in _written(tree, ())}
    origins = {key: written.get(key, DEFAULT) for key in values(config)}
    return LoadedConfig(config, origins, tuple(notes), runs)


def _check(tree: Table, errors: list[Problem]) -> Config:
    try:
        config = Config.model_validate(fit(tree, shape.root()))
    except ValidationError as error:
        reported = {problem.where for problem in errors}
        further = [problem for problem in problems(error, tree) if problem.where not in reported]
        raise ConfigError(errors + further) from None
    if errors:
        raise ConfigError(errors)
    return config


def values(config: Config) -> dict[str, object]:
    """Return every value by dotted key, in the order of the schema; also empty mappings."""
    return dict(_flat(config.model_dump(), ""))


def _flat(value: object, key: str) -> Iterator[tuple[str, object]]:
    if not isinstance(value, dict) or not value:
        yield key, value
        return
    for name, item in value.items():
        yield from _flat(item, f"{key}.{name}" if key else name)


def _written(node: Node, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Node]]:
    yield path, node
    if isinstance(node, Table):
        for key, entry in node.entries.items():
            yield from _written(entry.node, (*path, key))
