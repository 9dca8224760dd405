"""Loads one checked config from files, environment and command line, with the origin of each value.

defaults of the schema          lowest
the DeepSpeed config that parallel.deepspeed.config names
files, left to right
LOCKSTEP_SECTION__KEY=value
--section.key value             highest
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from lockstep.config import shape
from lockstep.config.known_runs import RunConfig, run_of
from lockstep.config.layers import from_environment, from_flags, merge
from lockstep.config.override import Override
from lockstep.config.reading import Items, Leaf, Node, Table, from_python, read_file, to_python
from lockstep.config.schema import Config
from lockstep.config.shape import ValueShape
from lockstep.config.validation_errors import problems
from lockstep.core.errors import ConfigError, Problem, refuse
from lockstep.core.formatting import flat
from lockstep.strategies.record import resolved
from lockstep.strategies.registry import strategies

DEFAULT = "default"


@dataclass(frozen=True)
class LoadedConfig:
    """A config, with the origin of each value.

    Attributes:
        origins: By dotted key: file:line:column, a flag, an environment variable, `default`, or `Python`.
        notes: What merging has left out.
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

    Call `trust.approved` before acting on it.

    Args:
        environ: None: the environment of this process.
        of_runs: Files that were given as their runs' folders.

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
        if foreign := _of_another_tool(file, tree):
            raise ConfigError(foreign)
        layers.append(tree)
        run = run_of(file, tree, named=file in of_runs)
        runs += [run] if run is not None else []
    if len(layers) < len(files):  # the keys of an unreadable file would be reported as missing
        raise ConfigError(errors)
    return _combine(layers, overrides, os.environ if environ is None else environ, errors, tuple(runs))


def _of_another_tool(file: Path, tree: Table) -> Problem | None:
    if len(tree.entries) < 2 or tree.entries.keys() & shape.fields(Config).keys():
        return None
    why = "has none of Lockstep's sections; if it is another tool's config, convert it: lockstep config import"
    return Problem(str(file), "", f"{why} {file}")


def validate(*layers: Config | Mapping[str, Any]) -> LoadedConfig:
    """Return the config of mappings or Configs from Python, merged left to right. Raises ConfigError."""
    plain = [values.model_dump(exclude_unset=True) if isinstance(values, Config) else values for values in layers]
    trees = [cast("Table", from_python(values, "Python")) for values in plain]
    return _combine(trees, (), {}, [])


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
    if not runs:  # the config of a run has these values
        tree, config = _with_other_config(tree, config)
    written = {".".join(path): node.where for path, node in _written(tree, ())}
    origins = {key: written.get(key, DEFAULT) for key in values(config)}
    odd = [key for key, value in values(config).items() if re.search(r"\\ud[89a-f]", ascii(value))]
    refuse(Problem(origins[key], key, "has bytes that aren't UTF-8; rename it") for key in odd)  # of a command line
    return LoadedConfig(config, origins, tuple(notes), runs)


def _with_other_config(tree: Table, config: Config) -> tuple[Table, Config]:
    """Return both with the values of another tool's config, which the strategy names, under them."""
    strategy = next((each for each in strategies() if each.name == config.parallel.strategy), None)
    if strategy is None or not strategy.hooks.values:
        return tree, config
    for _ in range(2):  # with a warmup comes its type
        settings = resolved(strategy.hooks.values)(config, {".".join(path) for path, _ in _written(tree, ())})
        if not settings:
            break
        for key, value in settings.items():
            for name in reversed(key.split(".")):
                value = {name: value}
            tree, _ = merge(cast("Table", from_python(value, f"parallel.{strategy.section}.config")), tree)
        config = _check(tree, [])
    return tree, config


def _check(tree: Table, errors: list[Problem]) -> Config:
    try:
        config = Config.model_validate(fit(tree, shape.root()))
    except ValidationError as error:
        reported = {problem.where for problem in errors}
        further = [problem for problem in problems(error, tree) if problem.where not in reported]
        raise ConfigError(errors + further) from None
    refuse(errors)
    return config


# --- conversion to the types of the schema ------------------------------------------------------------------------


def fit(node: Node, at: ValueShape) -> object:
    """Return the node's value in the shape's type, if it can be converted without ambiguity.

    layers: 1e1       a whole number is valid     ->  10
    folder: 2024      text is valid               ->  "2024", as written
    freeze: [a, b]    a list is valid             ->  ("a", "b")
    optim:            a section, nothing under it ->  {}
    """
    if isinstance(node, Table):
        return _fit_table(node, at)
    if isinstance(node, Items):
        return tuple(fit(item, at.items) for item in node.items) if at.items else to_python(node)
    value = node.value
    if at.anything or isinstance(value, str):
        return value
    if value is None:
        # Nothing written under a section means its defaults; under a mapping of names, none.
        return None if at.nullable or not (at.sections() or at.values) else _fit_table(Table(), at)
    if isinstance(value, bool):
        return value if at.boolean else _fit_text(node, at)
    if isinstance(value, float) and value.is_integer() and at.whole and not at.real:
        return int(value)
    valid = at.whole or at.real or (at.interval and isinstance(value, int))
    return value if valid or not isinstance(value, int | float) else _fit_text(node, at)


def _fit_table(table: Table, at: ValueShape) -> object:
    values = {key: fit(entry.node, at.inside(key, table)) for key, entry in table.entries.items()}
    if (section := at.select(table)) is not None:
        for key in shape.required(section):
            if (inner := at.inside(key, table)).sections():  # so that missing keys inside are reported, too
                values.setdefault(key, _fit_table(Table(), inner))
    return values


def _fit_text(leaf: Leaf, at: ValueShape) -> object:
    takes_text = at.text or at.choices or at.interval
    return leaf.text if takes_text and leaf.text is not None else leaf.value


# --- values and their origins -------------------------------------------------------------------------------------


def values(config: Config) -> dict[str, object]:
    """Return every value by dotted key, in the order of the schema; also empty mappings."""
    return dict(flat(config.model_dump()))


def _written(node: Node, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Node]]:
    yield path, node
    if isinstance(node, Table):
        for key, entry in node.entries.items():
            yield from _written(entry.node, (*path, key))
