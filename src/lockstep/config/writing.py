"""Writes a config as a YAML file that loads equal; for the run folder, without secrets.

Text is quoted wherever `reading` (YAML 1.2) would read another type.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, cast

import yaml

from lockstep.config.reading import resolve
from lockstep.config.schema import Config
from lockstep.core.secrets import HIDDEN, hidden_setting, is_harmless_variable, without_secrets


def to_plain(config: Config) -> dict[str, Any]:
    """Return the config with defaults as JSON values."""
    return config.model_dump(mode="json")


def to_public(config: Config) -> dict[str, Any]:
    """Return the same without secrets, for a run's folder and its checkpoints."""
    return cast("dict[str, Any]", _public(to_plain(config), (), []))


def hidden_in(config: Config) -> list[tuple[tuple[str, ...], str]]:
    """Return path and value of each text that `to_public` hides, whole or in part."""
    hidden: list[tuple[tuple[str, ...], str]] = []
    _public(to_plain(config), (), hidden)
    return hidden


def _public(value: Any, path: tuple[str, ...], hidden: list[tuple[tuple[str, ...], str]]) -> Any:
    """Return a value without secrets; add path and value of each secret to `hidden`."""
    if isinstance(value, dict):
        return {key: _public(item, (*path, str(key)), hidden) for key, item in value.items()}
    if isinstance(value, list):
        return [_public(item, (*path, str(number)), hidden) for number, item in enumerate(value)]
    if not isinstance(value, str):
        return value
    shown = _shown(value, path)
    if shown != value:
        hidden.append((path, value))
    return shown


@lru_cache(maxsize=1024)  # a run writes its config again and again, and each text takes a dozen searches
def _shown(text: str, path: tuple[str, ...]) -> str:
    if path[:2] == ("launch", "environment"):
        return without_secrets(text) if is_harmless_variable(path[2]) else HIDDEN
    name = next((key for key in reversed(path) if not key.isdecimal()), "")
    return hidden_setting(name, text)


def plain_yaml(values: Mapping[str, Any]) -> str:
    """Return a config's plain values as YAML that `reading` reads back."""
    return yaml.dump(dict(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]  # libyaml's is six times faster
    """A dumper that quotes for YAML 1.2, where `1e5` is a number."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    plain = isinstance(resolve(text), str)
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if plain else "'")


_Dumper.add_representer(str, _text)
