"""All launchers: a line for each of Lockstep's; users add launchers without one.

lockstep launch slurm                  an object listed here
lockstep launch my_package:LAUNCHER    an object by `module:Name`, or `file.py:Name`
lockstep launch mine                   an object that an installed package declares as an entry point of the group
                                       `lockstep.launchers`
"""

from __future__ import annotations

from typing import cast

from lockstep.core.extensions import import_target, instance, registered
from lockstep.core.protocols import Launcher

BUILTIN = {
    "kubernetes": ("lockstep.launchers.kubernetes:KUBERNETES", "in pods of a Kubernetes cluster"),
    "slurm": ("lockstep.launchers.slurm:SLURM", "on the nodes of a Slurm cluster"),
    "ssh": ("lockstep.launchers.ssh:SSH", "on hosts that ssh reaches, until it ends"),
}
"""Name -> where the launcher is, and the end of a sentence about it."""


def summaries() -> dict[str, str]:
    """Return the launchers that have a name."""
    own = {name: f"run the command {text}" for name, (_, text) in BUILTIN.items()}
    return own | {name: f"run the command by {target}" for name, target in registered("launchers").items()}


def find_launcher(name: str) -> Launcher:
    """Return the launcher of that name, or the one that `module:Name` names.

    Raises:
        ConfigError: There is none, or it doesn't implement the protocol.
    """
    if name in BUILTIN:
        return cast("Launcher", import_target(BUILTIN[name][0]))
    return cast("Launcher", instance("launchers", name, {}, Launcher))
