"""Code that a config names. Whoever builds the model of somebody else's run runs it.

model.target, objective.target, data...target, data...collate      imported, which runs it
launch.environment                                                  LD_PRELOAD and its like make a process run it
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lockstep.core.errors import ConfigError

if TYPE_CHECKING:
    from lockstep.config.schema import Config, DataSource

_HARMLESS = ("CUDA_VISIBLE_DEVICES", "MKL_NUM_THREADS", "NCCL_DEBUG", "OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM")
"""Variables that can't: too many can, under names that only their libraries know, to list those."""


def code_named_by(config: Config) -> tuple[str, ...]:
    """Each key that names code, and the code: `model.target: mine.py:Net`."""
    return tuple(f"{key}: {code if code.isprintable() else repr(code)}" for key, code in _named(config))


def refuse_untrusted(config: Config) -> None:
    """Raises ConfigError if the config names any code."""
    named = code_named_by(config)
    if named:
        shown = "".join(f"\n  {one}" for one in named)
        raise ConfigError(
            f"the config of this run names code, which would run here:{shown}\n"
            "--trust-run lets it, if you trust whoever made the run"
        )


def _named(config: Config) -> Iterator[tuple[str, str]]:
    if config.model.kind == "custom":
        yield "model.target", config.model.target
    if config.objective.target is not None:
        yield "objective.target", config.objective.target
    yield from _of_data("data.train", config.data.train)
    for name, section in config.data.evaluation.items():
        yield from _of_data(f"data.evaluation.{name}", section)
    for name, value in config.launch.environment.items():
        if name not in _HARMLESS:
            yield f"launch.environment.{name}", f"{value} (a variable can make a process run code)"


def _of_data(key: str, section: DataSource) -> Iterator[tuple[str, str]]:
    if section.kind != "custom":
        return
    yield f"{key}.target", section.target
    if section.collate is not None:
        yield f"{key}.collate", section.collate
