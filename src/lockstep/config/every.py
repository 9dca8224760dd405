"""An interval: a number and a unit, such as `100 steps`, `1 epoch`, `2.5 minutes`, `1M tokens`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal, get_args

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import core_schema

Unit = Literal["steps", "samples", "tokens", "minutes", "epochs"]
_UNITS: dict[str, Unit] = {"": "steps", "min": "minutes", "mins": "minutes"}
_UNITS |= {word: unit for unit in get_args(Unit) for word in (unit, unit[:-1])}
_MAGNITUDES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "t": 10**12}
_PATTERN = re.compile(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)\s*([kmgbt]?)\s*([a-z]*)\s*", re.IGNORECASE)
_EXAMPLES = "write a number of steps (100), or '100 steps', '64k samples', '1M tokens', '5 minutes', '0.5 epochs'"


@dataclass(frozen=True, slots=True)
class Every:
    """An interval, such as 100 steps or 30 minutes.

    Attributes:
        number: Above 0; whole for steps, samples and tokens.
    """

    number: float
    unit: Unit

    def __str__(self) -> str:
        number = int(self.number) if float(self.number).is_integer() else self.number
        return f"{number} {self.unit if number != 1 else self.unit[:-1]}"

    @classmethod
    def parse(cls, value: object) -> Every:
        """Parse 100 or '100 steps'. Raises ValueError that lists the valid forms."""
        if isinstance(value, Every):
            return value
        valid = isinstance(value, int | str) and not isinstance(value, bool)
        match = _PATTERN.fullmatch(str(value)) if valid else None
        if match is None:
            raise ValueError(f"{value!r} is not an interval; {_EXAMPLES}")
        digits, magnitude, word = (group.lower() for group in match.groups())
        unit = _UNITS.get(word)
        if unit is None and magnitude and magnitude + word in _UNITS:  # "5 minutes": the m is not a million
            magnitude, unit = "", _UNITS[magnitude + word]
        if unit is None:
            raise ValueError(f"{value!r} has an unknown unit; {_EXAMPLES}")
        number = float(digits.replace("_", "")) * _MAGNITUDES[magnitude]
        if number <= 0:
            raise ValueError(f"{value!r} must be more than 0; to switch it off, write null")
        if unit in ("steps", "samples", "tokens") and not number.is_integer():
            raise ValueError(f"{value!r}: {unit} are whole; the nearest is {max(1, round(number))} {unit}")
        return cls(number, unit)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        written = core_schema.plain_serializer_function_ser_schema(str)
        return core_schema.no_info_plain_validator_function(cls.parse, serialization=written)

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {
            "anyOf": [
                {"type": "integer", "exclusiveMinimum": 0, "description": "a number of steps"},
                {"type": "string", "pattern": r"^\s*[0-9][0-9_.]*\s*[kKmMgGbBtT]?\s*[a-z]*\s*$"},
            ],
            "examples": [100, "500 steps", "64k samples", "1M tokens", "5 minutes", "1 epoch"],
        }
