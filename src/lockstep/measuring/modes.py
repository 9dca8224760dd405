"""What is measured: ways to save memory, by name, as sections `memory` of a config.

full   -->   memory: {activation_checkpointing: {mode: full}}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.config.schema import Config, Memory
from lockstep.core.closest import closest_match
from lockstep.core.errors import ConfigError


def _checkpointing(mode: str, **options: Any) -> dict[str, Any]:
    return {"activation_checkpointing": {"mode": mode, **options}}


_CHUNK = {"loss_chunk": 256}

MODES: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "full": _checkpointing("full"),
    "full-every-2": _checkpointing("full", every=2),
    "selective": _checkpointing("selective"),
    "segments": _checkpointing("segments"),
    "budget": _checkpointing("budget"),
    "loss-chunk": _CHUNK,
    "offload": {"activation_offload": "cpu"},
    "full+offload": {**_checkpointing("full"), "activation_offload": "cpu"},
    "full+loss-chunk": {**_checkpointing("full"), **_CHUNK},
}


OWN = "yours"
"""What the config itself says of memory."""


def configs(config: Config, names: str) -> dict[str, Config]:
    """By mode. `none`, which all are compared with, comes first, asked for or not.

    Raises:
        ConfigError: there is no such mode.
    """
    own = {} if config.memory == Memory() else {OWN: config}
    known = {**{name: _with(config, section) for name, section in MODES.items()}, **own}
    asked = list(known) if names == "all" else [name.strip() for name in names.split(",")]
    for name in asked:
        if name not in known:
            near = closest_match(name, known)
            said = f"did you mean {near}?" if near else f"there are {', '.join(known)}"
            raise ConfigError(f"--modes: there is no mode {name!r}; {said}")
    return {name: known[name] for name in dict.fromkeys(["none", *asked])}


def _with(config: Config, section: Mapping[str, Any]) -> Config:
    """The config's own ways to save memory replaced."""
    return config.model_copy(update={"memory": Memory.model_validate(section)})
