"""A value from the command line; parsing a command line needs no schema."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Override:
    """A value for one key, from a flag or from Python.

    Attributes:
        text: As typed; None if there was none: `true` for boolean keys.
        where: Its name in messages; empty: the flag.
    """

    key: str
    text: str | None
    where: str = ""

    @classmethod
    def parse(cls, text: str) -> Override:
        """Parse `--section.key=value`, `section.key=value` or `--section.key`."""
        key, equals, value = text.removeprefix("--").partition("=")
        return cls(key, value if equals else None)

    @property
    def place(self) -> str:
        return self.where or f"--{self.key}"
