"""All strategies: a line for each of Lockstep's, and those that users register.

parallel.strategy: fsdp                  a record listed here
parallel.strategy: my_package:STRATEGY   a record by `module:Name`, or `file.py:Name`
parallel.strategy: mine                  registered by `lockstep.extend.register_strategy`, or by an entry point of the
                                         group `lockstep.strategies`
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, get_args

from pydantic import AfterValidator, BaseModel, ValidationError, WithJsonSchema
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError

from lockstep.core.errors import ConfigError, Problem
from lockstep.strategies.ddp import STRATEGY as DDP
from lockstep.strategies.deepspeed import STRATEGY as DEEPSPEED
from lockstep.strategies.dp import STRATEGY as DP
from lockstep.strategies.fsdp import STRATEGY as FSDP
from lockstep.strategies.partitions import AXES, PARTITIONS, partitions_of
from lockstep.strategies.record import MeshKind, Partition, RunLayout, Strategy
from lockstep.strategies.single import STRATEGY as SINGLE

if TYPE_CHECKING:
    from lockstep.config.schema import Parallel

BUILTIN = (SINGLE, DP, DDP, FSDP, DEEPSPEED)
AUTO = "auto"
REFERENCE = next(strategy for strategy in BUILTIN if strategy.exactness.reference)
PLAIN = next(strategy for strategy in BUILTIN if strategy.variants[0].implied)
"""The strategy that a name of a product leaves out."""
_KEY = "parallel.strategy"
_strategies = {strategy.name: strategy for strategy in BUILTIN}
_written: dict[str, str] = {}


def register_strategy(strategy: Strategy) -> None:
    """Register a strategy for `parallel.strategy`. Call it at the top of a module, so that all ranks do.

    Raises:
        ConfigError: Another strategy or variant has its name; or the record is wrong.
    """
    for variant in strategy.variants:
        if variant.mesh not in get_args(MeshKind):
            meshes = ", ".join(map(repr, get_args(MeshKind)))
            raise ConfigError(Problem("", _KEY, f"{variant.name} has mesh {variant.mesh!r}; it is one of {meshes}"))
    for known in _strategies.values():
        names = {known.name, *(variant.name for variant in known.variants)}
        shared = names & {strategy.name, AUTO, *(variant.name for variant in strategy.variants)}
        if shared and known != strategy and not (known.name == strategy.name and known.build == strategy.build):
            raise ConfigError(Problem("", _KEY, f"there is a strategy {min(shared)} already; give yours another name"))
    _strategies[strategy.name] = strategy


def strategies() -> tuple[Strategy, ...]:
    """Return all strategies that are registered in this process, Lockstep's first."""
    return tuple(_strategies.values())


def names() -> tuple[str, ...]:
    """Return the valid values of `parallel.strategy`, without `module:Name`."""
    return (AUTO, *_strategies)


def _known(name: str) -> str:
    """Check a name without importing the code that it names."""
    from lockstep.core.extensions import registered

    if name in names() or ":" in name or name in registered("strategies"):
        return name
    raise PydanticCustomError("literal_error", "there is no such strategy")


StrategyName = Annotated[
    str,
    AfterValidator(_known),
    WithJsonSchema({"anyOf": [{"enum": list(names())}, {"pattern": ".+:.+", "type": "string"}]}),
]


def option_sections() -> dict[str, type[BaseModel]]:
    """Return the options of registered strategies by their keys in section `parallel`."""
    return {strategy.section: strategy.options for strategy in strategies() if strategy.options is not None}


def checked_options(strategy: str, written: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of registered strategies, checked, by their keys in section `parallel`.

    Args:
        written: Every key that the section itself doesn't have.

    Raises:
        ValidationError: A key is unknown, or an option is wrong.
    """
    sections = option_sections()
    checked, errors = dict(written), list[InitErrorDetails]()
    for key, value in written.items():
        if key in sections:
            try:
                checked[key] = value if isinstance(value, BaseModel) else sections[key].model_validate(value)
            except ValidationError as error:
                errors += [_inside(key, details) for details in error.errors()]
        elif strategy in names() or not isinstance(value, Mapping):
            errors.append(InitErrorDetails(type="extra_forbidden", loc=(key,), input=value))
    if errors:
        raise ValidationError.from_exception_data("Parallel", errors)
    return checked


def _inside(key: str, details: ErrorDetails) -> InitErrorDetails:
    kind = PydanticCustomError(details["type"], details["msg"].replace("{", "{{"), details.get("ctx"))
    return InitErrorDetails(type=kind, loc=(key, *details["loc"]), input=details["input"])


def find_strategy(name: str) -> Strategy:
    """Return the strategy that `parallel.strategy` names; import and register it if necessary. Raises ConfigError."""
    if name in _strategies:
        return _strategies[name]
    from lockstep.core.extensions import load

    strategy = load("strategies", name, key=_KEY, builtin=names())
    if not isinstance(strategy, Strategy):
        why = f"{name} is a {type(strategy).__name__}; a strategy is a lockstep.extend.Strategy"
        raise ConfigError(Problem("", _KEY, why))
    register_strategy(strategy)
    _written[strategy.name] = name
    return strategy


def written_name(strategy: Strategy) -> str:
    """Return the strategy's name for configs in other processes."""
    return _written.get(strategy.name, strategy.name)


def uses_ranks(name: str) -> bool:
    """Return whether the strategy that `parallel.strategy` names uses a process group, even on one rank."""
    return name != AUTO and not find_strategy(name).combines.one_process


# --- which strategies and partitions combine ------------------------------------------------------------------------


def layout_of(parallel: Parallel, strategy: Strategy) -> RunLayout:
    """Return the layout of a run, given the strategy that `auto` has chosen."""
    return RunLayout(partitions_of(parallel), strategy, strategy.variant(parallel))


def layouts() -> dict[str, RunLayout]:
    """Return every layout of `verify` and the feature table by name: variants, partitions, tested products."""
    return {layout.name: layout for layout in _layouts()}


def _layouts() -> Iterator[RunLayout]:
    for strategy in strategies():
        for variant in strategy.variants:
            yield RunLayout((), strategy, variant)
    products: list[Partition] = []
    for axis in AXES:
        of_axis = [partition for partition in PARTITIONS if partition.axis == axis]
        yield from (RunLayout((partition,), PLAIN, PLAIN.variants[0]) for partition in of_axis)
        for partition in of_axis:
            if not partition.product:
                continue
            partition = replace(partition, parallel={**partition.parallel, axis: 2})
            for strategy in strategies():
                if axis in strategy.combines.verified_axes:
                    yield RunLayout((partition,), strategy, strategy.variants[0])
            if partition.divides_model:
                yield from (RunLayout((other, partition), PLAIN, PLAIN.variants[0]) for other in products)
                products.append(partition)
