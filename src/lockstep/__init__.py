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

    from lockstep.config.schema import Config as Config
    from lockstep.core.errors import CollectiveTimeout as CollectiveTimeout
    from lockstep.core.errors import ConfigError as ConfigError
    from lockstep.core.errors import Failure as Failure
    from lockstep.core.errors import RunFailed as RunFailed
    from lockstep.core.errors import VerificationError as VerificationError
    from lockstep.core.jobs import JobCommand as JobCommand
    from lockstep.core.jobs import JobStatus as JobStatus
    from lockstep.core.jobs import LaunchedJob as LaunchedJob
    from lockstep.core.jobs import LaunchPlan as LaunchPlan
    from lockstep.core.media import LoggedImage as LoggedImage
    from lockstep.core.media import LoggedTable as LoggedTable
    from lockstep.core.progress import step as step
    from lockstep.core.protocols import Launcher as Launcher
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
    from lockstep.core.tracking import Bins as Bins
    from lockstep.core.tracking import TrackedRun as TrackedRun
    from lockstep.core.tracking import Tracker as Tracker
    from lockstep.data.weighted import WeightedDataset as WeightedDataset
    from lockstep.distributed.forward_mode import positions as positions
    from lockstep.distributed.generators import register_generator as register_generator
    from lockstep.distributed.metric_reduction import reduce as reduce
    from lockstep.distributed.user_collectives import broadcast as broadcast
    from lockstep.distributed.user_collectives import gather as gather
    from lockstep.distributed.user_collectives import print_once as print_once
    from lockstep.interop.importing import import_config as import_config
    from lockstep.launch.outcome import exit_with as exit_with
    from lockstep.models.build import count_parameters as count_parameters
    from lockstep.monitor import metric_log as log
    from lockstep.monitor.metric_log import merged_histogram as merged_histogram
    from lockstep.monitor.own_loop import GPUMonitor as GPUMonitor
    from lockstep.monitor.own_loop import ThroughputTracker as ThroughputTracker
    from lockstep.monitor.own_loop import rank_logger as rank_logger
    from lockstep.proof.api import verify as verify
    from lockstep.simulation.planning import estimate_memory as estimate_memory
    from lockstep.strategies.record import Strategy as Strategy
    from lockstep.strategies.registry import register_strategy as register_strategy
    from lockstep.training.activation_checkpointing import checkpoint_activations as checkpoint_activations
    from lockstep.training.api import session as session
    from lockstep.training.api import train as train
    from lockstep.training.session import Session as Session
    from lockstep.training.user_objects import Objects as Objects

__version__ = "0.1.0"

KEY_HINTS = "lockstep.interop.hints"
"""The module with other tools' keys, which `config.validation_errors` imports when a config has an unknown key."""

_HOMES = {
    name: module
    for module, names in {
        "lockstep.config.schema": "Config",
        "lockstep.core.errors": "CollectiveTimeout ConfigError Failure RunFailed VerificationError",
        "lockstep.core.jobs": "JobCommand JobStatus LaunchPlan LaunchedJob",
        "lockstep.core.media": "LoggedImage LoggedTable",
        "lockstep.core.progress": "step",
        "lockstep.core.protocols": "Launcher Monitor ObjectStore Objective Source Transform",
        "lockstep.core.records": "Batch DataFacts EvaluationReport Request RestartReport RunInfo SaveReport StepReport",
        "lockstep.core.tracking": "Bins TrackedRun Tracker",
        "lockstep.data.weighted": "WeightedDataset",
        "lockstep.distributed.forward_mode": "positions",
        "lockstep.distributed.generators": "register_generator",
        "lockstep.distributed.metric_reduction": "reduce",
        "lockstep.distributed.user_collectives": "broadcast gather print_once",
        "lockstep.interop.importing": "import_config",
        "lockstep.launch.outcome": "exit_with",
        "lockstep.models.build": "count_parameters",
        "lockstep.monitor.metric_log": "merged_histogram",
        "lockstep.monitor.own_loop": "GPUMonitor ThroughputTracker rank_logger",
        "lockstep.proof.api": "verify",
        "lockstep.simulation.planning": "estimate_memory",
        "lockstep.strategies.record": "Strategy",
        "lockstep.strategies.registry": "register_strategy",
        "lockstep.training.activation_checkpointing": "checkpoint_activations",
        "lockstep.training.api": "session train",
        "lockstep.training.session": "Session",
        "lockstep.training.user_objects": "Objects",
    }.items()
    for name in names.split()
}

__all__ = ["__version__", "log", *sorted(_HOMES)]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> "Any":
    import importlib

    if name == "log":
        return importlib.import_module("lockstep.monitor.metric_log")
    if name in _HOMES:
        from lockstep.core.distribution import why_not_here

        reason = why_not_here()
        if reason is not None:
            raise ImportError(reason)
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"lockstep has no {name!r}; it has {', '.join(__all__)}")
