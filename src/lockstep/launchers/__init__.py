"""Runs a command line of Lockstep elsewhere: here all launchers; others are `module:Name` or entry points."""

from __future__ import annotations

from typing import cast

from lockstep.core.closest import hint
from lockstep.core.errors import ConfigError
from lockstep.core.extensions import import_target, instance, registered
from lockstep.core.protocols import Launcher
from lockstep.core.terminal import shortened

BUILTIN = {
    "aws": ("on new instances of AWS", "--type g6.12xlarge --bucket my-bucket --instance-profile train"),
    "docker": ("in containers of this machine", "--image me/train:1"),
    "kubernetes": ("in pods of a Kubernetes cluster", "--image registry.example/me/train:1 --volume work:/work"),
    "ray": ("on the nodes of a Ray cluster", "--nodes 2 --gpus-per-node 8"),
    "slurm": ("on the nodes of a Slurm cluster", "--nodes 2 --time 4:00:00"),
    "ssh": ("on hosts that ssh reaches, until it ends", "--hosts a,b"),
}
"""Name, also of the module -> the end of a sentence about it, options for an example."""


def summaries() -> dict[str, str]:
    """Return the launchers that have a name."""
    own = {name: f"run the command {place}" for name, (place, _) in BUILTIN.items()}
    return own | {name: f"run the command by {target}" for name, target in registered("launchers").items()}


def introduction(name: str) -> str:
    """Return a launcher's description, and an example."""
    if name not in BUILTIN:
        return f"Runs a command line of Lockstep by {name}."
    place, example = BUILTIN[name]
    line = f"lockstep launch {name} {example} train digits --ranks 2"
    return f"Runs a command line of Lockstep {place}. Example:\n\n  {line}"


def find_launcher(name: str) -> Launcher:
    """Return the launcher of that name, or the one at `module:Name`.

    Raises:
        ConfigError: There is none, or it doesn't implement the protocol.
    """
    places = summaries()
    if not isinstance(name, str) or (":" not in name and name not in places):
        guess = hint(str(name), places) or "; lockstep train --ranks N starts N ranks here"
        message = f"{shortened(name)} is no place to launch at, which are {', '.join(places)}, or module:Name"
        raise ConfigError(f"{message}{guess}")
    if name in BUILTIN:
        return cast("Launcher", import_target(f"lockstep.launchers.{name}:{name.upper()}"))
    return cast("Launcher", instance("launchers", name, {}, Launcher))
