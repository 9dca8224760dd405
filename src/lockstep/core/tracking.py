"""The protocol of trackers: what records a run elsewhere (Weights & Biases, MLflow, one of your own).

    reports --> queue, bounded --> thread: TrackerMonitor --> Tracker.scalars(step, {"train/loss": 2.1, ...})

All methods are called in one thread, and may be slow: the run does not wait for them.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from lockstep.core.closest import did_you_mean
from lockstep.core.errors import ConfigError
from lockstep.core.media import LoggedImage, LoggedTable

TRACKERS = {
    "mlflow": "lockstep.monitor.mlflow_tracker:MlflowTracker",
    "trackio": "lockstep.monitor.trackio_tracker:TrackioTracker",
    "wandb": "lockstep.monitor.wandb_tracker:WandbTracker",
}
"""The trackers that Lockstep has, by their names in a config."""

Bins = Sequence[tuple[float, float, int]]
"""A histogram as (low, high, count) of the bins that are not empty, in order."""


def refuse_unknown(name: str, arguments: Iterable[str], function: Callable[..., Any]) -> None:
    """Raise ConfigError for an argument that a tracker's own function doesn't have."""
    known = inspect.signature(function).parameters
    unknown = [argument for argument in arguments if argument not in known]
    if unknown and all(each.kind is not inspect.Parameter.VAR_KEYWORD for each in known.values()):
        raise ConfigError(f"{name} has no argument {unknown[0]}; {did_you_mean(unknown[0], known)}")


def edges_and_counts(bins: Bins) -> tuple[list[float], list[int]]:
    """Return the edges of adjoining bins, one more than their counts."""
    edges, counts = [bins[0][0]], []
    for low, high, count in bins:
        if low > edges[-1]:
            edges.append(low)
            counts.append(0)
        edges.append(high)
        counts.append(count)
    return edges, counts


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """A run as a tracker sees it.

    Attributes:
        id: The same for all attempts.
        name: Of its recipe.
        folder: For the tracker's own files; it exists.
        config: As JSON values, without secrets.
        environment: Versions, platform, git state and command line, as JSON values.
        tracker_id: What `Tracker.start` returned in an earlier attempt.
        resumed_from: Step of the checkpoint that this attempt resumed from, if any.
    """

    id: str
    name: str
    folder: str
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    tracker_id: str | None = None
    resumed_from: int | None = None


@runtime_checkable
class Tracker(Protocol):
    """Records a run elsewhere. Subclass it and override what you need.

    A tracker that raises is dropped with a warning. A slow one loses reports once its queue is full.
    """

    @abstractmethod
    def start(self, run: TrackedRun) -> str | None:
        """Start or continue recording; return an identifier for the next attempt."""

    @abstractmethod
    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Record numbers, which may be NaN or infinite, by names such as `train/loss`."""

    def histograms(self, step: int, histograms: Mapping[str, Bins]) -> None:
        """Record histograms. Does nothing by default."""
        return

    def texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Record texts. Does nothing by default."""
        return

    def images(self, step: int, images: Mapping[str, LoggedImage]) -> None:
        """Record images. Does nothing by default."""
        return

    def tables(self, step: int, tables: Mapping[str, LoggedTable]) -> None:
        """Record tables. Does nothing by default."""
        return

    def checkpoint(self, step: int, reference: str) -> None:
        """Record the path or address of a checkpoint. Does nothing by default."""
        return

    def rolled_back(self, step: int, attempt: int) -> None:
        """Mark that this attempt (from 1) repeats what follows `step`. Does nothing by default."""
        return

    def finish(self, failure: str | None) -> None:
        """End recording; `failure` is None if the run is finished."""
        return
