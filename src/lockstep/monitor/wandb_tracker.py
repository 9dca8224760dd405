"""Weights & Biases, also the base of what has its interface.

Without a network `mode: offline` writes files that `wandb sync RUN/trackers/wandb/offline-*` uploads; so does a run
that W&B's server doesn't answer. W&B refuses steps that go back, as in a resumed run: so `step` is a metric of its own,
and of two points of a step, the later one (`run/attempt`) counts.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, ClassVar

from lockstep.core.distribution import pip_install
from lockstep.core.errors import ConfigError
from lockstep.core.media import LoggedImage, LoggedTable
from lockstep.core.slow_imports import import_beside
from lockstep.core.tracking import Bins, TrackedRun, Tracker, edges_and_counts, refuse_unknown

_log = logging.getLogger("lockstep.monitor")
_INIT_S = 10.0  # for a server that does not answer; less than the end of a run waits
_FLUSH = "x_transaction_log_flush_interval"  # 15 s by default, which a process that is killed would take with it


class LoggedRun(Tracker):
    """A run that a package with W&B's interface records.

    Args:
        arguments: Further ones of the package's `init`, such as `mode`, `entity`, `group`, `tags`.
    """

    package: ClassVar[str]

    def __init__(self, project: str = "lockstep", **arguments: Any) -> None:
        if find_spec(self.package) is None:
            install = pip_install(self.package)
            raise ConfigError(f"the tracker {self.package} needs a package that isn't installed: {install}")
        self._module: Any = None
        self._arguments: dict[str, Any] = {"project": project, **arguments}
        self._run: Any = None
        self._attempt = 1

    def histograms(self, step: int, histograms: Mapping[str, Bins]) -> None:
        pairs = {name: edges_and_counts(bins)[::-1] for name, bins in histograms.items() if bins}
        self.scalars(step, {name: self._module.Histogram(np_histogram=pair) for name, pair in pairs.items()})

    def tables(self, step: int, tables: Mapping[str, LoggedTable]) -> None:
        for name, table in tables.items():
            rows = [list(cells) for cells in table.rows]
            self.scalars(step, {name: self._module.Table(columns=list(table.columns), data=rows)})

    def rolled_back(self, step: int, attempt: int) -> None:
        self._attempt = attempt
        self.scalars(step, {"run/resumed_from": step})


class WandbTracker(LoggedRun):
    """Records a run with Weights & Biases."""

    package = "wandb"
    _warned = False

    def start(self, run: TrackedRun) -> str:
        self._module = import_beside("wandb")
        refuse_unknown("wandb.init", self._arguments, self._module.init)
        identifier = run.tracker_id or run.id[:32]
        options = {
            "id": identifier,
            "name": run.name,
            "dir": run.folder,
            "config": {**run.config, "environment": dict(run.environment)},
            "resume": "allow",
            "settings": _settings(self._module),
        }
        self._run = self._init(options | self._arguments)
        _silence_own_log()
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        return identifier

    def _init(self, options: dict[str, Any]) -> Any:
        try:
            return self._module.init(**options)
        except self._module.errors.CommError as error:
            reason = str(error).partition("\n")[0]
            _log.warning("Weights & Biases can't be reached (%s): this attempt is recorded as in mode offline", reason)
            self._module.teardown()  # its process still has the run's identifier
            return self._module.init(**options | {"mode": "offline"})

    def scalars(self, step: int, values: Mapping[str, Any]) -> None:
        self._run.log({"step": step, "run/attempt": self._attempt, **values})

    def texts(self, step: int, texts: Mapping[str, str]) -> None:
        for name, text in texts.items():
            self.scalars(step, {name: self._module.Table(columns=["step", "text"], data=[[step, text]])})

    def images(self, step: int, images: Mapping[str, LoggedImage]) -> None:
        if find_spec("PIL") is None:
            if not self._warned:
                _log.warning("Weights & Biases needs pillow for images, which are left out: %s", pip_install("wandb"))
            self._warned = True
            return
        from PIL.Image import frombytes

        modes = {1: "L", 3: "RGB", 4: "RGBA"}
        for name, image in images.items():
            pixels = frombytes(modes[image.channels], (image.width, image.height), image.pixels)
            self.scalars(step, {name: self._module.Image(pixels)})

    def checkpoint(self, step: int, reference: str) -> None:
        self._run.summary["checkpoint"] = reference

    def finish(self, failure: str | None) -> None:
        if self._run is not None:
            self._run.finish(exit_code=0 if failure is None else 1)


def _silence_own_log() -> None:
    """Let W&B's own log lose lines that the disk has no space for: logging would print a traceback for each."""
    for handler in logging.getLogger("wandb").handlers:
        handler.handleError = lambda record: None  # type: ignore[method-assign]


def _settings(wandb: Any) -> Any:
    """Return W&B's settings: nothing printed, Lockstep's own meters, what is recorded on the disk within a second."""
    flush = {_FLUSH: 1.0} if _FLUSH in wandb.Settings.model_fields else {}
    return wandb.Settings(silent=True, console="off", x_disable_stats=True, init_timeout=_INIT_S, **flush)
