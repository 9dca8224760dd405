"""The values that a key may have, derived from the schema: to convert values, for messages and the reference page.

micro_size: Positive | Literal["auto"]   -->   ValueShape(whole=Range(gt=0), choices=("auto",))
train: Annotated[A | B, discriminator]   -->   ValueShape(kinds={"stdlib-text": A, "digits": B})
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from lockstep.config.devices import Words
from lockstep.config.every import Every
from lockstep.config.reading import Leaf, Node, Table
from lockstep.config.schema import Config, Parallel
from lockstep.strategies.registry import names, option_sections


@dataclass(frozen=True, slots=True)
class Range:
    """Bounds of a number, under pydantic's names."""

    gt: float | None = None
    ge: float | None = None
    lt: float | None = None
    le: float | None = None


@dataclass(frozen=True, slots=True)
class ValueShape:
    """The values that a key may have.

    Attributes:
        nullable, boolean, text: null, true or false, or text is valid.
        anything: Every value is valid.
        interval: An interval such as `100 steps` is valid.
        choices: Valid words.
        whole, real: Bounds of a whole number, of any number.
        section, kinds: A section is valid, or the one that `kind` names.
        values: A mapping of free names to this is valid.
        items, length: A list of this is valid, of this length if it is fixed.
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
        """Return all valid sections."""
        return (self.section,) if self.section else tuple(self.kinds.values())

    def select(self, node: Node | None) -> type[BaseModel] | None:
        """Return the section that a node's `kind` selects."""
        kind = node.get("kind") if isinstance(node, Table) else None
        word = kind.value if isinstance(kind, Leaf) else None
        return self.section or (self.kinds.get(word) if isinstance(word, str) else None)

    def inside(self, key: str, node: Node | None = None) -> ValueShape:
        """Return the shape of a key's value; the node's `kind` selects among sections."""
        section = self.select(node)
        return fields(section).get(key, ANYTHING) if section is not None else self.values or ANYTHING


ANYTHING = ValueShape(anything=True)


@cache
def root() -> ValueShape:
    """Return the shape of the whole config."""
    return ValueShape(section=Config)


def fields(section: type[BaseModel]) -> Mapping[str, ValueShape]:
    """Return the keys of a section, with the options of registered strategies."""
    declared = _declared(section)
    if section is not Parallel:
        return declared
    registered = {key: ValueShape(section=options) for key, options in option_sections().items()}
    return {
        **declared,
        "strategy": ValueShape(choices=names()),
        **{k: v for k, v in registered.items() if k not in declared},
    }


@cache
def _declared(section: type[BaseModel]) -> Mapping[str, ValueShape]:
    return {name: _shape(info.annotation, info.metadata) for name, info in section.model_fields.items()}


def required(section: type[BaseModel]) -> tuple[str, ...]:
    return tuple(name for name, info in section.model_fields.items() if info.is_required())


def all_keys(shape: ValueShape | None = None, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the paths of all keys, over all kinds; `NAME` stands for a free name."""
    shape = shape or root()
    if shape.values and shape.values.sections():
        yield from all_keys(shape.values, (*path, "NAME"))
    for section in shape.sections():
        for name, inner in fields(section).items():
            yield (*path, name)
            yield from all_keys(inner, (*path, name))


def _shape(annotation: Any, metadata: Iterable[object] = ()) -> ValueShape:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if words := next((item for item in metadata if isinstance(item, Words)), None):
        return ValueShape(choices=words.listed)
    if origin is Annotated:
        inner = [item for each in arguments[1:] for item in (each.metadata if isinstance(each, FieldInfo) else [each])]
        return _shape(arguments[0], [*inner, *metadata])
    if origin in (Union, types.UnionType):
        return _join([_shape(member, metadata) for member in arguments])
    if origin is Literal:
        return ValueShape(choices=arguments)
    if origin is tuple:
        fixed = None if arguments[-1] is Ellipsis else len(arguments)
        return ValueShape(items=_shape(arguments[0]), length=fixed)
    if origin is dict:
        return ValueShape(values=_shape(arguments[1]))
    if annotation in (int, float):
        bounds = [asdict(bound) for bound in metadata if isinstance(bound, Gt | Ge | Lt | Le)]
        limits = Range(**{name: value for bound in bounds for name, value in bound.items()})
        return ValueShape(whole=limits) if annotation is int else ValueShape(real=limits)
    return _SIMPLE.get(annotation) or ValueShape(section=annotation)


_SIMPLE: Mapping[Any, ValueShape] = {
    Any: ANYTHING,
    None: ValueShape(nullable=True),
    type(None): ValueShape(nullable=True),
    bool: ValueShape(boolean=True),
    str: ValueShape(text=True),
    Every: ValueShape(interval=True),
}


def _join(shapes: list[ValueShape]) -> ValueShape:
    joined = ValueShape()
    for shape in shapes:
        values = {name: getattr(joined, name) or getattr(shape, name) for name in ValueShape.__slots__}
        joined = replace(joined, **{**values, "choices": joined.choices + shape.choices})
    sections = [shape.section for shape in shapes if shape.section]
    kinds = {fields(section)["kind"].choices[0]: section for section in sections} if len(sections) > 1 else {}
    return replace(joined, section=None, kinds=kinds) if kinds else joined
