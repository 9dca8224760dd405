"""What a config asks of whoever uses it: code to import, variables to set, folders to write to.

model.target, objective.target, optim.target, data...target, data...collate    imported, which runs it
model.architecture: auto_map, ..._implementation with a /           transformers loads code by these
launch.environment                                                  LD_PRELOAD and its like make a process run code
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from lockstep.core.secrets import is_harmless_variable
from lockstep.core.terminal import plain_line

if TYPE_CHECKING:
    from lockstep.config.schema import Config, DataSource, Extension


GIVEN = "given"  # stands in a config for an object that is passed in Python


def code_named_by(config: Config) -> tuple[str, ...]:
    """Each key that names code or sets a variable, and what: `model.target: mine.py:Net`."""
    return tuple(f"{key}: {printable(what)}" for key, what in demands(config))


def printable(text: str) -> str:
    return text if text.isprintable() else plain_line(text)


def demands(config: Config) -> Iterator[tuple[str, str]]:
    """Each key that makes somebody else's code run, or could, and what it asks for."""
    yield from code_in(config)
    if config.model.kind == "huggingface":
        yield from _of_architecture("model.architecture", config.model.architecture or {})
    for name, value in config.launch.environment.items():
        if not is_harmless_variable(name):
            yield f"launch.environment.{name}", f"{value} (a variable can make a process run code)"


def code_in(config: Config) -> Iterator[tuple[str, str]]:
    """Each key that names code to import, and its target."""
    if config.model.kind == "custom":
        yield "model.target", config.model.target
    if config.objective.target is not None:
        yield "objective.target", config.objective.target
    if config.optim.target is not None:
        yield "optim.target", config.optim.target
    if ":" in config.parallel.strategy:
        yield "parallel.strategy", config.parallel.strategy
    yield from _of_data("data.train", config.data.train)
    for name, section in config.data.evaluation.items():
        yield from _of_data(f"data.evaluation.{name}", section)
    for key, extension in extensions_in(config):
        if extension.target != GIVEN:
            yield f"{key}.target", extension.target


def extensions_in(config: Config) -> Iterator[tuple[str, Extension]]:
    """Yield each key whose section names a monitor, a transform or a storage."""
    for index, section in enumerate(config.monitors):
        yield f"monitors[{index}]", section
    for index, section in enumerate(config.transforms):
        yield f"transforms[{index}]", section
    if config.checkpoint.storage is not None:
        yield "checkpoint.storage", config.checkpoint.storage


def _of_data(key: str, section: DataSource) -> Iterator[tuple[str, str]]:
    if section.kind != "custom":
        return
    yield f"{key}.target", section.target
    if section.collate is not None:
        yield f"{key}.collate", section.collate


_LOADS_CODE = re.compile(r"auto_map|custom_pipelines|kernel_config|use_kernels|\w*_implementation")


def _of_architecture(key: str, values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """`attn_implementation: flash_attention_2` is the library's own; with a / it is a repository of kernels."""
    for name, value in values.items():
        place = f"{key}.{name}"
        if _LOADS_CODE.fullmatch(str(name)) and not (str(name).endswith("_implementation") and "/" not in str(value)):
            yield place, f"{value} (transformers loads code by it)"
        elif isinstance(value, Mapping):
            yield from _of_architecture(place, value)
