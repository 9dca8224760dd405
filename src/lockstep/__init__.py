"""Lockstep: the same training run under any strategy.

Names load what they need when they are first used, so that `import lockstep` costs no torch, and next to no time: the
command handles signals right after it.
"""

# The first thing that runs: until the path is safe, nothing may be imported that a working folder could replace, not
# even `__future__`.
from lockstep.core import safe_path  # isort: skip

safe_path.leave_working_folder()

TYPE_CHECKING = False  # importing `typing` would take most of the time
if TYPE_CHECKING:
    from typing import Any

    from lockstep.config.schema import Config as Config
    from lockstep.core.errors import CollectiveTimeout as CollectiveTimeout
    from lockstep.core.errors import ConfigError as ConfigError
    from lockstep.core.errors import Failure as Failure
    from lockstep.core.errors import RunFailed as RunFailed
    from lockstep.core.errors import VerificationError as VerificationError
    from lockstep.core.protocols import Monitor as Monitor
    from lockstep.core.protocols import Objective as Objective
    from lockstep.core.protocols import ObjectStore as ObjectStore
    from lockstep.core.protocols import Source as Source
    from lockstep.core.protocols import Transform as Transform
    from lockstep.core.records import Batch as Batch
    from lockstep.core.records import DataFacts as DataFacts
    from lockstep.core.records import EvaluationReport as EvaluationReport
    from lockstep.core.records import Request as Request
    from lockstep.core.records import RestartReport as RestartReport
    from lockstep.core.records import RunInfo as RunInfo
    from lockstep.core.records import SaveReport as SaveReport
    from lockstep.core.records import StepReport as StepReport
    from lockstep.distributed.forward_mode import positions as positions
    from lockstep.distributed.generators import register_generator as register_generator
    from lockstep.distributed.user_collectives import broadcast as broadcast
    from lockstep.distributed.user_collectives import gather as gather
    from lockstep.distributed.user_collectives import print_once as print_once
    from lockstep.interop.importing import import_config as import_config
    from lockstep.launch.outcome import exit_with as exit_with
    from lockstep.models.build import count_parameters as count_parameters
    from lockstep.monitor import metric_log as log
    from lockstep.proof.api import verify as verify
    from lockstep.strategies.record import Strategy as Strategy
    from lockstep.strategies.registry import register_strategy as register_strategy
    from lockstep.training.activation_checkpointing import checkpoint_activations as checkpoint_activations
    from lockstep.training.api import session as session
    from lockstep.training.api import train as train
    from lockstep.training.session import Session as Session
    from lockstep.training.user_objects import Objects as Objects

__version__ = "0.1.0"

KEY_HINTS = "lockstep.interop.hints"
"""The module that knows other tools' keys: `config.hints` imports it when a config has an unknown one."""

_HOMES = {
    "Batch": "lockstep.core.records",
    "CollectiveTimeout": "lockstep.core.errors",
    "Config": "lockstep.config.schema",
    "ConfigError": "lockstep.core.errors",
    "DataFacts": "lockstep.core.records",
    "EvaluationReport": "lockstep.core.records",
    "Failure": "lockstep.core.errors",
    "Monitor": "lockstep.core.protocols",
    "ObjectStore": "lockstep.core.protocols",
    "Objective": "lockstep.core.protocols",
    "Objects": "lockstep.training.user_objects",
    "Request": "lockstep.core.records",
    "RestartReport": "lockstep.core.records",
    "RunFailed": "lockstep.core.errors",
    "RunInfo": "lockstep.core.records",
    "SaveReport": "lockstep.core.records",
    "Session": "lockstep.training.session",
    "Source": "lockstep.core.protocols",
    "StepReport": "lockstep.core.records",
    "Strategy": "lockstep.strategies.record",
    "Transform": "lockstep.core.protocols",
    "VerificationError": "lockstep.core.errors",
    "broadcast": "lockstep.distributed.user_collectives",
    "checkpoint_activations": "lockstep.training.activation_checkpointing",
    "count_parameters": "lockstep.models.build",
    "exit_with": "lockstep.launch.outcome",
    "gather": "lockstep.distributed.user_collectives",
    "import_config": "lockstep.interop.importing",
    "positions": "lockstep.distributed.forward_mode",
    "print_once": "lockstep.distributed.user_collectives",
    "register_generator": "lockstep.distributed.generators",
    "register_strategy": "lockstep.strategies.registry",
    "session": "lockstep.training.api",
    "train": "lockstep.training.api",
    "verify": "lockstep.proof.api",
}

_RENAMED = {
    "Distrust": "lockstep.VerificationError",
    "GiveUp": "lockstep.RunFailed",
    "Waited": "lockstep.CollectiveTimeout",
    "checkpoints": "session.checkpoints(folder)",
    "steps": "`for report in session`",
}

__all__ = ["__version__", "log", *sorted(_HOMES)]


def _refuse_other_systems() -> None:
    from lockstep.core.distribution import why_not_here

    why = why_not_here()
    if why is not None:
        raise ImportError(why)


def __getattr__(name: str) -> "Any":
    import importlib

    if name == "log":
        return importlib.import_module("lockstep.monitor.metric_log")
    if name in _HOMES:
        _refuse_other_systems()
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in _RENAMED:
        raise AttributeError(f"lockstep.{name} is now {_RENAMED[name]}")
    raise AttributeError(f"lockstep has no {name!r}; it has {', '.join(__all__)}")
