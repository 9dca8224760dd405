"""Flags for the fields of a frozen section, as of a launcher's options.

    gpus_per_node: str | None = None      -->   --gpus-per-node TEXT
    exclusive: bool = False               -->   --exclusive
    requeue: bool = True                  -->   --no-requeue
    module: tuple[str, ...] = ()          -->   --module TEXT, which may be repeated

The help is the string below the field.
"""

from __future__ import annotations

import argparse
from typing import Any

from pydantic import BaseModel, ValidationError

from lockstep.config import shape
from lockstep.config.reference import description
from lockstep.config.shape import ValueShape
from lockstep.config.wording import expectation
from lockstep.core.errors import ConfigError, Problem


def add_section(parser: argparse.ArgumentParser, section: type[BaseModel]) -> None:
    """Add a flag for each field of the section."""
    for name, at in shape.fields(section).items():
        default = section.model_fields[name].default
        text = " ".join(description(section, name).split()).replace("%", "%%")
        if at.boolean and not at.text:
            flag = _flag(f"no_{name}" if default is True else name)
            text = f"don't: {text[:1].lower()}{text[1:]}" if default is True else text
            parser.add_argument(flag, action="store_true", dest=name, help=text)
        elif at.items:
            parser.add_argument(_flag(name), action="append", dest=name, metavar="TEXT", help=text)
        else:
            choices = at.choices if at.choices and not at.whole and not at.text else None
            parser.add_argument(_flag(name), dest=name, choices=choices, metavar=_metavar(at), help=text)


def section_of(args: argparse.Namespace, section: type[BaseModel]) -> BaseModel:
    """Return the section with the values of its flags. Raises ConfigError."""
    values: dict[str, Any] = {}
    for name, at in shape.fields(section).items():
        value = getattr(args, name)
        if value is None or value is False:
            continue
        if at.boolean and not at.text:
            values[name] = section.model_fields[name].default is not True
        elif at.items:
            values[name] = tuple(value)
        else:
            values[name] = _converted(value, at)
    try:
        return section.model_validate(values)
    except ValidationError as error:
        problems = [_problem(section, str(each["loc"][0]), each["msg"], args) for each in error.errors()]
        raise ConfigError(list(dict.fromkeys(problems))) from None  # a union has an error for each of its parts


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _metavar(at: ValueShape) -> str | None:
    if at.whole or at.real:
        return "|".join(["N", *map(str, at.choices)])
    return None if at.choices else "TEXT"


def _converted(text: str, at: ValueShape) -> object:
    """Return a number where one is valid; the section refuses what isn't."""
    for number in [int] * (at.whole is not None) + [float] * (at.real is not None):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def _problem(section: type[BaseModel], name: str, message: str, args: argparse.Namespace) -> Problem:
    at = shape.fields(section)[name]
    valid = expectation(ValueShape(whole=at.whole, real=at.real, choices=at.choices)) if at.whole or at.real else ""
    return Problem(_flag(name), "", f"{getattr(args, name)!r} is not {valid}" if valid else message)
