"""Lists what a config demands that can run code: imports, environment variables, code that transformers loads.

model.target, objective.target, optim.target, data...target, data...collate    imported, which runs it
model.architecture: auto_map, ..._implementation with a /           transformers loads code by these
launch.environment                                                  LD_PRELOAD and others make a process run code
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from lockstep.core.secrets import is_harmless_variable
from lockstep.core.terminal import plain_line
from lockstep.core.tracking import TRACKERS

if TYPE_CHECKING:
    from lockstep.config.schema import Config, Extension

GIVEN = "given"  # stands in a config for an object that is passed in Python
_LOADS_CODE = re.compile(r"auto_map|custom_pipelines|kernel_config|use_kernels|\w*_implementation")


def printable(text: str) -> str:
    return text if text.isprintable() else plain_line(text)


def demands(config: Config) -> Iterator[tuple[str, str]]:
    """Yield each key that makes other people's code run, or could, and what it demands."""
    yield from code_in(config)
    if config.model.kind == "huggingface":
        yield from _of_architecture("model.architecture", config.model.architecture or {})
    for name, value in config.launch.environment.items():
        if not is_harmless_variable(name):
            yield f"launch.environment.{name}", f"{value} (a variable can make a process run code)"


def code_in(config: Config) -> Iterator[tuple[str, str]]:
    """Yield each key that names code to import, and its target."""
    if config.model.kind == "custom":
        yield "model.target", config.model.target
    if config.objective.target is not None:
        yield "objective.target", config.objective.target
    if config.optim.target is not None:
        yield "optim.target", config.optim.target
    if ":" in config.parallel.strategy:
        yield "parallel.strategy", config.parallel.strategy
    evaluation = {f"data.evaluation.{name}": section for name, section in config.data.evaluation.items()}
    for key, section in {"data.train": config.data.train, **evaluation}.items():
        if section.kind == "custom":
            yield f"{key}.target", section.target
            if section.collate is not None:
                yield f"{key}.collate", section.collate
    for key, extension in extensions_in(config):
        if extension.target != GIVEN and not (key.startswith("monitor.trackers[") and extension.target in TRACKERS):
            yield f"{key}.target", extension.target


def extensions_in(config: Config) -> Iterator[tuple[str, Extension]]:
    """Yield each key whose section names a monitor, a transform, a tracker or a storage."""
    lists = {
        "monitors": config.monitors,
        "transforms": config.transforms,
        "monitor.trackers": config.monitor.trackers,
    }
    for name, sections in lists.items():
        for index, section in enumerate(sections):
            yield f"{name}[{index}]", section
    if config.checkpoint.storage is not None:
        yield "checkpoint.storage", config.checkpoint.storage


def _of_architecture(key: str, values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield keys by which transformers loads code; an `attn_implementation` with a / is a repository of kernels."""
    for name, value in values.items():
        place = f"{key}.{name}"
        if _LOADS_CODE.fullmatch(str(name)) and not (str(name).endswith("_implementation") and "/" not in str(value)):
            yield place, f"{value} (transformers loads code by it)"
        elif isinstance(value, Mapping):
            yield from _of_architecture(place, value)
