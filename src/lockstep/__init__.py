"""Lockstep: the same training run under any strategy.

Names are imported when they are first used, so that `import lockstep` takes no time and doesn't import torch: the
command installs its signal handlers right after it.
"""

# This runs first: until the path is safe, nothing may be imported that a file in the working folder could replace, not
# even `__future__`.
from lockstep.core import safe_path  # isort: skip

safe_path.leave_working_folder()

TYPE_CHECKING = False  # importing `typing` would take most of the time
if TYPE_CHECKING:
    from typing import Any

    from lockstep import extend as extend
    from lockstep import loops as loops
    from lockstep.assembly.activation_checkpointing import checkpoint_activations as checkpoint_activations
    from lockstep.assembly.user_objects import Objects as Objects
    from lockstep.config.schema import Config as Config
    from lockstep.core.errors import CollectiveTimeout as CollectiveTimeout
    from lockstep.core.errors import ConfigError as ConfigError
    from lockstep.core.errors import Failure as Failure
    from lockstep.core.errors import RunFailed as RunFailed
    from lockstep.core.errors import VerificationError as VerificationError
    from lockstep.core.failure_kinds import FailureKind as FailureKind
    from lockstep.core.progress import step as step
    from lockstep.core.protocols import Objective as Objective
    from lockstep.core.protocols import Source as Source
    from lockstep.core.records import Batch as Batch
    from lockstep.data.weighted import WeightedDataset as WeightedDataset
    from lockstep.distributed.forward_mode import positions as positions
    from lockstep.distributed.generators import register_generator as register_generator
    from lockstep.interop.importing import import_config as import_config
    from lockstep.launch.outcome import exit_with as exit_with
    from lockstep.loop.session import Session as Session
    from lockstep.models.build import count_parameters as count_parameters
    from lockstep.monitor import metric_log as log
    from lockstep.proof.api import verify as verify
    from lockstep.simulation.planning import estimate as estimate
    from lockstep.simulation.planning import estimate_memory as estimate_memory
    from lockstep.training.api import session as session
    from lockstep.training.api import train as train
    from lockstep.training.job import Finished as Finished

__version__ = "0.1.0"

KEY_HINTS = "lockstep.interop.hints"
"""The module with other tools' keys, which `config.validation_errors` imports when a config has an unknown key."""

_HOMES = {
    name: module
    for module, names in {
        "lockstep.config.schema": "Config",
        "lockstep.core.errors": "CollectiveTimeout ConfigError Failure RunFailed VerificationError",
        "lockstep.core.failure_kinds": "FailureKind",
        "lockstep.core.progress": "step",
        "lockstep.core.protocols": "Objective Source",
        "lockstep.core.records": "Batch",
        "lockstep.data.weighted": "WeightedDataset",
        "lockstep.distributed.forward_mode": "positions",
        "lockstep.distributed.generators": "register_generator",
        "lockstep.interop.importing": "import_config",
        "lockstep.launch.outcome": "exit_with",
        "lockstep.models.build": "count_parameters",
        "lockstep.proof.api": "verify",
        "lockstep.simulation.planning": "estimate estimate_memory",
        "lockstep.assembly.activation_checkpointing": "checkpoint_activations",
        "lockstep.training.api": "session train",
        "lockstep.training.job": "Finished",
        "lockstep.loop.session": "Session",
        "lockstep.assembly.user_objects": "Objects",
    }.items()
    for name in names.split()
}

_MODULES = {"extend": "lockstep.extend", "log": "lockstep.monitor.metric_log", "loops": "lockstep.loops"}
__all__ = ["__version__", "extend", "log", "loops", *sorted(_HOMES)]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> "Any":
    import importlib

    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name in _HOMES:
        from lockstep.core.distribution import why_not_here

        reason = why_not_here()
        if reason is not None:
            raise ImportError(reason)
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"lockstep has no {name!r}; it has {', '.join(__all__)}")
