"""trackio: metrics, histograms, texts, images, tables and the config in a SQLite file; `trackio show` draws it.

A resumed run continues the same trackio run: of two points of a step, the later one (`run/attempt`) counts.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lockstep.core.distribution import pip_install
from lockstep.core.errors import ConfigError
from lockstep.core.media import LoggedImage, LoggedTable
from lockstep.core.slow_imports import import_beside
from lockstep.core.tracking import Bins, TrackedRun, Tracker, edges_and_counts, refuse_unknown
from lockstep.monitor.media import file_name

_log = logging.getLogger("lockstep.monitor")


class TrackioTracker(Tracker):
    """Records a run with trackio, in `TRACKIO_DIR`; `arguments` are further ones of `trackio.init`."""

    def __init__(self, project: str = "lockstep", **arguments: Any) -> None:
        if find_spec("trackio") is None:
            raise ConfigError(f"the tracker trackio needs a package that isn't installed: {pip_install('trackio')}")
        self._trackio: Any = None
        self._arguments: dict[str, Any] = {"project": project, **arguments}
        self._run: Any = None
        self._attempt = 1
        self._last_step = 0

    def start(self, run: TrackedRun) -> str:
        self._trackio = trackio = import_beside("trackio")
        refuse_unknown("trackio.init", self._arguments, trackio.init)
        for name in ("trackio", "trackio.run", "trackio.utils"):  # standard output is the run's, and may be JSON
            vars(import_beside(name))["print"] = _quiet
        identifier = run.tracker_id or f"{run.name}-{run.id[:8]}"
        options = {
            "name": identifier,
            "config": {**run.config, "environment": dict(run.environment)},
            "resume": "allow",
            "embed": False,
            "auto_log_gpu": False,
            "auto_log_cpu": False,
        }
        self._run = trackio.init(**options | self._arguments)
        return identifier

    def scalars(self, step: int, values: Mapping[str, Any]) -> None:
        self._last_step = step
        self._run.log({**values, "run/attempt": self._attempt}, step=step)

    def histograms(self, step: int, histograms: Mapping[str, Bins]) -> None:
        pairs = {name: edges_and_counts(bins)[::-1] for name, bins in histograms.items() if bins}
        self.scalars(step, {name: self._trackio.Histogram(np_histogram=pair) for name, pair in pairs.items()})

    def texts(self, step: int, texts: Mapping[str, str]) -> None:
        self.scalars(step, {name: self._trackio.Markdown(text) for name, text in texts.items()})

    def images(self, step: int, images: Mapping[str, LoggedImage]) -> None:
        with TemporaryDirectory() as folder:
            values = {}
            for name, image in images.items():
                file = Path(folder) / f"{file_name(name)}.png"
                file.write_bytes(image.png())
                values[name] = self._trackio.Image(file)
            self.scalars(step, values)  # which copies the files

    def tables(self, step: int, tables: Mapping[str, LoggedTable]) -> None:
        for name, table in tables.items():
            rows = [list(cells) for cells in table.rows]
            self.scalars(step, {name: self._trackio.Table(columns=list(table.columns), data=rows)})

    def checkpoint(self, step: int, reference: str) -> None:
        self.scalars(step, {"checkpoint": reference})

    def rolled_back(self, step: int, attempt: int) -> None:
        self._attempt = attempt
        self.scalars(step, {"run/resumed_from": step})

    def finish(self, failure: str | None) -> None:
        if self._run is None:
            return
        if failure is not None:
            self.scalars(self._last_step, {"run/failure": failure})
        self._run.finish()


def _quiet(*values: object, **options: object) -> None:
    _log.debug("trackio: %s", " ".join(map(str, values)))
