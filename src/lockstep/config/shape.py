"""The values that a key may have, derived from the schema once: for fitting values, for error messages, and for
the reference page.

    micro_size: Positive | Literal["auto"]   -->   Shape(whole=Range(above=0), choices=("auto",))
    train: Annotated[A | B, discriminator]   -->   Shape(kinds={"stdlib-text": A, "digits": B})
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from lockstep.config.every import Every
from lockstep.config.schema import Config, Parallel
from lockstep.strategies.registry import names, strategies


@dataclass(frozen=True, slots=True)
class Range:
    """Bounds of a number; None: none."""

    above: float | None = None
    least: float | None = None
    below: float | None = None
    most: float | None = None


@dataclass(frozen=True, slots=True)
class ValueShape:
    """The values that a key may have.

    Attributes:
        nullable: null is allowed.
        anything: no rule at all.
        boolean, text, interval: true or false; text; an interval such as `100 steps`.
        choices: words of a fixed list.
        whole, real: bounds of a whole number, of any number.
        section: keys of this section.
        kinds: keys of the section that `kind` names.
        values: a mapping of free names to this.
        items: a list of this.
        length: of that list, if it is fixed.
    """

    nullable: bool = False
    anything: bool = False
    boolean: bool = False
    text: bool = False
    interval: bool = False
    choices: tuple[str, ...] = ()
    whole: Range | None = None
    real: Range | None = None
    section: type[BaseModel] | None = None
    kinds: Mapping[str, type[BaseModel]] = field(default_factory=dict)
    values: ValueShape | None = None
    items: ValueShape | None = None
    length: int | None = None

    def sections(self) -> tuple[type[BaseModel], ...]:
        """All sections that may stand here."""
        return (self.section,) if self.section else tuple(self.kinds.values())

    def select(self, kind: object) -> type[BaseModel] | None:
        """The section that stands here, given the `kind` that was written."""
        return self.section or (self.kinds.get(kind) if isinstance(kind, str) else None)


ANYTHING = ValueShape(anything=True)


@cache
def root() -> ValueShape:
    """The whole config."""
    return ValueShape(section=Config)


def fields(section: type[BaseModel]) -> Mapping[str, ValueShape]:
    """Return the keys of a section, with the options of registered strategies."""
    if section is not Parallel:
        return _declared(section)
    declared = {**_declared(section), "strategy": ValueShape(choices=names())}
    registered = {one.section: ValueShape(section=one.options) for one in strategies() if one.options is not None}
    return {**declared, **{key: options for key, options in registered.items() if key not in declared}}


@cache
def _declared(section: type[BaseModel]) -> Mapping[str, ValueShape]:
    return {name: _shape(info.annotation, info.metadata) for name, info in section.model_fields.items()}


def required(section: type[BaseModel]) -> tuple[str, ...]:
    return tuple(name for name, info in section.model_fields.items() if info.is_required())


def all_keys(shape: ValueShape | None = None, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Dotted keys of all that can be asked, over all kinds; `NAME` stands for a free name."""
    shape = shape or root()
    if shape.values and shape.values.sections():
        yield from all_keys(shape.values, (*path, "NAME"))
    for section in shape.sections():
        for name, inner in fields(section).items():
            yield (*path, name)
            yield from all_keys(inner, (*path, name))


def _shape(annotation: Any, metadata: typing.Iterable[object] = ()) -> ValueShape:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _shape(arguments[0], [*_flat(arguments[1:]), *metadata])
    if origin in (Union, types.UnionType):
        return _join([_shape(member, metadata) for member in arguments])
    if origin is Literal:
        return ValueShape(choices=arguments)
    if origin is tuple:
        fixed = None if arguments[-1] is Ellipsis else len(arguments)
        return ValueShape(items=_shape(arguments[0]), length=fixed)
    if origin is dict:
        return ValueShape(values=_shape(arguments[1]))
    return _simple(annotation, metadata)


def _simple(annotation: Any, metadata: typing.Iterable[object]) -> ValueShape:
    if annotation is Any:
        return ANYTHING
    if annotation in (None, type(None)):
        return ValueShape(nullable=True)
    if annotation is bool:
        return ValueShape(boolean=True)
    if annotation is int:
        return ValueShape(whole=_range(metadata))
    if annotation is float:
        return ValueShape(real=_range(metadata))
    if annotation is str:
        return ValueShape(text=True)
    if annotation is Every:
        return ValueShape(interval=True)
    return ValueShape(section=annotation)


def _join(shapes: list[ValueShape]) -> ValueShape:
    sections = [shape.section for shape in shapes if shape.section]
    kinds = {fields(section)["kind"].choices[0]: section for section in sections} if len(sections) > 1 else {}
    joined = ValueShape(
        nullable=any(shape.nullable for shape in shapes),
        anything=any(shape.anything for shape in shapes),
        boolean=any(shape.boolean for shape in shapes),
        text=any(shape.text for shape in shapes),
        interval=any(shape.interval for shape in shapes),
        choices=tuple(choice for shape in shapes for choice in shape.choices),
        kinds=kinds,
        section=sections[0] if len(sections) == 1 else None,
    )
    for shape in shapes:
        joined = replace(
            joined,
            whole=joined.whole or shape.whole,
            real=joined.real or shape.real,
            values=joined.values or shape.values,
            items=joined.items or shape.items,
            length=joined.length or shape.length,
        )
    return joined


def _flat(metadata: typing.Iterable[object]) -> list[object]:
    """`Field(gt=0)` inside Annotated holds its bounds one level deeper."""
    return [item for each in metadata for item in (each.metadata if isinstance(each, FieldInfo) else [each])]


def _range(metadata: typing.Iterable[object]) -> Range:
    bounds = Range()
    for item in metadata:
        match item:
            case Gt():
                bounds = replace(bounds, above=_float(item.gt))
            case Ge():
                bounds = replace(bounds, least=_float(item.ge))
            case Lt():
                bounds = replace(bounds, below=_float(item.lt))
            case Le():
                bounds = replace(bounds, most=_float(item.le))
    return bounds


def _float(bound: object) -> float:
    assert isinstance(bound, int | float)
    return bound
