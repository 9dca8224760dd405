"""Files, environment and command line to one checked config, and where each value came from.

    defaults of the schema          lowest
    files, left to right
    LOCKSTEP_SECTION__KEY=value
    --section.key value             highest

Later layers win key by key: see `merging`. Everything that is wrong is reported at once, in one ConfigError.
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
    """A config, with where each value comes from.

    Attributes:
        config: what was asked, checked.
        origins: by dotted key, file:line:column, a flag, an environment variable, `default`, or `Python`.
        notes: what a user should know of how it was put together, one sentence each.
        runs: those of the files that are the configs of runs.
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
    """The config of these files, merged left to right, under the environment (None: this process's) and overrides.

    To act on it, `approval.approved` must be asked.

    Args:
        of_runs: files that were named by the folders of runs that they lie in. Files that lie in a run's folder
            otherwise are recognized.

    Raises ConfigError with every problem there is.
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
    if len(layers) < len(files):  # what can't be read would look as if it were missing
        raise ConfigError(errors)
    return _combine(layers, overrides, os.environ if environ is None else environ, errors, tuple(runs))


def validate(values: Config | Mapping[str, Any], overrides: Sequence[str | Override] = ()) -> LoadedConfig:
    """The same for values from Python: a mapping as a file would hold it, or a Config, under overrides.

    Raises ConfigError with every problem there is.
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
    return LoadedConfig(config, dict(_origins(config, tree)), tuple(notes), runs)


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


# --- where values came from ---------------------------------------------------------------------------------------


def values(config: Config) -> dict[str, object]:
    """Every value by dotted key, in the order of the schema: numbers, text, lists; empty mappings too."""
    return dict(_flat(config.model_dump(), ""))


def _flat(value: object, key: str) -> Iterator[tuple[str, object]]:
    if not isinstance(value, dict) or not value:
        yield key, value
        return
    for name, item in value.items():
        yield from _flat(item, f"{key}.{name}" if key else name)


def _origins(config: Config, tree: Table) -> Iterator[tuple[str, str]]:
    written = {".".join(path): node.where for path, node in _written(tree, ())}
    for key in values(config):
        yield key, written.get(key, DEFAULT)


def _written(node: Node, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Node]]:
    if path:
        yield path, node
    if isinstance(node, Table):
        for key, entry in node.entries.items():
            yield from _written(entry.node, (*path, key))
