"""The modes that are measured: ways to save memory, by name, as sections `memory` of a config.

full   -->   memory: {activation_checkpointing: {mode: full}}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.config.schema import Config, Memory
from lockstep.core.closest import did_you_mean
from lockstep.core.errors import ConfigError

MODES: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "full": {"activation_checkpointing": {"mode": "full"}},
    "full-every-2": {"activation_checkpointing": {"mode": "full", "every": 2}},
    "selective": {"activation_checkpointing": {"mode": "selective"}},
    "segments": {"activation_checkpointing": {"mode": "segments"}},
    "budget": {"activation_checkpointing": {"mode": "budget"}},
    "loss-chunk": {"loss_chunk": 256},
    "offload": {"activation_offload": "cpu"},
    "full+offload": {"activation_checkpointing": {"mode": "full"}, "activation_offload": "cpu"},
    "full+loss-chunk": {"activation_checkpointing": {"mode": "full"}, "loss_chunk": 256},
}


OWN = "yours"
"""The mode that the config itself sets."""


def configs(config: Config, names: str) -> dict[str, Config]:
    """Return a config for each mode. `none`, with which all are compared, comes first even if it isn't named.

    Args:
        names: Modes separated by commas, or `all`.

    Raises:
        ConfigError: There is no such mode.
    """
    known = {
        name: config.model_copy(update={"memory": Memory.model_validate(section)}) for name, section in MODES.items()
    }
    if config.memory != Memory():
        known[OWN] = config
    chosen = list(known) if names == "all" else [name.strip() for name in names.split(",")]
    for name in chosen:
        if name not in known:
            raise ConfigError(f"--modes: there is no mode {name!r}; {did_you_mean(name, known)}")
    return {name: known[name] for name in dict.fromkeys(["none", *chosen])}
