"""Parameter counts by module and dtype.

embedding.weight, layers.0.up.weight, layers.0.down.weight, layers.1.up.weight, ..., norm.weight
--> embedding, layers.0-31 (32 alike), norm
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from lockstep.core.formatting import aligned, size
from lockstep.core.records import ParameterFacts

_DEPTH = 2
_HEAD = ("module", "parameters", "trained", "dtype", "bytes")


@dataclass(frozen=True, slots=True)
class ModuleParameters:
    """The parameters of a module, or of all alike modules of a list, in one dtype.

    Attributes:
        name: `layers.0-31`; empty: the model itself.
        modules: Their number.
        parameters, trainable: Elements of all of them.
    """

    name: str
    modules: int
    dtype: str
    parameters: int
    trainable: int
    bytes: int


def parameters_by_module(parameters: Sequence[ParameterFacts]) -> tuple[ModuleParameters, ...]:
    """Return the counts of a model, in the order of its parameters."""
    modules: dict[tuple[str, str], list[ParameterFacts]] = {}
    for parameter in parameters:
        modules.setdefault((row_of(parameter.name.rpartition(".")[0]), parameter.dtype), []).append(parameter)
    alike: dict[tuple[str, str, tuple[object, ...]], list[str]] = {}
    for (module, dtype), held in modules.items():
        alike.setdefault((list_of(module), dtype, _layout(module, held)), []).append(module)
    rows = []
    for (_, dtype, _), names in alike.items():
        held = [parameter for name in names for parameter in modules[name, dtype]]
        trainable = sum(parameter.elements for parameter in held if parameter.trainable)
        elements = sum(parameter.elements for parameter in held)
        total = sum(parameter.bytes for parameter in held)
        rows.append(ModuleParameters(joined(names), len(names), dtype, elements, trainable, total))
    return tuple(rows)


def describe_modules(rows: Sequence[ModuleParameters]) -> str:
    """Return the table for people."""
    lines = [
        (row.name or "(model)", f"{row.parameters:,}", f"{row.trainable:,}", row.dtype, size(row.bytes)) for row in rows
    ]
    return "\n".join(aligned([_HEAD, *lines], left={0}))


def row_of(module: str) -> str:
    """Return the module that has a module's row: the outermost one in a list, or one of a higher level."""
    path = module.split(".")
    numbered = next((place for place, part in enumerate(path) if part.isdecimal()), None)
    return ".".join(path[:_DEPTH] if numbered is None else path[: numbered + 1])


def list_of(module: str) -> str:
    """Return the list that a module is in; else the module itself."""
    last = module.rpartition(".")[2]
    return module.removesuffix(last) if last.isdecimal() else module


def _layout(module: str, parameters: Sequence[ParameterFacts]) -> tuple[object, ...]:
    return tuple((each.name.removeprefix(module), each.shape, each.trainable) for each in parameters)


def joined(names: Sequence[str]) -> str:
    """Return one name: `layers.0-2,5` for `layers.0`, `layers.1`, `layers.2` and `layers.5`."""
    if len(names) == 1:
        return names[0]
    return list_of(names[0]) + ",".join(_runs([int(name.rpartition(".")[2]) for name in names]))


def _runs(numbers: Sequence[int]) -> Iterator[str]:
    for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        adjacent = [number for _, number in run]
        yield "-".join(map(str, dict.fromkeys((adjacent[0], adjacent[-1]))))
