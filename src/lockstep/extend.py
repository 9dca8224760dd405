"""Names that extensions implement and receive: launchers, monitors, trackers, strategies, transforms, stores."""

from __future__ import annotations

from lockstep.core.jobs import JobCommand as JobCommand
from lockstep.core.jobs import JobStatus as JobStatus
from lockstep.core.jobs import LaunchedJob as LaunchedJob
from lockstep.core.jobs import LaunchPlan as LaunchPlan
from lockstep.core.media import LoggedImage as LoggedImage
from lockstep.core.media import LoggedTable as LoggedTable
from lockstep.core.protocols import Launcher as Launcher
from lockstep.core.protocols import Monitor as Monitor
from lockstep.core.protocols import ObjectStore as ObjectStore
from lockstep.core.protocols import Transform as Transform
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
from lockstep.strategies.record import Strategy as Strategy
from lockstep.strategies.registry import register_strategy as register_strategy
