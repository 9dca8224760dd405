"""Flags for the fields of a frozen section, as of a launcher's options.

    gpus_per_node: str | None = None      -->   --gpus-per-node TEXT
    exclusive: bool = False               -->   --exclusive
    requeue: bool = True                  -->   --no-requeue
    module: tuple[str, ...] = ()          -->   --module TEXT, which may be repeated

The help is the string below the field.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, ValidationError

from lockstep.config import shape
from lockstep.config.reference import description
from lockstep.config.shape import ValueShape
from lockstep.config.wording import expectation
from lockstep.core.errors import ConfigError, Problem
from lockstep.core.terminal import shortened


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
        first: dict[str, Problem] = {}  # a union has an error for each of its parts
        for each in error.errors():
            name, message = str(each["loc"][0]) if each["loc"] else "", each["msg"]
            if name in values:
                reason = _reason(shape.fields(section)[name], each["type"], message)
                message = f"{shortened(getattr(args, name))} {reason}"
            first.setdefault(name, Problem(_flag(name) if name else "", "", message))
        raise ConfigError([*first.values()]) from None


def _reason(at: ValueShape, kind: str, message: str) -> str:
    valid = expectation(replace(at, nullable=False))
    if kind == "value_error" or valid == "a value":
        return f"is refused: {message.removeprefix('Value error, ')}"
    return f"is not {valid}"


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _metavar(at: ValueShape) -> str | None:
    if at.whole or at.real:
        return "|".join(["N", *map(str, at.choices)])
    return None if at.choices else "TEXT"


def _converted(text: str, at: ValueShape) -> object:
    for number in [int] * (at.whole is not None) + [float] * (at.real is not None):
        try:
            return number(text)
        except ValueError:
            continue
    return text
