"""A config as a YAML file that loads equal: what the run folder keeps.

    Config  ->  to_plain  ->  {"optim": {"lr": 0.001, ...}}  ->  to_yaml  ->  text

Text is quoted wherever YAML 1.2, as `reading` has it, would take it for something else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from lockstep.config.reading import resolve
from lockstep.config.schema import Config


def to_plain(config: Config) -> dict[str, Any]:
    """Mappings, lists, numbers, text: what JSON can hold."""
    return config.model_dump(mode="json")


def to_yaml(config: Config) -> str:
    """Every value of the config, defaults too, in the order of the schema."""
    return plain_yaml(to_plain(config))


def plain_yaml(values: Mapping[str, Any]) -> str:
    """Values as a config holds them, as YAML that `reading` reads back."""
    return yaml.dump(dict(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


class _Dumper(yaml.SafeDumper):
    """Quotes by our reading, which isn't PyYAML's: `1e5` is a number here."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    plain = isinstance(resolve(text), str)
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if plain else "'")


_Dumper.add_representer(str, _text)
